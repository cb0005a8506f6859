"""One session as a replica holds it: its tokens, the part of them that has KV, the KV blocks, and the last answer.

A round reads and changes its sequence through `table`; `specdec.engine.loop.job` cuts the tokens without KV into slices
of a step.

Committed tokens come first, then the draft tokens of the running call. Between calls every token has run.

    0 ........ published ........ kv_len ........ len(sequence)
    | shared, immutable | private  |  not run yet  |

The tokens of a hybrid run from the newest of its states on (`recurrent_states`), so `kv_len` is the length of a state
between calls, and tokens after it run again.

A fork is a possible continuation of the session. It shares the full blocks before the fork point and owns the blocks
after it. Every change of the root's tokens or blocks ends all forks first, so that a shared block is never written
while two sequences read it.

A block table only grows at its end and is cut from there, so a copy, such as the one that CUDA graphs read on the
device, needs only the ids that were added since the previous copy.

`table` decides what to keep and `block_manager` which blocks exist. Device thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, TypeAlias

import numpy as np

from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import BLOCK_TOKENS, TokenIds
from specdec.core.chain import ChainHasher, block_name
from specdec.engine.sessions.block_manager import BlockManager, blocks_for
from specdec.engine.sessions.recurrent_states import PlannedStates, RecurrentStates, snapshot_lengths

_keys = count(1)


class BlockTable(list[int]):
    """Block ids; see `specdec.engine.base.LiveTable`."""

    __slots__ = ("_num_kept", "_prefix", "key")

    def __init__(self) -> None:
        super().__init__()
        self.key = next(_keys)
        self._num_kept = 0
        self._prefix: tuple[int, ...] = ()

    def __delitem__(self, where: object) -> None:
        """Cut the table; only `del table[n:]` is allowed."""
        if not (isinstance(where, slice) and where.stop is None and where.step is None):
            raise TypeError("a block table is cut at its end")
        super().__delitem__(where)
        self._num_kept = min(self._num_kept, len(self))
        if len(self._prefix) > len(self):
            self._prefix = ()

    def __setitem__(self, where: object, value: object) -> None:
        raise TypeError("a block table is not written into")

    def take_kept(self) -> int:
        """Return how many leading block ids are unchanged since the previous call. Only the owner of the cached copy
        may call this."""
        num_kept, self._num_kept = self._num_kept, len(self)
        return num_kept

    def first(self, num_blocks: int) -> tuple[int, ...]:
        """Return the first ids, as the same tuple while they are unchanged: copying a long table every step is slow."""
        if len(self._prefix) != num_blocks:
            self._prefix = tuple(self[:num_blocks])
        return self._prefix


Identity: TypeAlias = tuple[object, ...]
"""Contents of a request, to be compared with those of another one."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """Answer of a session's newest round, with the identity of its request."""

    identity: Identity
    value: Any


