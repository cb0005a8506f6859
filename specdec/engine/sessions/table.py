"""The position protocol (docs/protocol.md section 5): find a call's session and align it with the committed tokens.

`specdec.engine.sessions.calls` passes a round through three gates: `fence` (is it the newest?), `align` (which of its
tokens have KV here?) and `reserve` (are there blocks for the others?). With its blocks the round is scheduled
(`specdec.engine.schedule.scheduler`). Draft and target service share this implementation.

KV_MISS(have) names only a length that both sides certainly share, because a second miss in one round counts as a
replica failure. Within an epoch committed tokens never change, so `have` is the last block boundary that the epoch
committed and that is still held. Across epochs (a coordinator restarted, or the store lost its last second) nothing is
certain, and `have` is 0. This costs bytes but no forward passes: a miss drops nothing, and tokens that are sent again
keep their KV if they are equal.

Use from one thread alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from itertools import count

import numpy as np

from specdec.contract.errors import KvMiss, StaleEpoch
from specdec.contract.types import BLOCK_TOKENS, SessionPosition, TokenIds
from specdec.engine.sessions.block_manager import BlockManager, blocks_for
from specdec.engine.sessions.recurrent_states import RecurrentStates, all_tables
from specdec.engine.sessions.reservations import Takeover, is_idle, next_release_s, require_pool
from specdec.engine.sessions.sequence import Sequence, StoredAnswer
from specdec.engine.sessions.tenant_use import TenantUse


def check_integrity(blocks: BlockManager, sequences: Collection[Sequence]) -> None:
    """Check the sequences of all sessions.

    Raises:
        RuntimeError: a block has more or fewer owners than counted, or a session's lengths contradict each other.
    """
    forks = [fork for sequence in sequences for fork in sequence.forks]
    blocks.check_integrity([owner.block_table for owner in (*sequences, *forks)])
    for fork in forks:
        if fork.root is None or not fork.kv_len <= min(len(fork), len(fork.block_table) * BLOCK_TOKENS):
            raise RuntimeError(f"a fork of session {fork.session_id} has outlived its root or its room")
    for sequence in sequences:
        published = sequence.num_published * BLOCK_TOKENS
        capacity = len(sequence.block_table) * BLOCK_TOKENS
        if not published <= sequence.kv_len <= min(len(sequence), capacity):
            raise RuntimeError(
                f"session {sequence.session_id}: {published} published, {sequence.kv_len} with KV, "
                f"{len(sequence)} tokens, room for {capacity}"
            )
        most = max(sequence.kv_len, sequence.reserved_len)
        has_not_run = len(sequence) > sequence.known_len
        if not sequence.in_flight and (has_not_run or len(sequence.block_table) > blocks_for(most)):
            raise RuntimeError(f"idle session {sequence.session_id} holds more than its KV and its turn need")


#: Time in which a session's blocks are not evicted after a miss, while the caller sends the tokens again.
DEFAULT_PIN_TTL_S = 5.0

#: 1 / _SPARE_SHARE of the pool is never given to forks, so that they do not evict sessions or the prefix cache.
_SPARE_SHARE = 4

#: Time after its last call in which a session counts as running.
_RUNNING_S = 1.0

#: Time after its last call in which the turn of a session with reserved blocks is expected to call again. Usually its
#: coordinator says when it ends; the time is for coordinators that died. A turn that calls later waits for blocks.
DEFAULT_HOLD_S = 10.0

#: Number of sessions that are remembered, with or without KV; the least recently used idle ones are dropped first.
DEFAULT_MAX_SESSIONS = 4096

#: Number of newest answers kept for repetition; the repetition of an older one is computed again. The largest answers,
#: with distributions over a whole vocabulary, have megabytes.
MAX_ANSWERS = 256


class SessionTable:
    """All sessions of a replica, least recently used first."""

    def __init__(
        self,
        blocks: BlockManager,
        states: BlockManager | None = None,
        *,
        pin_ttl_s: float = DEFAULT_PIN_TTL_S,
        hold_s: float = DEFAULT_HOLD_S,
        max_sessions: int = DEFAULT_MAX_SESSIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = blocks
        self.states = states
        """Slots for the recurrent states of a hybrid; None for other models."""
        self._pin_ttl_s = pin_ttl_s
        self._hold_s = hold_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._sessions: OrderedDict[str, Sequence] = OrderedDict()
        self.num_preemptions = 0
        """Number of times that a running turn gave up its KV to another one."""
        self.num_replayed_tokens = 0
        """Number of tokens that ran again because a recurrent state cannot go back."""
        self.num_withdrawn_snapshots = 0
        """Number of snapshots that are no longer used, because a session that began at one failed."""
        self._turns = count(1)
        self.tenants = TenantUse()
        self._answered: OrderedDict[Sequence, None] = OrderedDict()  # those with a stored answer, oldest answer first

    @property
    def num_with_kv(self) -> int:
        """Number of sessions that hold KV blocks."""
        return sum(1 for sequence in list(self._sessions.values()) if sequence.block_table)

    @property
    def num_running(self) -> int:
        """Number of sessions with a running call, or with a call within the last second: between two calls of a round
        the other service works for them."""
        since_s = self._clock() - _RUNNING_S
        return sum(
            1 for sequence in list(self._sessions.values()) if sequence.in_flight or sequence.called_s >= since_s
        )

    @property
    def num_active_blocks(self) -> int:
        """Number of KV blocks of sessions that are running (as `num_running` says), held or pinned, with those that are
        reserved for them. Any thread may call."""
        now_s = self._clock()
        active: set[int] = set()
        for sequence in list(self._sessions.values()):
            if sequence.called_s >= now_s - _RUNNING_S or not is_idle(sequence, now_s):
                active.update(sequence.block_table)
        return len(active)

    @property
    def num_own_slots(self) -> int:
        """Number of slots for recurrent states that end with their sessions. Any thread may call."""
        return sum(each.states.num_own for each in list(self._sessions.values()) if each.states is not None)

    @property
    def now_s(self) -> float:
        """Time by the table's clock."""
        return self._clock()

    def get(self, session_id: str) -> Sequence | None:
        """Return a session's sequence, or None for an unknown id."""
        return self._sessions.get(session_id)

    def fence(self, request: SessionPosition) -> Sequence:
        """Find or open the session of a call.

        Raises:
            StaleEpoch: a newer epoch, or a newer round of this epoch, has been seen.
        """
        sequence = self._sessions.get(request.session_id)
        if sequence is None:
            states = None if self.states is None else RecurrentStates(self.states)
            sequence = self._sessions[request.session_id] = Sequence(request.session_id, request.tenant, states)
            sequence.turn_order = next(self._turns)
            self.tenants.opened(sequence)
            self._drop_oldest()
        elif (request.epoch, request.round_id) < (sequence.epoch, sequence.newest_round):
            raise StaleEpoch(
                f"session {request.session_id} is at epoch {sequence.epoch} round {sequence.newest_round}, "
                f"the call is of epoch {request.epoch} round {request.round_id}",
                epoch=sequence.epoch,
            )
        self._sessions.move_to_end(request.session_id)
        sequence.called_s = self._clock()
        return sequence

    def align(self, sequence: Sequence, request: SessionPosition, draft_token_ids: TokenIds) -> None:
        """Make `sequence` hold exactly the call's tokens, with as much KV as is certainly valid.

        At least the last committed token is left without KV, because its logits are always needed. `reserve` looks up
        published blocks of other sessions.

        Raises:
            KvMiss: the session's first `start` tokens are not known here; its blocks are pinned until the resend.
        """
        self._advance_key(sequence, request)
        if not self.knows_start(sequence, request):
            self._miss(sequence, request)
        sequence.pinned_until_s = float("-inf")
        keep = request.start + common_length(sequence.token_ids[request.start :], request.token_ids)
        sequence.truncate_to(min(keep, request.committed_len - 1), self.blocks)
        sequence.append(request.token_ids[len(sequence) - request.start :])
        sequence.confirmed_len = request.committed_len
        sequence.append(draft_token_ids)
        sequence.in_flight = True

    def knows_start(self, sequence: Sequence, request: SessionPosition) -> bool:
        """Return whether the session's first `start` tokens are the ones that have run here."""
        return request.start == 0 or (
            request.start <= sequence.known_len and sequence.hash_at(request.start) == request.prefix_hash
        )

    def fork(self, sequence: Sequence, length: int, capacity: int) -> Sequence | None:
        """Fork a sequence or a fork after `length` tokens, with blocks for `capacity` tokens; see `Sequence.fork`.

        Returns:
            None if blocks are short, because sessions take precedence.
        """
        num_new = blocks_for(capacity) - length // BLOCK_TOKENS
        if self.blocks.num_available - num_new < self.blocks.num_blocks // _SPARE_SHARE:
            return None
        return sequence.fork(length, capacity, self.blocks)

    def adopt_fork(self, sequence: Sequence, request: SessionPosition, fork: Sequence) -> None:
        """Begin a call as `align` does, on a fork that holds the call's tokens, and some after them, with KV."""
        self._advance_key(sequence, request)
        sequence.pinned_until_s = float("-inf")
        sequence.become(fork, self.blocks)
        sequence.confirmed_len = request.committed_len
        sequence.in_flight = True

    def end_forks(self) -> None:
        """End the forks of every session."""
        for sequence in self._sessions.values():
            sequence.end_forks(self.blocks)

    def reserve(
        self,
        sequence: Sequence,
        *,
        committed_len: int,
        max_kv_len: int,
        reserved_len: int = 0,
        has_begun: bool = True,
        preemptable: Iterable[Sequence] = (),
    ) -> bool:
        """Give `sequence` published blocks for its committed tokens and new ones for the call and its turn.

        `reservations` says whose blocks are taken.

        Args:
            sequence: sequence of a call that is aligned.
            committed_len: number of committed tokens.
            max_kv_len: number of tokens that can need KV before the call ends.
            reserved_len: number of tokens for which blocks stay reserved until the turn ends; 0: none.
            has_begun: False for a call that waits or is refused if its whole reservation is not free. True: it may
                run without the reservation, and take blocks from younger turns.
            preemptable: sequences of waiting calls that come after this one, first the one to preempt first.

        Returns:
            False if running calls, turns or pins must release blocks first.

        Raises:
            ResourceExhausted: the whole pool is too small (KV_EXHAUSTED).
        """
        needed_len = max(max_kv_len, reserved_len)
        least_len = max_kv_len if has_begun else needed_len
        require_pool(least_len, self.blocks, self.states)
        # At least the last committed token must run, because its logits are always needed.
        sequence.adopt_published(committed_len - 1, self.blocks)
        if not sequence.grow(needed_len, self.blocks):
            self.end_forks()
            takeover = Takeover(self.blocks, self._sessions.values(), self._clock())
            num_preempted = takeover.run(sequence, needed_len, least_len if has_begun else None, preemptable)
            if num_preempted is None:
                return False
            self.num_preemptions += num_preempted
        sequence.reserved_len = reserved_len
        if reserved_len:
            self.tenants.note_reserved(sequence)
        return True

    def next_release_s(self) -> float | None:
        """Return the time, on the table's clock, at which the first pin or hold on blocks ends; None without any."""
        return next_release_s(self._sessions.values(), self._clock())

    def note_run(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the next `num_tokens` tokens of a sequence have run."""
        self.num_replayed_tokens += max(0, min(num_tokens, sequence.known_len - sequence.kv_len))
        sequence.note_run(num_tokens)

    def publish(self, sequence: Sequence, committed_len: int) -> None:
        """Publish the full blocks of committed tokens that have KV."""
        sequence.publish(committed_len, self.blocks)

    def store_answer(self, sequence: Sequence, answer: StoredAnswer) -> None:
        """Store the answer of the newest round for its repetition; the oldest stored answer may be dropped."""
        sequence.answer = answer
        self._answered[sequence] = None
        self._answered.move_to_end(sequence)
        if len(self._answered) > MAX_ANSWERS:
            oldest, _ = self._answered.popitem(last=False)
            oldest.answer = None

    def settle(self, sequence: Sequence, *, is_held: bool = True) -> None:
        """End a call on `sequence`: only tokens with KV stay, and the blocks that are reserved for the turn.

        Args:
            sequence: the call's sequence.
            is_held: True if the turn is expected to call again.
        """
        sequence.in_flight = False
        if is_held:
            hold_s = self._hold_s if sequence.reserved_len else _RUNNING_S
            sequence.held_until_s = self._clock() + hold_s
        else:
            sequence.reserved_len = 0
        sequence.settle(self.blocks)

    def end_turn(self, sequence: Sequence) -> int:
        """End the turn of a session without a call: its blocks are given back, or may be taken by others.

        Returns:
            The number of blocks that the session held.
        """
        num_blocks = len(sequence.block_table)
        sequence.end_turn(self.blocks)
        return num_blocks

    def invalidate(self, sequence: Sequence) -> None:
        """End a call on `sequence` after a crash and drop its KV, which may be wrong, and so may the snapshot that it
        began with."""
        sequence.in_flight = False
        if sequence.states is not None:
            self.num_withdrawn_snapshots += sequence.states.withdraw()
        sequence.forget(self.blocks)

    def release(self, session_id: str) -> None:
        """Forget a session with its tokens and KV. Unknown ids are ignored."""
        sequence = self._sessions.pop(session_id, None)
        if sequence is not None:
            self._answered.pop(sequence, None)
            self.tenants.closed(sequence)
            sequence.forget(self.blocks)

    def release_all(self) -> None:
        """Forget every session."""
        for session_id in list(self._sessions):
            self.release(session_id)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is owned as counted and every session's lengths are consistent."""
        check_integrity(self.blocks, self._sessions.values())
        if self.states is not None:
            self.states.check_integrity(all_tables(sequence.states for sequence in self._sessions.values()))

    def _advance_key(self, sequence: Sequence, request: SessionPosition) -> None:
        if request.epoch != sequence.epoch:
            sequence.confirmed_len = 0
            sequence.turn_order = next(self._turns)
        if (request.epoch, request.round_id) != (sequence.epoch, sequence.newest_round):
            sequence.answer = None
        sequence.epoch, sequence.newest_round = request.epoch, request.round_id

    def _miss(self, sequence: Sequence, request: SessionPosition) -> None:
        sure = min(sequence.confirmed_len, sequence.known_len)
        have = sure // BLOCK_TOKENS * BLOCK_TOKENS if request.start > sure else 0
        sequence.pinned_until_s = self._clock() + self._pin_ttl_s
        raise KvMiss(
            f"session {request.session_id}: the first {request.start} tokens are not the ones held here; "
            f"send from {have} on",
            have=have,
        )

    def _drop_oldest(self) -> None:
        if len(self._sessions) <= self._max_sessions:
            return
        now_s = self._clock()
        for session_id, sequence in self._sessions.items():
            if is_idle(sequence, now_s) and session_id != next(reversed(self._sessions)):
                self.release(session_id)
                return


def common_length(ours: TokenIds, theirs: TokenIds) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:length] != theirs[:length])
    return int(different[0]) if len(different) else length
