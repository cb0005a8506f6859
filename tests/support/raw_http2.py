"""HTTP/2 that no library would send, written by hand: frames, headers, and calls on one connection each."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
#: A setting: the client takes no bytes of messages.
_NO_WINDOW = struct.pack(">HI", 4, 0)
_CANCEL = struct.pack(">I", 8)
END_STREAM, END_HEADERS = 1, 4
#: Indexes of ":method: POST" and ":scheme: http" in the table of RFC 7541.
POST, HTTP = b"\x83", b"\x86"


def call_bytes(path: bytes, message: bytes = b"") -> bytes:
    """Return all bytes of a connection that calls a gRPC method.

    Args:
        path: value of `:path`, any bytes.
        message: the only message.
    """
    data = frame(DATA, END_STREAM, 1, b"\0" + struct.pack(">I", len(message)) + message)
    return PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, _headers(path)) + data


def unread_call(address: str, path: bytes, message: bytes, more_headers: bytes = b"") -> socket.socket:
    """Call a gRPC method and take no message of its answer; return the connection, which ends the call when closed."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), 60.0)
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, _NO_WINDOW))
    connection.sendall(frame(HEADERS, END_HEADERS, 1, _headers(path) + more_headers))
    connection.sendall(frame(DATA, END_STREAM, 1, b"\0" + struct.pack(">I", len(message)) + message))
    return connection


def reset_calls(address: str, path: bytes, is_over: threading.Event) -> int:
    """Begin calls of a gRPC method and cancel each at once, as fast as one connection can; return their number."""
    host, _, port = address.rpartition(":")
    headers, num_calls = _headers(path), 0
    with socket.create_connection((host, int(port)), 60.0) as connection, suppress(ConnectionError):
        threading.Thread(target=_read_all, args=(connection,), daemon=True).start()
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        while not is_over.is_set():
            numbers = range(2 * num_calls + 1, 2 * num_calls + 201, 2)
            connection.sendall(b"".join(
                frame(HEADERS, END_HEADERS, number, headers) + frame(DATA, END_STREAM, number, bytes(5))
                + frame(RST_STREAM, 0, number, _CANCEL) for number in numbers
            ))  # fmt: skip
            num_calls += 100
    return num_calls


def _headers(path: bytes) -> bytes:
    headers = POST + HTTP + literal(b":path", path) + literal(b":authority", b"test")
    return headers + literal(b"content-type", b"application/grpc") + literal(b"te", b"trailers")


def _read_all(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(1 << 16):
            pass


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field without indexing and without Huffman code."""
    return b"\0" + _length(name) + name + _length(value) + value


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Return a frame of at most 16 MB."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + payload


def _length(content: bytes) -> bytes:
    """Return a length as an integer with a prefix of seven bits (RFC 7541, 5.1)."""
    if len(content) < 127:
        return bytes([len(content)])
    rest, encoded = len(content) - 127, bytearray([127])
    while rest > 127:
        encoded.append(0x80 | rest & 127)
        rest >>= 7
    return bytes([*encoded, rest])