class Sequence:
    """A session's tokens and block table. `len()` counts tokens, with or without KV."""

    def __init__(self, session_id: str, tenant: str = DEFAULT_TENANT, states: RecurrentStates | None = None) -> None:
        self.session_id = session_id
        self.tenant = tenant
        """Tenant whose sessions may find the published blocks."""
        self.states = states
        """States of a hybrid's session; None for other models."""
        self.epoch = 0
        self.newest_round = -1
        self.answer: StoredAnswer | None = None
        """Stored answer of (epoch, newest_round)."""
        self.in_flight = False
        """True while a call runs on the session: its KV is not evicted."""
        self.answered_at: tuple[int, int] | None = None
        """Numbers of rounds and positions that the replica had answered at its last answer to this session."""
        self.called_s = float("-inf")
        """Time of the last call, on the session table's clock."""
        self.pinned_until_s = float("-inf")
        """End of the pin between a miss and its resend, on the session table's clock."""
        self.turn_order = 0
        """Place of the session's running turn among all turns that the replica has seen, in order of their begin."""
        self.reserved_len = 0
        """Number of tokens for which the sequence keeps blocks between two calls of a turn."""
        self.held_until_s = float("-inf")
        """Time until which the running turn is expected to call again, on the session table's clock."""
        self.kv_len = 0
        """Number of leading tokens that need not run."""
        self._run_len = 0
        self.confirmed_len = 0
        """Number of leading tokens that were committed at the last call of `epoch`."""
        self.block_table = BlockTable()
        self.num_published = 0
        """Number of leading blocks that are published or adopted and are never written again."""
        self.matcher: Any = None
        """Matcher of the session's constraint (`specdec.structured.mask_threads.SessionMatcher`)."""
        self.forks: list[Sequence] = []
        """All live forks of a root, with their own forks."""
        self.root: Sequence | None = None
        """The session's own sequence, for a live fork."""
        self._tokens: TokenIds = np.empty(0, dtype=np.uint32)
        self._len = 0
        self._hasher = ChainHasher()

    def __len__(self) -> int:
        return self._len

    @property
    def token_ids(self) -> TokenIds:
        """uint32 [len]: a view, valid until tokens are appended or truncated."""
        return self._tokens[: self._len]

    @property
    def num_pending(self) -> int:
        """Number of tokens without KV."""
        return self._len - self.kv_len

    @property
    def known_len(self) -> int:
        """Number of leading tokens that have run; those of a hybrid after `kv_len` run again."""
        return self.kv_len if self.states is None else max(self.kv_len, self._run_len)

    def grow(self, num_tokens: int, blocks: BlockManager) -> bool:
        """Take blocks for `num_tokens` tokens, and slots for states. Returns False, with nothing changed, when too few
        are available."""
        if self.states is None:
            return blocks.grow(self.block_table, num_tokens)
        if blocks_for(num_tokens) - len(self.block_table) > blocks.num_available or not self.states.reserve():
            return False
        return blocks.grow(self.block_table, num_tokens)

    def plan_states(self, end: int, committed: int, prompt_len: int, *, goes_on: bool) -> PlannedStates | None:
        """Return the states of a slice that ends after `end` tokens; None if the model has none.

        `prompt_len` is the number of tokens before the turn's output; the others are those of `RecurrentStates.plan`.
        """
        if self.states is None:
            return None
        lengths = snapshot_lengths(self.kv_len, min(end, committed), prompt_len)
        names = {length: self._block_name(length // BLOCK_TOKENS - 1) for length in lengths}
        return self.states.plan(self.kv_len, end, committed, goes_on=goes_on, snapshots=names)

    def note_run(self, num_tokens: int) -> None:
        """Note that the next `num_tokens` tokens have run."""
        self.kv_len += num_tokens
        if self.states is not None:
            self._run_len = max(self._run_len, self.kv_len)
            self.states.note_run()

    def run_again(self, num_tokens: int) -> None:
        """Note that the last `num_tokens` tokens that have run must run again."""
        self.kv_len -= num_tokens
        if self.states is not None:
            self.kv_len = self.states.rewind(self.kv_len)

    def append(self, token_ids: TokenIds) -> None:
        """Append tokens that have no KV yet."""
        end = self._len + len(token_ids)
        if end > len(self._tokens):
            grown = np.empty(max(end, 2 * len(self._tokens), 64), dtype=np.uint32)
            grown[: self._len] = self._tokens[: self._len]
            self._tokens = grown
        self._tokens[self._len : end] = token_ids
        self._len = end

    def truncate_to(self, length: int, blocks: BlockManager) -> None:
        """Drop the tokens from `length` on, with their KV.

        A published block must not be written again. If `length` lies inside one, KV is dropped from the block's start:
        its remaining tokens stay known and run again into a private block.
        """
        self.end_forks(blocks)
        self._len = min(self._len, length)
        num_kept_tokens = self.reserved_len
        self.confirmed_len = min(self.confirmed_len, self._len)
        if len(self._hasher) > self._len:
            self._hasher.truncate(self._len)
        self.kv_len = min(self.kv_len, self._len)
        if self.states is not None:
            self._run_len = min(self._run_len, self._len)
            self.kv_len = self.states.rewind(self.kv_len)
        if self.kv_len < self.num_published * BLOCK_TOKENS:
            self.num_published = self.kv_len // BLOCK_TOKENS
            self.kv_len = self.num_published * BLOCK_TOKENS
            num_kept_tokens = 0  # the published block, and with it all later ones, leave the table
        blocks.truncate(self.block_table, max(self.kv_len, num_kept_tokens))

    def settle(self, blocks: BlockManager) -> None:
        """End a call: drop tokens that did not run, and blocks beyond those that are reserved for the turn."""
        self.truncate_to(self.known_len, blocks)
        if self.states is not None:
            self.states.drop_snapshots()  # those of a call that ended before its answer

    def end_turn(self, blocks: BlockManager) -> None:
        """Give back the blocks that are reserved for the turn, and let others take those with KV."""
        self.reserved_len = 0
        self.matcher = None  # that of a large constraint takes tens of megabytes
        self.held_until_s = self.pinned_until_s = self.called_s = float("-inf")
        self.settle(blocks)
        if self.states is not None:
            self.states.keep_newest()

    def drop_kv(self, blocks: BlockManager) -> None:
        """Release every block but keep the tokens, which then run again."""
        self.end_forks(blocks)
        blocks.free(self.block_table)
        self.kv_len = self.num_published = self._run_len = 0
        if self.states is not None:
            self.states.release()

    def forget(self, blocks: BlockManager) -> None:
        """Drop every token, every block and the stored answer; the newest round's key stays."""
        self.truncate_to(0, blocks)
        self.drop_kv(blocks)
        self.answer = None

    def fork(self, length: int, capacity: int, blocks: BlockManager) -> Sequence | None:
        """Return a fork after `length` tokens, all with KV, with blocks for `capacity` tokens.

        If `length` lies inside a block, the caller copies that block's contents to the fork's block before it is read
        or written: from `self.block_table[i]` to `fork.block_table[i]` with `i = length // BLOCK_TOKENS`.

        Returns:
            None, with nothing changed, when too few blocks are available.
        """
        fork = Sequence(self.session_id, self.tenant)
        num_shared = length // BLOCK_TOKENS
        blocks.share(fork.block_table, self.block_table[:num_shared])
        if not blocks.grow(fork.block_table, capacity):
            blocks.free(fork.block_table)
            return None
        fork.append(self.token_ids[:length])
        fork.kv_len = length
        fork.num_published = min(self.num_published, num_shared)
        fork.root = self if self.root is None else self.root
        fork.root.forks.append(fork)
        return fork

    def become(self, fork: Sequence, blocks: BlockManager) -> None:
        """Continue as `fork`, a fork of this root: take over its tokens and blocks, and end every fork."""
        common = min(len(self), len(fork))
        parted = np.flatnonzero(self.token_ids[:common] != fork.token_ids[:common])
        self._hasher.truncate(min(len(self._hasher), int(parted[0]) if len(parted) else common))
        blocks.free(self.block_table)
        self.block_table, fork.block_table = fork.block_table, BlockTable()
        self._tokens, self._len = fork._tokens, fork._len
        self.kv_len, self.num_published = fork.kv_len, fork.num_published
        self.end_forks(blocks)
        # This takes at most the blocks that were just given back, so the turn's reservation is not lost.
        blocks.grow(self.block_table, self.reserved_len)

    def end_forks(self, blocks: BlockManager) -> None:
        """Release the blocks that forks own and end all forks."""
        for fork in self.forks:
            blocks.free(fork.block_table)
            fork.root = None
        self.forks.clear()

    def hash_at(self, length: int) -> bytes:
        """Return the chain hash of the first `length` tokens; `length` is at most `len(self)`."""
        self._extend_hasher(length)
        return self._hasher.at(length)

    def block_names(self, first: int, end: int) -> list[bytes]:
        """Return the names under which blocks [first, end) of this session are published; all of them are full."""
        return list(self._block_names(first, end * BLOCK_TOKENS))

    def adopt_published(self, limit: int, blocks: BlockManager) -> None:
        """Adopt published blocks that hold this session's next tokens, as far as full blocks end by `limit`.

        Those of a hybrid end where a snapshot is published.
        """
        if self.states is not None:
            self._adopt_snapshot(self.states, limit, blocks)
            return
        first = self.kv_len // BLOCK_TOKENS
        if first >= limit // BLOCK_TOKENS or not blocks.is_published(self._block_name(first)):
            return
        blocks.truncate(self.block_table, first * BLOCK_TOKENS)  # replaces a private block that holds less
        first += blocks.adopt(self.block_table, self._block_names(first, limit))
        self.num_published = first
        self.kv_len = first * BLOCK_TOKENS

    def publish(self, limit: int, blocks: BlockManager) -> None:
        """Publish the full blocks with KV that end by `limit` (committed tokens only) to other sessions."""
        limit = min(limit, self.kv_len)
        if self.states is not None:
            self.states.publish()
            limit = min(limit, self.states.oldest)  # the tokens after it may run again
        for name in self._block_names(self.num_published, limit):
            blocks.publish(self.block_table[self.num_published], name)
            self.num_published += 1

    def _adopt_snapshot(self, states: RecurrentStates, limit: int, blocks: BlockManager) -> None:
        names = list(takewhile(blocks.is_published, self._block_names(self.num_published, limit)))
        for num_blocks in range(len(names), 0, -1):
            length = (self.num_published + num_blocks) * BLOCK_TOKENS
            if length <= self.kv_len:
                return
            if states.has_snapshot(names[num_blocks - 1]):
                blocks.shorten(self.block_table, self.num_published)
                self.num_published += blocks.adopt(self.block_table, names[:num_blocks])
                states.adopt(length, names[num_blocks - 1])
                self.kv_len = length
                return

    def _block_names(self, first: int, limit: int) -> Iterator[bytes]:
        return (self._block_name(index) for index in range(first, limit // BLOCK_TOKENS))

    def _block_name(self, index: int) -> bytes:
        self._extend_hasher((index + 1) * BLOCK_TOKENS)
        return block_name(self.tenant, self._hasher.block_hash(index))

    def _extend_hasher(self, length: int) -> None:
        hashed = len(self._hasher)
        if length > hashed:
            self._hasher.extend(self._tokens[hashed:length])
