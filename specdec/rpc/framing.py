"""Frames as bytes: each item is encoded once, and a frame is joined from encoded items.

A frame message (protos/specdec/v1/{draft,target}.proto) has one repeated field of items, number 1, so its bytes are
those of its items, each after a tag and its length. Both ends keep to MAX_FRAME_ITEMS and FRAME_BYTES.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from specdec.v1 import target_pb2

#: Limit of items in a frame. Further items wait for the next frame; a longer frame is refused before its items are
#: read.
MAX_FRAME_ITEMS = 1024

#: Size at which a frame takes no more items, so that one big item does not push the others over the peer's limit.
FRAME_BYTES = 1 << 20

#: Field 1, length-delimited.
_ITEM_TAG = 0x0A


def join_items(items: Sequence[bytes]) -> bytes:
    """Return the frame of these items."""
    return b"".join([part for item in items for part in (_header(len(item)), item)])


@lru_cache(maxsize=4096)
def _header(length: int) -> bytes:
    """Return tag and length: seven bits a byte, lowest first; the high bit marks that more bytes follow."""
    header = bytearray([_ITEM_TAG])
    while length > 0x7F:
        header.append(0x80 | length & 0x7F)
        length >>= 7
    header.append(length)
    return bytes(header)


def encode_renewal(call_id: int, until: int, committed_len: int) -> bytes:
    """Return a renewal of a run as a part of a frame."""
    renewal = target_pb2.Renewal(call_id=call_id, until=until, committed_len=committed_len)
    return target_pb2.VerifyFrame(renewals=[renewal]).SerializeToString()


def split_items(frame: bytes) -> list[bytes] | None:
    """Return the items of a frame, or None if it has other parts too; protobuf's own parser reads it then."""
    items = []
    position, end = 0, len(frame)
    while position < end:
        if frame[position] != _ITEM_TAG:
            return None
        position += 1
        length = shift = 0
        while position < end:
            byte = frame[position]
            position += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        else:
            return None
        if position + length > end:
            return None
        items.append(frame[position : position + length])
        position += length
    return items
