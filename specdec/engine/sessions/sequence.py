"""One session as a replica holds it: its tokens, how many of them have KV, where that KV lies, and what was answered.

A round reads and changes its sequence by way of `table`; the tokens without KV are cut into slices of a step by
`specdec.engine.loop.job`.

Tokens are committed ones first, then the draft tokens of the call in work. Between calls every token has KV.

    0 ........ published ........ kv_len ........ len(sequence)
    | shared, immutable | private  |  not run yet  |

A fork is the same session as it may go on. It shares the full blocks before the point where it parts and owns what
follows. Forks live only while their root stands still: whatever changes the root's tokens or blocks ends them first, so
a shared block is never written while two read it.

Not here: the decision what to keep (`table`), which blocks exist (`block_manager`), tensors. Device thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.core.chain import ChainHasher, block_name
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.block_table import BlockTable
from specdec.tenant import DEFAULT_TENANT
from specdec.types import BLOCK_TOKENS, TokenIds


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer of a session's newest round, and the digest of what was asked."""

    digest: bytes
    value: Any


class Sequence:
    """A session's tokens and block table. `len()` counts tokens, with or without KV."""

    def __init__(self, session_id: str, tenant: str = DEFAULT_TENANT) -> None:
        self.session_id = session_id
        self.tenant = tenant
        """Who else may find the blocks that it publishes."""
        self.epoch = 0
        self.newest_round = -1
        self.answer: StoredAnswer | None = None
        """Of (epoch, newest_round)."""
        self.in_flight = False
        """A call works on the session: its KV is not evicted."""
        self.answered_at: tuple[int, int] | None = None
        """Rounds and positions that the replica had answered when it last answered this session."""
        self.called_s = float("-inf")
        """When it was last called, on the session table's clock."""
        self.pinned_until_s = float("-inf")
        """Between a miss and its resend, on the session table's clock."""
        self.kv_len = 0
        self.confirmed_len = 0
        """Leading tokens that were committed when `epoch` last called."""
        self.block_table = BlockTable()
        self.num_published = 0
        """Leading blocks that are published or adopted: never written again."""
        self.forks: list[Sequence] = []
        """Of a root: every fork that lives, forks of forks too."""
        self.root: Sequence | None = None
        """Of a fork that lives: the session's own sequence."""
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
        """Tokens without KV."""
        return self._len - self.kv_len

    def append(self, token_ids: TokenIds) -> None:
        """Adds tokens that have no KV yet."""
        end = self._len + len(token_ids)
        if end > len(self._tokens):
            grown = np.empty(max(end, 2 * len(self._tokens), 64), dtype=np.uint32)
            grown[: self._len] = self._tokens[: self._len]
            self._tokens = grown
        self._tokens[self._len : end] = token_ids
        self._len = end

    def truncate_to(self, length: int, blocks: BlockManager) -> None:
        """Forgets the tokens from `length` on, and their KV.

        Inside a published block, which must not be written again, KV is forgotten from the block's start on: those
        few tokens stay known and run again into a block of the session's own.
        """
        self.end_forks(blocks)
        self._len = min(self._len, length)
        self.confirmed_len = min(self.confirmed_len, self._len)
        if len(self._hasher) > self._len:
            self._hasher.truncate(self._len)
        self.kv_len = min(self.kv_len, self._len)
        if self.kv_len < self.num_published * BLOCK_TOKENS:
            self.num_published = self.kv_len // BLOCK_TOKENS
            self.kv_len = self.num_published * BLOCK_TOKENS
        blocks.truncate(self.block_table, self.kv_len)

    def settle(self, blocks: BlockManager) -> None:
        """Ends a call: tokens that were not run, and blocks reserved for more, go."""
        self.truncate_to(self.kv_len, blocks)

    def drop_kv(self, blocks: BlockManager) -> None:
        """Gives every block back but keeps the tokens: they run again."""
        self.end_forks(blocks)
        blocks.free(self.block_table)
        self.kv_len = self.num_published = 0

    def forget(self, blocks: BlockManager) -> None:
        """Drops every token, every block and the stored answer; the newest round's key stays."""
        self.truncate_to(0, blocks)
        self.answer = None

    def fork(self, length: int, capacity: int, blocks: BlockManager) -> Sequence | None:
        """A fork that parts after `length` tokens, all with KV, and has room for `capacity`.

        Where `length` lies inside a block, the fork's own block must be given that block's contents before it is read
        or written: the pair `(self.block_table[i], fork.block_table[i])` of `i = length // BLOCK_TOKENS`.

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
        """Goes on as `fork`, one of this root's: its tokens and blocks replace ours, and every fork ends."""
        common = min(len(self), len(fork))
        parted = np.flatnonzero(self.token_ids[:common] != fork.token_ids[:common])
        self._hasher.truncate(min(len(self._hasher), int(parted[0]) if len(parted) else common))
        blocks.free(self.block_table)
        self.block_table, fork.block_table = fork.block_table, BlockTable()
        self._tokens, self._len = fork._tokens, fork._len
        self.kv_len, self.num_published = fork.kv_len, fork.num_published
        self.end_forks(blocks)

    def end_forks(self, blocks: BlockManager) -> None:
        """Gives back what forks own and lets none of them go on."""
        for fork in self.forks:
            blocks.free(fork.block_table)
            fork.root = None
        self.forks.clear()

    def hash_at(self, length: int) -> bytes:
        """Chain hash of the first `length` tokens; `length` is at most `len(self)`."""
        self._extend_hasher(length)
        return self._hasher.at(length)

    def block_names(self, first: int, end: int) -> list[bytes]:
        """What blocks [first, end) of this session are published as; all of them full."""
        return list(self._block_names(first, end * BLOCK_TOKENS))

    def adopt_published(self, limit: int, blocks: BlockManager) -> None:
        """Takes over published blocks that hold this session's next tokens, for full blocks that end by `limit`."""
        first = self.kv_len // BLOCK_TOKENS
        if first >= limit // BLOCK_TOKENS or not blocks.is_published(self._block_name(first)):
            return
        blocks.truncate(self.block_table, first * BLOCK_TOKENS)  # a block of our own that holds less gives way
        first += blocks.adopt(self.block_table, self._block_names(first, limit))
        self.num_published = first
        self.kv_len = first * BLOCK_TOKENS

    def publish(self, limit: int, blocks: BlockManager) -> None:
        """Offers the full blocks that end by `limit` (committed tokens only) and have KV to other sessions."""
        for name in self._block_names(self.num_published, min(limit, self.kv_len)):
            blocks.publish(self.block_table[self.num_published], name)
            self.num_published += 1

    def _block_names(self, first: int, limit: int) -> Iterator[bytes]:
        return (self._block_name(index) for index in range(first, limit // BLOCK_TOKENS))

    def _block_name(self, index: int) -> bytes:
        self._extend_hasher((index + 1) * BLOCK_TOKENS)
        return block_name(self.tenant, self._hasher.block_hash(index))

    def _extend_hasher(self, length: int) -> None:
        hashed = len(self._hasher)
        if length > hashed:
            self._hasher.extend(self._tokens[hashed:length])
