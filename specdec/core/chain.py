"""Chain hashes: 16 bytes that identify the token prefix whose KV a replica holds.

The hash of a token prefix is chained block by block (`BLOCK_TOKENS` tokens each), the partial last block after the last
full one, so the hash at a block boundary also identifies that KV block; its published name is salted by the tenant. The
coordinator hashes what it assumes that a replica holds, and both engines hash what they hold; docs/protocol.md section
5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import BLOCK_TOKENS, TokenIds

#: Length of a chain hash and of a block's name.
HASH_BYTES = 16

_BLOCK_BYTES = BLOCK_TOKENS * 4


def _link(previous: bytes, packed_token_ids: bytes | bytearray) -> bytes:
    return hashlib.blake2b(previous + packed_token_ids, digest_size=HASH_BYTES, person=b"specdec-chain").digest()


_EMPTY = _link(b"", b"")


def block_name(tenant: str, chain_hash: bytes) -> bytes:
    """Return the name, 16 bytes, under which a replica publishes a full block; it differs between tenants.

    With common names a tenant could tell from response times that another tenant had sent the same prefix. The two ends
    of a link compare the chain hash itself.
    """
    if tenant == DEFAULT_TENANT:
        return chain_hash
    key = tenant.encode()
    return hashlib.blake2b(chain_hash, digest_size=HASH_BYTES, key=key, person=b"specdec-tenant").digest()


class ChainHasher:
    """A token sequence with its chain hash at every length. Not thread-safe.

    Args:
        token_ids: initial uint32 ids.
    """

    def __init__(self, token_ids: TokenIds | Sequence[int] = ()) -> None:
        self._packed = bytearray()  # uint32 little-endian
        self._block_hashes: list[bytes] = []
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._packed) // 4

    def extend(self, token_ids: TokenIds | Sequence[int]) -> None:
        """Append tokens."""
        self._packed += np.asarray(token_ids, dtype="<u4").tobytes()
        for block_index in range(len(self._block_hashes), len(self._packed) // _BLOCK_BYTES):
            start = block_index * _BLOCK_BYTES
            self._block_hashes.append(_link(self._before(block_index), self._packed[start : start + _BLOCK_BYTES]))

    def truncate(self, length: int) -> None:
        """Remove the tokens from position `length` on; without effect if there are none."""
        if length < 0:
            raise ValueError(f"length {length} is negative")
        del self._packed[length * 4 :]
        del self._block_hashes[length // BLOCK_TOKENS :]

    def at(self, length: int) -> bytes:
        """Return the chain hash of the first `length` tokens, 16 bytes.

        Raises:
            ValueError: `length` is negative or beyond the sequence.
        """
        if not 0 <= length <= len(self):
            raise ValueError(f"length {length} is outside 0..{len(self)}")
        num_blocks, num_left = divmod(length, BLOCK_TOKENS)
        before = self._before(num_blocks)
        if num_left == 0:
            return before
        start = num_blocks * _BLOCK_BYTES
        return _link(before, self._packed[start : start + num_left * 4])

    def block_hash(self, block_index: int) -> bytes:
        """Return the chain hash of tokens[0 : (block_index + 1) * BLOCK_TOKENS]; the block must be full."""
        return self._block_hashes[block_index]

    def _before(self, block_index: int) -> bytes:
        return self._block_hashes[block_index - 1] if block_index else _EMPTY
