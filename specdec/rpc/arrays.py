"""Token ids, supports and number arrays in protobuf fields, packed as whole arrays without a loop over entries.

Every decoder raises ValueError with a message about the value that does not fit; the caller turns it into an error of
the request or of the reply. Called by `codec`, `rounds`, `proposals` and `verifications`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.contract.types import TokenIds
from specdec.core.packed import NO_IDS, PackedIds
from specdec.v1 import common_pb2

_FEW = 32
_LARGEST_ID = np.iinfo(np.uint32).max


class ReceivedIds(PackedIds):
    """Ids that came over a link. The coordinator sends a draft's supports on to the target without encoding them
    again."""

    __slots__ = ("message",)

    def __init__(self, token_ids: TokenIds, sizes: Sequence[int]) -> None:
        super().__init__(token_ids, sizes)
        self.message: common_pb2.Supports | None = None
        """The message that contained them, set if it may be sent on."""


def encode_supports(support_ids: Sequence[TokenIds]) -> common_pb2.Supports:
    """Pack ascending id lists as sizes and deltas: about 2 bytes an id."""
    sizes = [len(ids) for ids in support_ids]
    ids = np.concatenate(support_ids)  # [sum(sizes)]
    deltas = ids.copy()
    deltas[1:] -= ids[:-1]  # wraps at the first id of a support
    starts = [0, *accumulate(sizes[:-1])]
    deltas[starts] = ids[starts]
    return common_pb2.Supports(sizes=sizes, id_deltas=deltas.tolist())


def decode_supports(messages: Sequence[common_pb2.Supports], num_supports: Sequence[int]) -> list[ReceivedIds]:
    """Return the id lists of any number of messages, read in one pass.

    Args:
        messages: one a round.
        num_supports: number of supports that each message must hold.

    Raises:
        ValueError: a message holds another number of supports, or ids that do not ascend.
    """
    # Counted before they are copied, because copying millions of sizes takes half a second.
    for message, expected in zip(messages, num_supports, strict=True):
        if len(message.sizes) != expected:
            raise ValueError(f"{len(message.sizes)} supports where {expected} are expected")
    sizes_of = [message.sizes[:] for message in messages]
    counts = [sum(sizes) for sizes in sizes_of]
    sizes: list[int] = [size for sizes in sizes_of for size in sizes]
    for message, own, count in zip(messages, sizes_of, counts, strict=True):
        if count != len(message.id_deltas) or 0 in own:
            raise ValueError(f"sizes {own} do not add up to {len(message.id_deltas)} ids, or one of them is 0")
    if not sizes:
        return [ReceivedIds(NO_IDS, ()) for _ in messages]
    ids = _ascending(np.concatenate([np.array(message.id_deltas, dtype=np.int64) for message in messages]), sizes)
    return list(map(ReceivedIds, split(ids, counts), sizes_of))


def _ascending(deltas: NDArray[np.int64], sizes: list[int]) -> TokenIds:
    """Return the ids of all supports from their deltas, in one running sum; overwrites the deltas.

    The sum of a support is subtracted at the start of the next one.
    """
    starts = np.array([0, *accumulate(sizes[:-1])])
    # Only the first id of a support may be 0.
    if np.count_nonzero(deltas) - np.count_nonzero(deltas[starts]) != len(deltas) - len(starts):
        raise ValueError("token ids are not ascending")
    lasts = np.add.reduceat(deltas, starts)  # [len(sizes)]
    if lasts.max() > _LARGEST_ID:
        raise ValueError("a token id is beyond 32 bits")
    deltas[starts[1:]] -= lasts[:-1]
    return deltas.cumsum().astype(np.uint32)


def token_ids(values: Sequence[int]) -> TokenIds:
    """Return uint32 [n] from a repeated field or any ints below 2^32."""
    # A few ids are read faster from a list, many from the repeated field.
    return np.array(values[:] if len(values) < _FEW else values, dtype=np.uint32)


def to_bytes(parts: Sequence[Any], dtype: str) -> bytes:
    """Concatenate arrays into little-endian bytes of `dtype`."""
    return np.concatenate(parts).astype(dtype, copy=False).tobytes() if parts else b""


def from_bytes(content: bytes, dtype: str, count: int, name: str) -> NDArray[Any]:
    """Return a read-only view of `count` numbers. Raises ValueError, naming the field, if the length does not fit."""
    width = np.dtype(dtype).itemsize
    if len(content) != count * width:
        raise ValueError(f"{name} has {len(content)} bytes where {count * width} are expected")
    return np.frombuffer(content, dtype=dtype)


def split(values: NDArray[Any], sizes: Sequence[int]) -> list[NDArray[Any]]:
    """Cut `values` into consecutive views of the given sizes, which must add up to its length."""
    parts, start = [], 0
    for size in sizes:
        parts.append(values[start : start + size])
        start += size
    return parts


def gather(parts: Sequence[bytes], counts: Sequence[int], dtype: str, name: str) -> NDArray[Any]:
    """Return one array of all parts. Raises ValueError if a part does not hold its count of numbers."""
    width = np.dtype(dtype).itemsize
    for part, count in zip(parts, counts, strict=True):
        if len(part) != count * width:
            raise ValueError(f"{name} has {len(part)} bytes where {count * width} are expected")
    return np.frombuffer(b"".join(parts), dtype=dtype)


def cut(values: list[Any], like: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Cut a list into parts that are as long as those of `like`."""
    parts, start = [], 0
    for part in like:
        parts.append(values[start : start + len(part)])
        start += len(part)
    return parts
