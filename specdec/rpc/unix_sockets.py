"""A lane: frames between services of one user on one machine, over a Unix socket beside gRPC.

    link ── hello: the model meant ──▶ replica
    link ◀── hello: its model, its incarnation; or why not ── replica
    frames both ways, each behind its length

A message through gRPC wakes a thread of its core, and that the event loop; through a lane it wakes the event loop
alone. What travels, and what it means, is the same. A replica names its lane in GetEngineInfo; whoever cannot use it,
or loses it, goes on over gRPC. The socket's name is abstract: it is no file, and gone with its process. Both ends take
nobody but their own user and root. Not here: the two ends (`lane_server`, `lane_stream`), what a frame holds
(`framing`).
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct
import sys
from collections.abc import Generator, Iterator

from google.protobuf.message import DecodeError

#: As it is told; the kernel wants a zero byte for the @.
_NAME = re.compile(r"@specdec-lane-[0-9a-f]{32}")

#: What both ends say first: who does not is no end of a lane.
_GREETING = b"specdec-lane/1\n"
MAX_HELLO_BYTES = 1024

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def new_name() -> str:
    """A name that nobody has; "" where the system knows no abstract sockets."""
    return f"@specdec-lane-{secrets.token_hex(16)}" if sys.platform == "linux" else ""


def is_name(name: str) -> bool:
    """Whether a replica's word for its lane can be one here."""
    return sys.platform == "linux" and _NAME.fullmatch(name) is not None


def socket_path(name: str) -> str:
    """A lane's name as the kernel takes it."""
    return "\0" + name[1:]


def is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user, or as root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] in (0, os.geteuid())


def prefixed(frame: bytes) -> bytes:
    """A frame behind its length."""
    return _LENGTH.pack(len(frame)) + frame


def handshake(*words: str) -> bytes:
    """What an end says first, as a frame."""
    return prefixed(_GREETING + "\n".join(words).encode())


def received_handshake(frame: bytes) -> list[str]:
    """What the other end said first. Raises DecodeError: it is no end of a lane."""
    if not frame.startswith(_GREETING):
        raise DecodeError("it does not greet as a lane does")
    return frame[len(_GREETING) :].decode(errors="replace").split("\n")


class FrameReader:
    """Takes bytes as they come and gives whole frames."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        """A longer one is refused by its length, unread. May be changed between frames."""
        self._received = bytearray()

    def frames(self, data: bytes) -> Iterator[bytes]:
        """The frames that `data` completes. Raises DecodeError: one is too long; nothing can be read any more."""
        if not self._received:  # as good as always: one message, one read
            position = yield from self._cut(data)
            self._received += data[position:]
            return
        self._received += data
        position = yield from self._cut(self._received)
        del self._received[:position]

    def _cut(self, data: bytes | bytearray) -> Generator[bytes, None, int]:
        """Returns how far it came."""
        position = 0
        while len(data) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, position)
            if length > self.max_frame_bytes:
                raise DecodeError(f"a frame of {length} bytes; the limit is {self.max_frame_bytes}")
            end = position + _LENGTH.size + length
            if end > len(data):
                break
            yield bytes(data[position + _LENGTH.size : end])
            position = end
        return position
