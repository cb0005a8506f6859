"""Allocate KV blocks: sharing, reference counts and the prefix cache.

`table` calls this for a session, whose tokens then go to `specdec.engine.schedule.scheduler`.

A block is in exactly one of three states:

    free      no table holds it and its contents are not needed
    held      its reference count is the number of block tables that contain it
    cached    no table holds it, but it is published and a table may still adopt it; the least recently held is evicted
              first

Publishing names a block by the chain hash of every token up to its end, salted by the tenant (`specdec.core.chain`).
The caller publishes only full blocks of committed tokens and never writes to a published block again.

Called by `specdec.engine.sessions.table` from the device thread alone, except for `stamps`, which any thread may call.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from specdec.contract.types import BLOCK_TOKENS


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that `num_tokens` tokens need."""
    return -(-num_tokens // BLOCK_TOKENS)


class BlockManager:
    """Owns block ids 0..num_blocks-1. A block table is a plain list of ids, in position order, owned by the caller."""

    def __init__(self, num_blocks: int, block_bytes: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        """Bytes of a block, for messages; 0 if they do not matter."""
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._ref_counts: list[int] = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, least recently held first
        self._num_evictions: list[int] = [0] * num_blocks

    @property
    def num_available(self) -> int:
        """Number of blocks that `grow` can hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Number of blocks whose contents are not needed."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Number of blocks in at least one table."""
        return self.num_blocks - self.num_available

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend `table` until it covers `num_tokens` tokens.

        Returns:
            False, with nothing changed, when too few blocks are available.
        """
        return self.extend(table, blocks_for(num_tokens))

    def extend(self, table: list[int], num_blocks: int) -> bool:
        """Extend `table` until it has `num_blocks` blocks; see `grow`."""
        num_missing = num_blocks - len(table)
        if num_missing > self.num_available:
            return False
        for _ in range(num_missing):
            block_id = self._free.pop() if self._free else self._evict_cached()
            self._ref_counts[block_id] = 1
            table.append(block_id)
        return True

    def truncate(self, table: list[int], num_tokens: int) -> None:
        """Cut `table` to the blocks that `num_tokens` tokens need and release the others."""
        self.shorten(table, blocks_for(num_tokens))

    def shorten(self, table: list[int], num_blocks: int) -> None:
        """Cut `table` to its first `num_blocks` blocks and release the others."""
        # Last first: the blocks nearest the root of a chain are evicted last, because all later blocks depend on them.
        for block_id in reversed(table[num_blocks:]):
            self._let_go(block_id)
        del table[num_blocks:]

    def free(self, table: list[int]) -> None:
        """Release all blocks of `table`."""
        self.shorten(table, 0)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Publish a held, full block under its hash. A block that is already published under the hash stays."""
        if block_hash not in self._block_of and block_id not in self._hash_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def adopt(self, table: list[int], block_hashes: Iterable[bytes]) -> int:
        """Append published blocks to `table`, in the order of `block_hashes`, until one is not found.

        Returns:
            The number of blocks appended.
        """
        num_adopted = 0
        for block_hash in block_hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            self._cached.pop(block_id, None)
            self._ref_counts[block_id] += 1
            table.append(block_id)
            num_adopted += 1
        return num_adopted

    def share(self, table: list[int], block_ids: Iterable[int]) -> None:
        """Append held blocks of another table to `table`. Neither may write to them while both hold them."""
        for block_id in block_ids:
            self._ref_counts[block_id] += 1
            table.append(block_id)

    def num_given_back(self, tables: Iterable[Sequence[int]]) -> int:
        """Return the number of blocks that would become available if these tables were freed."""
        held = Counter(block_id for table in tables for block_id in table)
        return sum(count == self._ref_counts[block_id] for block_id, count in held.items())

    def is_published(self, block_hash: bytes) -> bool:
        """Return whether a block is published under this hash."""
        return block_hash in self._block_of

    def withdraw(self, block_id: int) -> None:
        """Let no further table adopt a held block; a block that is not published stays as it is."""
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def stamps(self, block_hashes: Iterable[bytes]) -> list[tuple[int, int]] | None:
        """Return the ids of published blocks, each with a number that changes before the block may be written again.

        Any thread may call this. A copy of the blocks is valid if the stamps are still the same after copying.

        Returns:
            None if one of them is not published.
        """
        stamps = []
        for block_hash in block_hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                return None
            stamps.append((block_id, self._num_evictions[block_id]))
        return stamps

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the reference counts with the block tables in use.

        Args:
            tables: every existing table.

        Raises:
            RuntimeError: a block is counted wrongly, owned twice, or lost.
        """
        held = Counter(block_id for table in tables for block_id in table)
        for block_id, count in enumerate(self._ref_counts):
            if count != held[block_id]:
                raise RuntimeError(f"block {block_id} is in {held[block_id]} tables but counted {count} times")
        num_held = sum(1 for count in self._ref_counts if count)
        if len(set(self._free)) + len(self._cached) + num_held != self.num_blocks or len(self._free) != len(
            set(self._free)
        ):
            raise RuntimeError(
                f"{len(self._free)} free + {len(self._cached)} cached + {num_held} held is not {self.num_blocks} blocks"
            )
        for block_id in (*self._free, *self._cached):
            if self._ref_counts[block_id]:
                raise RuntimeError(f"block {block_id} is held and available at once")
        if any(block_id in self._hash_of for block_id in self._free):
            raise RuntimeError("a free block is still published")
        if any(block_id not in self._hash_of for block_id in self._cached):
            raise RuntimeError("a cached block is not published")
        if {block_id: block_hash for block_hash, block_id in self._block_of.items()} != self._hash_of:
            raise RuntimeError("the two directions of the prefix cache disagree")

    def _let_go(self, block_id: int) -> None:
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id]:
            return
        if block_id in self._hash_of:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def _evict_cached(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._num_evictions[block_id] += 1
        del self._block_of[self._hash_of.pop(block_id)]
        return block_id
