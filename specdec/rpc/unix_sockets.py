"""Names, handshake and framing of the Unix sockets over which services of one user on one machine exchange frames.

    link ── handshake: the model that is meant ──▶ replica
    link ◀── handshake: its model and its incarnation, or why it refuses ── replica
    frames in both directions, each after its length

Over gRPC a message wakes a thread of gRPC's core and then the event loop; over a Unix socket it wakes the event loop
alone. The frames and their meaning are the same. A replica states its socket's name in GetEngineInfo; a link that
cannot use it, or loses it, continues over gRPC. The name is abstract: it is not a file, and it disappears with its
process. Both ends accept only processes of their own user and of root. The two ends are
`specdec.rpc.unix_socket_transport` and `specdec.rpc.unix_socket_server`.
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

#: A name as it is announced; for the kernel the "@" is a zero byte.
_NAME = re.compile(r"@specdec-lane-[0-9a-f]{32}")

#: First bytes that both ends send; a peer that sends others does not speak this protocol.
_GREETING = b"specdec-lane/1\n"
MAX_HANDSHAKE_BYTES = 1024

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def new_name() -> str:
    """Return an unused socket name; "" if the system has no abstract sockets."""
    return f"@specdec-lane-{secrets.token_hex(16)}" if sys.platform == "linux" else ""


def is_name(name: str) -> bool:
    """Return whether a name that a replica announced is a socket name of this protocol and usable here."""
    return sys.platform == "linux" and _NAME.fullmatch(name) is not None


def socket_path(name: str) -> str:
    """Return a socket name in the kernel's form."""
    return "\0" + name[1:]


def is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as the user of this one, or as root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] in (0, os.geteuid())


def prefixed(frame: bytes) -> bytes:
    """Return a frame with its length in front."""
    return _LENGTH.pack(len(frame)) + frame


def handshake(*lines: str) -> bytes:
    """Return the first message of an end, as a frame with its length in front."""
    return prefixed(_GREETING + "\n".join(lines).encode())


def received_handshake(frame: bytes) -> list[str]:
    """Return the lines of the other end's first message. Raises DecodeError: it does not speak this protocol."""
    if not frame.startswith(_GREETING):
        raise DecodeError("the first message is not a handshake")
    return frame[len(_GREETING) :].decode(errors="replace").split("\n")


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        """A longer frame is refused by its length, before it is read. May be changed between frames."""
        self._received = bytearray()

    def frames(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that `data` completes. Raises DecodeError if one is too long; reading ends there."""
        if not self._received:  # nearly always: one read brings one message
            position = yield from self._cut(data)
            self._received += data[position:]
            return
        self._received += data
        position = yield from self._cut(self._received)
        del self._received[:position]

    def _cut(self, data: bytes | bytearray) -> Generator[bytes, None, int]:
        """Yield the whole frames at the start of `data`; return the position after them."""
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
