"""Strategies for the bytes of whole connections to a gRPC port: calls with hostile headers, and frames of any kind."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.support.hostile_messages import damaged, damages
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

_PATHS = (b"", b"/", b"\xff", b"/\0", b"/specdec.v1.\xff\xfe/Generate", b"/a" * 2000, b"*", b"//", b"/specdec.v1./")
_VALUES = (
    b"", b"\xff\xfe", b"\0", b"\r\nx: y", b"1S", b"0n", b"99999999H", b"-1S", b"999999999999999S", b"gzip", b"deflate",
    b"identity", b"br", b"application/grpc", b"application/grpc+json", b"text/html", b"trailers", b"x" * 9000, b"%ff%",
    b"Bearer x", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"00-zz-zz-zz", b"a/../b", b"\xc3\xa9",
)  # fmt: skip
_NAMES = (
    b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"content-type", b"te", b":authority", b":method",
    b":status", b":scheme", b":path", b":unknown", b"authorization", b"specdec-tenant", b"traceparent", b"tracestate",
    b"x-bin", b"grpc-message", b"grpc-status", b"user-agent", b"content-length", b"connection", b"host", b"UPPER", b"",
    b"x\xff", b"x y", b"grpc-previous-rpc-attempts", b"specdec-request-id",
)  # fmt: skip
_MESSAGES = (
    b"", b"\0\0\0\0\0", b"\0\0\0\0\2\x0a\0", b"\1\0\0\0\2\x0a\0", b"\0\xff\xff\xff\xff", b"\0\0\0\0\7\x0a",
    b"\2\0\0\0\0", b"\0\0\0\0\0" * 50, b"\0\0\x10\0\0" + b"\0" * 4096,
)  # fmt: skip
#: Header blocks that no decoder takes: indexes beyond the table, endless integers, a table of 4 GB, a cut string.
_BLOCKS = (b"\xff\xff\xff\xff\xff\x0f", b"\x80", b"\x3f\xe1\xff\xff\xff\x0f", b"\0\x7f", b"\xbe" * 40, b"\0\x85\xff")

_fields: SearchStrategy[bytes] = st.builds(
    literal, st.sampled_from(_NAMES), st.one_of(st.sampled_from(_VALUES), st.binary(max_size=40))
)


def _headers(paths: Sequence[bytes]) -> SearchStrategy[bytes]:
    path = st.one_of(st.sampled_from((*paths, *_PATHS)), st.binary(max_size=60))
    usual = literal(b":authority", b"x") + literal(b"content-type", b"application/grpc") + literal(b"te", b"trailers")
    heads = path.map(lambda path: POST + HTTP + literal(b":path", path) + usual)
    return st.one_of(
        heads,
        st.builds(lambda head, fields: head + b"".join(fields), heads, st.lists(_fields, max_size=5)),
        st.lists(_fields, max_size=6).map(b"".join),
        st.sampled_from(_BLOCKS),
    )


def connections(paths: Sequence[bytes]) -> SearchStrategy[bytes]:
    """Return a strategy for all that a client sends on one connection.

    Args:
        paths: of the methods that the port serves.
    """
    calls = st.builds(
        lambda number, block, flags, message: (
            frame(HEADERS, flags, number, block) + frame(DATA, END_STREAM, number, message)
        ),
        st.sampled_from((1, 1, 3, 5, 2, 0)),
        _headers(paths),
        st.sampled_from((END_HEADERS, END_HEADERS, END_HEADERS | END_STREAM, 0, 0xFF)),
        st.one_of(st.sampled_from(_MESSAGES), st.binary(max_size=40).map(_prefixed)),
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


def _prefixed(message: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(message)) + message
