"""Strategies for what no honest program sends, as bytes: protobuf messages, and whole connections of HTTP/2 and HTTP.

Fields of messages come from the descriptors of the schemas, in any number and order. Values are plausible, at a limit
or beyond it; some have the wrong wire type, strings may be no UTF-8, and the bytes of anything may be damaged.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.support.raw_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    HTTP,
    POST,
    PREFACE,
    SETTINGS,
    frame,
    literal,
)

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


def message_field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field."""
    return varint(number << 3 | _BYTES) + varint(len(content)) + content


@cache
def messages(descriptor: Descriptor, depth: int = _MOST_DEPTH) -> SearchStrategy[bytes]:
    """Return a strategy for the bytes of one type of message."""
    fields = [_field(each, depth) for each in descriptor.fields if depth or each.message_type is None]
    return st.lists(st.one_of([*fields, _unknown_fields]), max_size=_MOST_FIELDS).map(b"".join)


_unknown_fields: SearchStrategy[bytes] = st.one_of(
    st.builds(message_field, st.integers(1, 2**29 - 1), texts),
    st.builds(lambda number, value: varint(number << 3) + varint(value), st.integers(0, 40), numbers),
    st.sampled_from((b"\x0b", b"\x0c", b"\x0b\x0c", b"\x0f", b"\xff", b"\x80" * 11)),
)


def _field(described: FieldDescriptor, depth: int) -> SearchStrategy[bytes]:
    number = described.number
    if described.message_type is not None:
        inner = st.deferred(lambda: messages(described.message_type, depth - 1))
        return inner.map(lambda content: message_field(number, content))
    if described.type in (described.TYPE_STRING, described.TYPE_BYTES):
        return texts.map(lambda content: message_field(number, content))
    if described.is_repeated and described.type not in (described.TYPE_FLOAT, described.TYPE_DOUBLE):
        return st.lists(numbers, max_size=8).map(lambda values: message_field(number, b"".join(map(varint, values))))
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


# ---- connections to a gRPC port: calls with hostile headers, and frames of any kind ------------------------------

_PATHS = (b"", b"/", b"\xff", b"/\0", b"/specdec.v1.\xff\xfe/Generate", b"/a" * 2000, b"*", b"//", b"/specdec.v1./")
_HEADER_VALUES = (
    b"", b"\xff\xfe", b"\0", b"\r\nx: y", b"1S", b"0n", b"99999999H", b"-1S", b"999999999999999S", b"gzip", b"deflate",
    b"identity", b"br", b"application/grpc", b"application/grpc+json", b"text/html", b"trailers", b"x" * 9000, b"%ff%",
    b"Bearer x", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"00-zz-zz-zz", b"a/../b", b"\xc3\xa9",
)  # fmt: skip
_HEADER_NAMES = (
    b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"content-type", b"te", b":authority", b":method",
    b":status", b":scheme", b":path", b":unknown", b"authorization", b"specdec-tenant", b"traceparent", b"tracestate",
    b"x-bin", b"grpc-message", b"grpc-status", b"user-agent", b"content-length", b"connection", b"host", b"UPPER", b"",
    b"x\xff", b"x y", b"grpc-previous-rpc-attempts", b"specdec-request-id",
)  # fmt: skip
_GRPC_MESSAGES = (
    b"", b"\0\0\0\0\0", b"\0\0\0\0\2\x0a\0", b"\1\0\0\0\2\x0a\0", b"\0\xff\xff\xff\xff", b"\0\0\0\0\7\x0a",
    b"\2\0\0\0\0", b"\0\0\0\0\0" * 50, b"\0\0\x10\0\0" + b"\0" * 4096,
)  # fmt: skip
#: Header blocks that no decoder takes: indexes beyond the table, endless integers, a table of 4 GB, a cut string.
HEADER_BLOCKS = (
    b"\xff\xff\xff\xff\xff\x0f",
    b"\x80",
    b"\x3f\xe1\xff\xff\xff\x0f",
    b"\0\x7f",
    b"\xbe" * 40,
    b"\0\x85\xff",
)

