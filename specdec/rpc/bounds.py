"""A limit on the number of fields in a message, checked on its bytes before anything is decoded.

Two bytes can encode an object of sixty bytes, so a message within gRPC's size limit could still become millions of
objects. Called where messages are read: by `interceptors` for requests and by `client` for replies.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

#: Limit of the fields of a message and of all messages in it; a map entry counts as one field. Logit biases are the
#: most numerous: they take nine bytes or more each, so a link's frame of one megabyte stays below the limit.
MAX_FIELDS = 1 << 17

_VARINT, _FIXED64, _LENGTH_DELIMITED, _GROUP_START, _GROUP_END, _FIXED32 = range(6)


def check_num_fields(content: bytes, message_type: type[Message]) -> None:
    """Refuse a message of more than MAX_FIELDS fields. Bytes that are not a message are left to protobuf's parser.

    Raises:
        DecodeError: it has more fields.
    """
    # A field takes two bytes or more, so nearly all messages pass without being scanned.
    if len(content) <= 2 * MAX_FIELDS:
        return
    descriptor: Any = message_type.DESCRIPTOR
    if _room_left(content, 0, len(content), descriptor, MAX_FIELDS) < 0:
        raise DecodeError(f"more than {MAX_FIELDS} fields")


def _room_left(content: bytes, position: int, end: int, descriptor: Descriptor, room: int) -> int:
    """Return `room` less the fields from `position` to `end`; below 0 as soon as there are too many.

    Stops at bytes that are not a field, as the parser does.
    """
    messages = _message_fields(descriptor)
    # Keys and lengths of one byte, which are the usual case, are read in place, which is twice as fast.
    try:
        while position < end:
            room -= 1
            if room < 0:
                break
            key = content[position]
            position += 1
            if key > 0x7F:
                key, position = _varint(content, position - 1)
            kind = key & 7
            if kind == _VARINT:
                _, position = _varint(content, position)
            elif kind == _LENGTH_DELIMITED:
                length = content[position]
                position += 1
                if length > 0x7F:
                    length, position = _varint(content, position - 1)
                if position + length > end:
                    break
                if nested := messages.get(key >> 3):
                    room = _room_left(content, position, position + length, nested, room)
                position += length
            elif kind == _FIXED32:
                position += 4
            elif kind == _FIXED64:
                position += 8
            elif kind not in (_GROUP_START, _GROUP_END):  # fields in a group count like fields beside it
                break
    except IndexError:
        pass
    return room


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return the number at `position` and the position after it. Raises IndexError if there is none."""
    byte = content[position]
    position += 1
    value = byte & 0x7F
    shift = 7
    while byte > 0x7F:
        if shift > 63:
            raise IndexError
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, position


@lru_cache(maxsize=256)
def _message_fields(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    """Return the types of the fields that are messages, by field number."""
    return {
        field.number: field.message_type
        for field in descriptor.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    }
