"""A run of KV blocks as a value of the cold tier, and its key.

    key    specdec-kv:VERSION:SPACE:NAME      NAME: the published hash of the run's last block, which identifies every
                                              token before its end (and the tenant); SPACE: model, type and rank. In a
                                              cluster other than the default: specdec-kv@CLUSTER:VERSION:SPACE:NAME
    value  magic · version · length · digest of key and layout · checksum · the blocks

A value is written once and never changed. A value that does not match its key exactly is a miss: a header that differs
in any byte, another length, or a wrong checksum. `kv_tier` and `kv_reader` store and fetch values, and count in
`KvTally`.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.settings.cluster_names import DEFAULT_CLUSTER


@dataclass(slots=True)
class KvTally:
    """The counts, which start at 0."""

    choices: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("restore", "replay", "missing", "unavailable", "late"), 0)
    )
    """Calls that lacked at least one whole run, by how that was resolved."""
    num_restored: int = 0
    """Runs copied into KV blocks."""
    num_damaged: int = 0
    """Values that did not match their key."""
    num_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("read", "written"), 0))
    dropped: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("queue_full", "evicted", "refused", "unavailable"), 0)
    )
    """Runs that were offered and not written, by reason."""
    replay_s_per_run: float = 0.0
    """Latest estimate of the time to compute a run; 0 before the first."""


#: Version of keys and values; it must change with any change that a reader of this version would misread.
VERSION = 1

_MAGIC = b"specdeKV"
_HEADER = struct.Struct("<8sIQ16s")
_CHECKSUM_BYTES = 4
_OVERHEAD_BYTES = _HEADER.size + _CHECKSUM_BYTES

Payload = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class KvSpace:
    """Identity of KV values. Replicas share values only if all fields are equal."""

    model_fingerprint: str
    dtype: str
    """Type of the numbers."""
    rank: str
    """Part of the model that computed them: `tpN.R` is rank R of N."""
    layer_bytes: Sequence[int]
    """Size of one block in each layer."""
    run_blocks: int
    """Number of blocks in one value."""
    cluster: str = DEFAULT_CLUSTER
    """Name of the system that the replica belongs to."""

    @property
    def payload_bytes(self) -> int:
        """Return the size of a run."""
        return sum(self.layer_bytes) * self.run_blocks

    def key(self, name: bytes) -> str:
        """Return the key of the run whose last block is published as `name`."""
        return f"{self._prefix}:{self.model_fingerprint}:{self.dtype}:{self.rank}:{name.hex()}"

    def probe_key(self, num_bytes: int) -> str:
        """Return the key of the test value of a size."""
        return f"{self._prefix}:probe:{num_bytes}"

    def encode(self, name: bytes, payload: Payload) -> bytearray:
        """Return the value of a run.

        Args:
            name: published name of its last block.
            payload: uint8 [payload_bytes], any shape.
        """
        value = bytearray(_OVERHEAD_BYTES + self.payload_bytes)
        value[: _HEADER.size] = self._header(name)
        value[_OVERHEAD_BYTES:] = payload.reshape(-1).data
        value[_HEADER.size : _OVERHEAD_BYTES] = checksum(memoryview(value)[_OVERHEAD_BYTES:])
        return value

    def decode(self, name: bytes, value: bytes) -> Payload | None:
        """Return the blocks in a value, uint8 [run_blocks, bytes of a block], without a copy.

        None, a miss, if `encode` would not make this value for this run.
        """
        view = memoryview(value)
        if len(view) != _OVERHEAD_BYTES + self.payload_bytes or view[: _HEADER.size] != self._header(name):
            return None
        if view[_HEADER.size : _OVERHEAD_BYTES] != checksum(view[_OVERHEAD_BYTES:]):
            return None
        return np.frombuffer(value, dtype=np.uint8, offset=_OVERHEAD_BYTES).reshape(self.run_blocks, -1)

    @property
    def _prefix(self) -> str:
        return f"specdec-kv:{VERSION}" if self.cluster == DEFAULT_CLUSTER else f"specdec-kv@{self.cluster}:{VERSION}"

    def _header(self, name: bytes) -> bytes:
        described = f"{self.key(name)}:{self.run_blocks}:{','.join(map(str, self.layer_bytes))}"
        binding = hashlib.blake2b(described.encode(), digest_size=16).digest()
        return _HEADER.pack(_MAGIC, VERSION, self.payload_bytes, binding)


def checksum(payload: bytes | memoryview) -> bytes:
    """Return the checksum of a value's blocks.

    It detects accidents only: a program that can write to the store can also write a checksum, and a checksum that
    cannot be forged would take as long as the transfer.
    """
    return zlib.crc32(payload).to_bytes(_CHECKSUM_BYTES, "little")