_header_fields: SearchStrategy[bytes] = st.builds(
    literal, st.sampled_from(_HEADER_NAMES), st.one_of(st.sampled_from(_HEADER_VALUES), st.binary(max_size=40))
)


def _header_blocks(paths: Sequence[bytes]) -> SearchStrategy[bytes]:
    path = st.one_of(st.sampled_from((*paths, *_PATHS)), st.binary(max_size=60))
    usual = literal(b":authority", b"x") + literal(b"content-type", b"application/grpc") + literal(b"te", b"trailers")
    heads = path.map(lambda path: POST + HTTP + literal(b":path", path) + usual)
    return st.one_of(
        heads,
        st.builds(lambda head, fields: head + b"".join(fields), heads, st.lists(_header_fields, max_size=5)),
        st.lists(_header_fields, max_size=6).map(b"".join),
        st.sampled_from(HEADER_BLOCKS),
    )


def http2_connections(paths: Sequence[bytes]) -> SearchStrategy[bytes]:
    """Return a strategy for all that a client sends on one connection.

    Args:
        paths: of the methods that the port serves.
    """
    calls = st.builds(
        lambda number, block, flags, message: (
            frame(HEADERS, flags, number, block) + frame(DATA, END_STREAM, number, message)
        ),
        st.sampled_from((1, 1, 3, 5, 2, 0)),
        _header_blocks(paths),
        st.sampled_from((END_HEADERS, END_HEADERS, END_HEADERS | END_STREAM, 0, 0xFF)),
        st.one_of(st.sampled_from(_GRPC_MESSAGES), st.binary(max_size=40).map(_grpc_prefixed)),
    )
    frames = st.builds(
        frame,
        st.integers(0, 12),
        st.sampled_from((0, 1, 4, 5, 8, 0x20, 0xFF)),
        st.sampled_from((0, 1, 2, 3, 2**31 - 1, 2**32 - 1)),
        st.one_of(st.binary(max_size=40), st.sampled_from((b"", b"\0" * 4, b"\0" * 8, b"\xff" * 6, b"\0" * 20_000))),
    )
    lengths = st.builds(
        lambda length, rest: struct.pack(">I", length)[1:] + rest, st.integers(0, 2**24 - 1), st.binary()
    )
    begin = st.sampled_from(
        (PREFACE + frame(SETTINGS, 0, 0, b""),) * 6 + (PREFACE, b"", PREFACE[:9], b"GET / HTTP/1.1\r\n\r\n")
    )
    parts = st.lists(st.one_of(calls, calls, frames, lengths), min_size=1, max_size=4).map(b"".join)
    whole = st.builds(lambda begin, parts: begin + parts, begin, parts)
    return st.one_of(whole, whole, whole, st.builds(damaged, whole, damages), st.binary(max_size=200))


def _grpc_prefixed(message: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(message)) + message


# ---- connections to an HTTP port: hostile bodies of its routes, and broken requests ------------------------------

