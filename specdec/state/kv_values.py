"""A run of KV blocks as a value of the cold tier, and its key.

    key    specdec-kv:VERSION:SPACE:NAME      NAME: the published hash of the run's last block, which names every token
                                              before its end (and the tenant); SPACE: whose numbers those are
    value  magic · version · length · digest of key and layout · checksum · the blocks

A value is written once and never changed. Whatever is not exactly the value of its key is a miss: a header that differs
in any byte, another length, a checksum that does not fit. Not here: Redis (`kv_tier`, which alone calls this).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Of keys and values; another one for whatever a reader of this one would take for something else.
VERSION = 1

_MAGIC = b"specdeKV"
_HEADER = struct.Struct("<8sIQ16s")
_CHECKSUM_BYTES = 16
_OVERHEAD_BYTES = _HEADER.size + _CHECKSUM_BYTES

Payload = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class KvSpace:
    """Whose KV it is. Replicas exchange values only where all of this is equal."""

    model_fingerprint: str
    dtype: str
    """Of the numbers."""
    rank: str
    """Which part of the model computed them: `tpN.R` is rank R of N."""
    layer_bytes: Sequence[int]
    """Bytes of one block in each layer."""
    run_blocks: int
    """Blocks of one value."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of a run."""
        return sum(self.layer_bytes) * self.run_blocks

    def key(self, name: bytes) -> str:
        """The key of the run whose last block is published as `name`."""
        return f"specdec-kv:{VERSION}:{self.model_fingerprint}:{self.dtype}:{self.rank}:{name.hex()}"

    def encode(self, name: bytes, payload: Payload) -> bytearray:
        """The value of a run.

        Args:
            name: of its last block.
            payload: uint8 [payload_bytes], any shape.
        """
        value = bytearray(_OVERHEAD_BYTES + self.payload_bytes)
        value[: _HEADER.size] = self._header(name)
        value[_OVERHEAD_BYTES:] = payload.reshape(-1).data
        value[_HEADER.size : _OVERHEAD_BYTES] = checksum(memoryview(value)[_OVERHEAD_BYTES:])
        return value

    def decode(self, name: bytes, value: bytes) -> Payload | None:
        """The blocks in a value, uint8 [run_blocks, bytes of a block], without a copy; None, a miss, if it is not what
        `encode` makes of this run."""
        view = memoryview(value)
        if len(view) != _OVERHEAD_BYTES + self.payload_bytes or view[: _HEADER.size] != self._header(name):
            return None
        if view[_HEADER.size : _OVERHEAD_BYTES] != checksum(view[_OVERHEAD_BYTES:]):
            return None
        return np.frombuffer(value, dtype=np.uint8, offset=_OVERHEAD_BYTES).reshape(self.run_blocks, -1)

    def _header(self, name: bytes) -> bytes:
        described = f"{self.key(name)}:{self.run_blocks}:{','.join(map(str, self.layer_bytes))}"
        binding = hashlib.blake2b(described.encode(), digest_size=16).digest()
        return _HEADER.pack(_MAGIC, VERSION, self.payload_bytes, binding)


def checksum(payload: bytes | memoryview) -> bytes:
    """Of a value's blocks: SHA-256 is the fastest strong hash where the processor has instructions for it."""
    return hashlib.sha256(payload).digest()[:_CHECKSUM_BYTES]
