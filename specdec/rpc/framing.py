"""Frames as bytes: an item is encoded and measured once, and a frame is put together of items without another copy.

A frame message (protos/specdec/v1/{draft,target}.proto) is one repeated field of items, number 1, so that its bytes are
those of its items, each behind a tag and its length. Not here: what an item says (`codec`, `replies`). Called by links;
both ends keep to MAX_FRAME_ITEMS and FRAME_BYTES.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

#: Items of a frame. What is beyond waits for the next one; a longer frame is refused before its items are looked at.
MAX_FRAME_ITEMS = 1024

#: A frame stops taking items at this size, so that one big item never drags the others past the peer's limit.
FRAME_BYTES = 1 << 20

#: Field 1, length-delimited.
_ITEM_TAG = 0x0A


def join_items(items: Sequence[bytes]) -> bytes:
    """The frame of these items."""
    return b"".join([part for item in items for part in (_header(len(item)), item)])


@lru_cache(maxsize=4096)
def _header(length: int) -> bytes:
    """Tag and length: seven bits a byte, the lowest first, the high bit where more follow."""
    header = bytearray([_ITEM_TAG])
    while length > 0x7F:
        header.append(0x80 | length & 0x7F)
        length >>= 7
    header.append(length)
    return bytes(header)


def split_items(frame: bytes) -> list[bytes] | None:
    """The items of a frame; None where it is not items alone: then protobuf's own parser says what it is."""
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
