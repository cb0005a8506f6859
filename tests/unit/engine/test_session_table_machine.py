"""The session table and the block manager, against a naive model that remembers everything.

The model is a dictionary of slots, written only by "forward passes", and the token list of every caller. After each
rule every session's slots must hold exactly its tokens, and the books must balance.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.contract.errors import KvMiss, StaleEpoch
from specdec.contract.types import BLOCK_TOKENS, SessionPosition, TokenIds
from specdec.core.reference import chain_hash
from specdec.engine.sessions.block_manager import BlockManager, blocks_for
from specdec.engine.sessions.sequence import Sequence
from specdec.engine.sessions.table import SessionTable
from tests.support.round_driver import make_round

SESSION_IDS = ("a", "b", "c", "d")
#: Long texts with common beginnings, so that sessions share blocks and then part.
TEXTS = ([1] * 100, [1] * 40 + [2] * 60, [1] * 70 + [3] * 30, [2, 1] * 50)
PIN_TTL_S = 5.0


class SessionTableMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(7, 30))
    def build(self, num_blocks):
        self.now_s = 0.0
        self.num_blocks = num_blocks
        self.blocks = BlockManager(num_blocks)
        self.table = SessionTable(self.blocks, pin_ttl_s=PIN_TTL_S, max_sessions=3, clock=lambda: self.now_s)
        self.slots: dict[int, int] = {}
        self.keys = dict.fromkeys(SESSION_IDS, (1, 0))
        self.running: dict[str, int] = {}  # committed length
        self.waiting: dict[str, tuple[int, int]] = {}  # committed length, length with drafts
        self.reserved = dict.fromkeys(SESSION_IDS, 0)

    @rule(
        session_id=st.sampled_from(SESSION_IDS),
        text=st.sampled_from(TEXTS),
        committed_len=st.integers(1, 100),
        start=st.integers(0, 100),
        num_drafts=st.integers(0, 5),
        is_new_epoch=st.booleans(),
        is_crowded=st.booleans(),
        is_run=st.booleans(),
    )
    def call(self, session_id, text, committed_len, start, num_drafts, is_new_epoch, is_crowded, is_run):
        """A call that assumes any start; a miss is answered by sending again from where it says."""
        if session_id in self.running or session_id in self.waiting:
            return
        epoch, round_id = self.keys[session_id]
        # Within an epoch committed tokens do not change; another text is another epoch's.
        held = self._held(session_id)
        is_new_epoch = is_new_epoch or held[:committed_len] != text[:committed_len][: len(held)]
        self.keys[session_id] = epoch, round_id = (epoch + 1, 0) if is_new_epoch else (epoch, round_id + 1)
        start = min(start, committed_len - 1)
        request = make_round(text[:committed_len], session_id=session_id, epoch=epoch, round_id=round_id, start=start)
        drafts = np.full(num_drafts, 9, dtype=np.uint32)
        expect_hit = held[:start] == text[:start] and len(held) >= start
        have = self._have(request, drafts)
        assert (have is None) == (expect_hit or start == 0)
        if have is not None:
            assert have % BLOCK_TOKENS == 0
            assert have <= start
            pinned = list(self.table.get(session_id).block_table)
            if is_crowded:
                self._take_all_blocks_there_are()
            assert self.table.get(session_id).block_table == pinned
            request = make_round(
                text[:committed_len], session_id=session_id, epoch=epoch, round_id=round_id, start=have
            )
            assert self._have(request, drafts) is None
        sequence = self.table.get(session_id)
        assert sequence.token_ids.tolist() == text[:committed_len] + drafts.tolist()
        assert sequence.kv_len < committed_len
        self.waiting[session_id] = committed_len, len(sequence)
        if is_run and self._reserve(session_id):
            self._run(session_id, len(sequence))
            del self.running[session_id]
            self.table.settle(sequence)
            assert len(sequence) == committed_len + num_drafts

    @rule(session_id=st.sampled_from(SESSION_IDS), reserved_len=st.sampled_from([0, 30, 110]))
    def state_a_length(self, session_id, reserved_len):
        """The next calls of the session reserve blocks for this many tokens."""
        self.reserved[session_id] = reserved_len

    @rule(session_id=st.sampled_from(SESSION_IDS))
    def end_turn(self, session_id):
        sequence = self.table.get(session_id)
        if sequence is not None and not sequence.in_flight:
            self.table.end_turn(sequence)
            assert len(sequence.block_table) == blocks_for(sequence.kv_len)

    @rule(session_id=st.sampled_from(SESSION_IDS), epoch_back=st.integers(0, 1), round_back=st.integers(1, 2))
    def call_late(self, session_id, epoch_back, round_back):
        epoch, round_id = self.keys[session_id]
        if self.table.get(session_id) is None or self.table.get(session_id).newest_round < 0:
            return
        late = make_round([1], session_id=session_id, epoch=epoch - epoch_back, round_id=round_id - round_back)
        try:
            self.table.fence(late)
        except StaleEpoch:
            return
        raise AssertionError("a late call was let in")

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def reserve(self, data):
        self._reserve(data.draw(st.sampled_from(sorted(self.waiting))))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 60))
    def run(self, data, num_tokens):
        self._run(data.draw(st.sampled_from(sorted(self.running))), num_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_crash=st.booleans())
    def end(self, data, is_crash):
        session_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[session_id]
        sequence = self.table.get(session_id)
        if is_crash:
            self.table.invalidate(sequence)
            assert len(sequence) == 0
        else:
            self.table.settle(sequence)

    @precondition(lambda self: len(self.waiting) + len(self.running) > 2)
    @rule(session_id=st.sampled_from(SESSION_IDS))
    def release(self, session_id):
        self.running.pop(session_id, None)
        self.waiting.pop(session_id, None)
        self.table.release(session_id)
        assert self.table.get(session_id) is None

    @rule(
        session_id=st.sampled_from(SESSION_IDS),
        depth=st.integers(0, 3),
        back=st.integers(0, 20),
        num_tokens=st.integers(1, 20),
        token_id=st.integers(4, 7),
    )
    def fork(self, session_id, depth, back, num_tokens, token_id):
        """An idle session, or a fork of it, is forked somewhere behind its end and runs a few tokens."""
        root = self.table.get(session_id)
        if root is None or root.in_flight:
            return
        source = [root, *root.forks][min(depth, len(root.forks))]
        length = max(0, source.kv_len - back)
        fork = self.table.fork(source, length, length + num_tokens)
        if fork is None:
            assert self.blocks.num_available < self.num_blocks // 4 + 3
            return
        first = length // BLOCK_TOKENS
        if length % BLOCK_TOKENS:
            for offset in range(BLOCK_TOKENS):
                token = self.slots.get(source.block_table[first] * BLOCK_TOKENS + offset)
                if token is not None:
                    self.slots[fork.block_table[first] * BLOCK_TOKENS + offset] = token
        fork.append(np.full(num_tokens, token_id, dtype=np.uint32))
        self._write(fork, num_tokens)

    @rule(session_id=st.sampled_from(SESSION_IDS), which=st.integers(0, 10), num_drafts=st.integers(0, 5))
    def adopt(self, session_id, which, num_drafts):
        """A call that a fork assumed: all its tokens, or all but the last few, are committed."""
        root = self.table.get(session_id)
        if root is None or not root.forks:
            return
        forks = list(root.forks)
        fork = forks[which % len(forks)]
        tokens = fork.token_ids.tolist()
        committed = tokens[: max(1, len(tokens) - num_drafts)]
        epoch, round_id = self.keys[session_id]
        self.keys[session_id] = epoch, round_id + 1
        request = make_round(committed, session_id=session_id, epoch=epoch, round_id=round_id + 1)
        self.table.adopt_fork(self.table.fence(request), request, fork)
        assert root.token_ids.tolist() == tokens
        assert root.hash_at(len(tokens)) == chain_hash(tokens)
        assert not root.forks
        assert all(not other.block_table and other.root is None for other in forks)
        self.table.publish(root, len(committed))
        self.table.settle(root)

    @rule(seconds=st.sampled_from([1.0, PIN_TTL_S + 1.0]))
    def wait(self, seconds):
        self.now_s += seconds

    @invariant()
    def the_books_balance(self):
        if hasattr(self, "table"):
            self.table.check_integrity()

    @invariant()
    def every_session_reads_its_own_tokens(self):
        for session_id in SESSION_IDS if hasattr(self, "table") else ():
            sequence = self.table.get(session_id)
            if sequence is not None:
                for owner in (sequence, *sequence.forks):
                    assert self._read(owner) == owner.token_ids[: owner.kv_len].tolist()

    def _reserve(self, session_id: str) -> bool:
        committed_len, length = self.waiting[session_id]
        sequence = self.table.get(session_id)
        behind = [self.table.get(other) for other in self.waiting if other != session_id]
        if not self.table.reserve(
            sequence,
            committed_len=committed_len,
            max_kv_len=length,
            reserved_len=self.reserved[session_id],
            preemptable=() if self.running else behind,
        ):
            return False
        assert len(sequence.block_table) >= blocks_for(length)
        del self.waiting[session_id]
        self.running[session_id] = committed_len
        assert sequence.kv_len < committed_len
        return True

    def _run(self, session_id: str, num_tokens: int) -> None:
        """Part of a forward pass."""
        sequence = self.table.get(session_id)
        self._write(sequence, num_tokens)
        self.table.publish(sequence, self.running[session_id])

    def _write(self, sequence: Sequence, num_tokens: int) -> None:
        for position in range(sequence.kv_len, min(len(sequence), sequence.kv_len + num_tokens)):
            slot = sequence.block_table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
            self.slots[slot] = int(sequence.token_ids[position])
            sequence.kv_len += 1

    def _have(self, request: SessionPosition, drafts: TokenIds) -> int | None:
        """Lets a call in; returns what a miss says, or None."""
        sequence = self.table.fence(request)
        try:
            self.table.align(sequence, request, drafts)
        except KvMiss as miss:
            return miss.have
        return None

    def _held(self, session_id) -> list[int]:
        sequence = self.table.get(session_id)
        return [] if sequence is None else sequence.token_ids.tolist()

    def _read(self, sequence: Sequence) -> list[int]:
        return [
            self.slots[sequence.block_table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS]
            for position in range(sequence.kv_len)
        ]

    def _take_all_blocks_there_are(self) -> None:
        """Another session's call takes every block that it can get."""
        greedy = Sequence("greedy")
        for num_blocks in range(self.num_blocks, 0, -1):
            if self.table.reserve(greedy, committed_len=0, max_kv_len=num_blocks * BLOCK_TOKENS):
                break
        self.blocks.free(greedy.block_table)


TestSessionTableMachine = SessionTableMachine.TestCase
TestSessionTableMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
