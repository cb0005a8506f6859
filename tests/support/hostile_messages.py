"""Strategies for protobuf messages that no honest program sends, as bytes: any fields, any order, any values.

Fields come from the descriptors of the schemas. Values are plausible, at a limit or beyond it; some have the wrong wire
type, strings may be no UTF-8, and the bytes of whole messages may be damaged.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

_MOST_FIELDS = 6
_MOST_DEPTH = 5
_NUMBERS = (0, 1, 2, 3, 5, 8, 64, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, 0.5, 1.0, -1.0, 2.0, 1e-45, 3e38, -3e38, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    b"", b"s", b"s1", b"r1", b"w5 w6 w7", b"default", b"user", b"{}", b'{"a":[[[]]]}', b"\xff\xfe", b"\xed\xa0\x80",
    b"\0", b"../..", b"x" * 300, "𝕏é".encode(), b"specdec:default:s1", b"[" * 200,
)  # fmt: skip
_VARINT, _FIXED64, _BYTES, _GROUP, _FIXED32 = 0, 1, 2, 3, 5

numbers: SearchStrategy[int] = st.one_of(st.sampled_from(_NUMBERS), st.integers(0, 2**64 - 1))
texts: SearchStrategy[bytes] = st.one_of(st.sampled_from(_TEXTS), st.binary(max_size=24))


def varint(number: int) -> bytes:
    """Return a number of up to 64 bits as protobuf writes it."""
    content = bytearray()
    while number > 0x7F:
        content.append(0x80 | number & 0x7F)
        number >>= 7
    return bytes([*content, number])


def field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field."""
    return varint(number << 3 | _BYTES) + varint(len(content)) + content


@cache
def messages(descriptor: Descriptor, depth: int = _MOST_DEPTH) -> SearchStrategy[bytes]:
    """Return a strategy for the bytes of one type of message."""
    fields = [_field(each, depth) for each in descriptor.fields if depth or each.message_type is None]
    return st.lists(st.one_of([*fields, _unknown_fields]), max_size=_MOST_FIELDS).map(b"".join)


_unknown_fields: SearchStrategy[bytes] = st.one_of(
    st.builds(field, st.integers(1, 2**29 - 1), texts),
    st.builds(lambda number, value: varint(number << 3) + varint(value), st.integers(0, 40), numbers),
    st.sampled_from((b"\x0b", b"\x0c", b"\x0b\x0c", b"\x0f", b"\xff", b"\x80" * 11)),
)


def _field(described: FieldDescriptor, depth: int) -> SearchStrategy[bytes]:
    number = described.number
    if described.message_type is not None:
        inner = st.deferred(lambda: messages(described.message_type, depth - 1))
        return inner.map(lambda content: field(number, content))
    if described.type in (described.TYPE_STRING, described.TYPE_BYTES):
        return texts.map(lambda content: field(number, content))
    if described.is_repeated and described.type not in (described.TYPE_FLOAT, described.TYPE_DOUBLE):
        return st.lists(numbers, max_size=8).map(lambda values: field(number, b"".join(map(varint, values))))
    return _scalars(described)


def _scalars(described: FieldDescriptor) -> SearchStrategy[bytes]:
    tag = described.number << 3
    if described.type == described.TYPE_FLOAT:
        return st.sampled_from(_FLOATS).map(lambda value: varint(tag | _FIXED32) + struct.pack("<f", value))
    if described.type == described.TYPE_DOUBLE:
        return st.sampled_from(_FLOATS).map(lambda value: varint(tag | _FIXED64) + struct.pack("<d", value))
    if described.type == described.TYPE_FIXED64:
        return numbers.map(lambda value: varint(tag | _FIXED64) + struct.pack("<Q", value))
    return numbers.map(lambda value: varint(tag | _VARINT) + varint(value))


Damage = tuple[str, float, int]

damages: SearchStrategy[list[Damage]] = st.lists(
    st.tuples(
        st.sampled_from(("set", "delete", "insert", "cut", "repeat")), st.floats(0.0, 0.999), st.integers(0, 255)
    ),
    min_size=1,
    max_size=4,
)


def damaged(content: bytes, damage: list[Damage]) -> bytes:
    """Return `content` after changes of single bytes, repetitions, and cuts at the end."""
    changed = bytearray(content)
    for kind, place, value in damage:
        at = int(place * len(changed))
        if kind == "insert" or not changed:
            changed.insert(at, value)
        elif kind == "set":
            changed[at] = value
        elif kind == "repeat":
            changed[at:at] = changed[at : at + value] * 40
        else:
            del changed[at : at + 1 if kind == "delete" else len(changed)]
    return bytes(changed)


def hostile(descriptor: Descriptor, honest: tuple[bytes, ...] = ()) -> SearchStrategy[bytes]:
    """Return a strategy for bytes that are sent in place of a message.

    Args:
        descriptor: the type that the receiver expects.
        honest: messages that a receiver would serve; they are sent damaged as well.
    """
    made = messages(descriptor)
    kinds: list[Any] = [made, made, st.builds(damaged, made, damages), st.binary(max_size=64)]
    if honest:
        kinds += 2 * [st.builds(damaged, st.sampled_from(honest), damages)]
    return st.one_of(kinds)