_ROUTES = (
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/v1/models"),
    ("GET", "/v1/models/x"), ("GET", "/v1/sessions/s1"), ("DELETE", "/v1/sessions/s1"), ("GET", "/v1/responses/r"),
    ("DELETE", "/v1/responses/r"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/"), ("GET", "/version"),
)  # fmt: skip
_POSTS = tuple(route for route in _ROUTES if route[0] == "POST")
_KEYS = (
    "model", "prompt", "messages", "input", "max_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "n",
    "stop", "seed", "logit_bias", "logprobs", "stream", "stream_options", "session_id", "speculation", "tokens",
    "tools", "system", "instructions", "previous_response_id", "echo", "ignore_eos", "metadata", "user", "store",
)  # fmt: skip
_CHAT = [{"role": "user", "content": "w5 w6"}]
_JSON_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, 0.5, 1e400, float("nan"), 10**30, 2**32, 2**64, "", "w5 w6", "target", "x" * 5000,
    "\ud800", "\0", [], {}, [5, 6, 7], [[5], [6]], [5, "x"], ["w5", "w6"], [-1], [2**32], _CHAT,
    [{"role": "user"}], [{"role": "system", "content": [{"type": "text", "text": "w5"}]}], {"5": 1}, {"5": 1e39},
    {"x": {}}, {"mode": "coupled"}, {"mode": "off", "gamma": 2}, {"gamma": -1}, [[[[[[[[]]]]]]]],
)  # fmt: skip
_HTTP_HEADERS = (
    b"content-type: application/json", b"content-type: text/plain", b"content-type: application/json; charset=\xff",
    b"content-encoding: gzip", b"authorization: Bearer x", b"authorization: \xff", b"last-event-id: s1:5",
    b"last-event-id: -1", b"specdec-timeout: 0.01", b"specdec-timeout: nan", b"expect: 100-continue",
    b"upgrade: websocket\r\nconnection: upgrade", b"transfer-encoding: chunked", b"transfer-encoding: x",
    b"content-length: -1", b"content-length: 99999999999999", b"x-request-id: " + b"y" * 3000, b"traceparent: 00-zz",
    b"origin: null", b"accept: \xff", b" folded", b"no-colon", b"x:\0", b"host: a\r\nhost: b",
)  # fmt: skip

_json_values: SearchStrategy[Any] = st.one_of(
    st.sampled_from(_JSON_VALUES),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.sampled_from((*_KEYS, "role", "content")), inner, max_size=4),
        ),
        max_leaves=8,
    ),
)
#: What most routes answer, so that single hostile fields beside it are reached.
_SERVED = {"prompt": "w5 w6", "messages": _CHAT, "input": "w5 w6", "tokens": [5, 6], "max_tokens": 2}

_bodies: SearchStrategy[bytes] = st.one_of(
    st.dictionaries(st.sampled_from(_KEYS), _json_values, max_size=5).map(lambda made: json.dumps(made).encode()),
    st.builds(
        lambda route, made: json.dumps({**_served_at(route), **made}).encode(),
        st.sampled_from(_POSTS),
        st.dictionaries(st.sampled_from(_KEYS), _json_values, max_size=2),
    ),
    st.builds(
        lambda route, damage: damaged(json.dumps(_served_at(route)).encode(), damage), st.sampled_from(_POSTS), damages
    ),
    st.binary(max_size=60),
    st.sampled_from(
        (b"", b"[" * 3000, b"{}", b"null", b'{"prompt":', b'{"a":1,"a":2}', b"\xff\xfe{\0}\0", b"1" * 5000)
    ),
)


def _served_at(route: tuple[str, str]) -> dict[str, Any]:
    if "tokenize" in route[1]:
        return {"prompt": "w5"} if route[1] == "/tokenize" else {"tokens": [5, 6]}
    kind = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(route[1], "messages")
    limit = "max_output_tokens" if kind == "input" else "max_tokens"
    return {kind: _SERVED[kind], limit: 2}


def _http_request(route: tuple[str, str], body: bytes, headers: list[bytes], *, states_length: bool) -> bytes:
    lines = [f"{route[0]} {route[1]} HTTP/1.1".encode(), b"host: localhost", b"connection: close", *headers]
    if states_length:
        lines.append(f"content-length: {len(body)}".encode())
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def http_connections() -> SearchStrategy[bytes]:
    """Return a strategy for all that a client sends on one connection."""
    json_type = [b"content-type: application/json"]
    posts = st.builds(
        lambda route, body: _http_request(route, body, json_type, states_length=True), st.sampled_from(_POSTS), _bodies
    )
    headers = st.lists(st.one_of(st.sampled_from(_HTTP_HEADERS), st.binary(max_size=40)), max_size=4)
    requests = st.builds(
        lambda route, body, headers, states_length: _http_request(route, body, headers, states_length=states_length),
        st.sampled_from(_ROUTES), _bodies, headers, st.booleans(),
    )  # fmt: skip
    return st.one_of(posts, posts, requests, st.builds(damaged, posts, damages), st.binary(max_size=120))
