"""Clients that send hostile bytes to every port of a system, and note answers that no client may get.

A shot is one message: a call of a gRPC method, or all bytes of one connection over HTTP/2, HTTP or a Unix socket. Made
by the strategies of `hostile_messages`, `hostile_http2` and `hostile_http`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from specdec.rpc.unix_sockets import handshake, prefixed, socket_path
from specdec.v1 import coordinator_pb2, draft_pb2, target_pb2
from tests.support import hostile_http, hostile_http2
from tests.support.hostile_messages import hostile

#: Codes of gRPC for faults of the server itself.
_FAULTS = frozenset(("UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE"))
_HTTP_FAULTS = frozenset(("500", "502"))
#: Longest wait for a call's answer; a client that waits in vain reports a hang.
_HANG_S = 60.0
#: Time for which a connection of raw bytes is kept open after its last answer.
_LINGER_S = 0.05

#: How often a kind of port is chosen beside the others.
_WEIGHTS = {"grpc": 5, "http": 5}

#: Services of the ports whose kind is "grpc".
SERVICES: dict[str, tuple[ServiceDescriptor, ...]] = {
    "coordinator": (coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],),
    "draft": (draft_pb2.DESCRIPTOR.services_by_name["DraftService"],),
    "target": (target_pb2.DESCRIPTOR.services_by_name["TargetService"],),
}


@dataclass(frozen=True)
class Shot:
    """One hostile message."""

    port: str
    """Name of the port: "grpc", "admin", "health", "http", "metrics" or "socket", and the role that serves it."""
    content: bytes
    method: str = ""
    """Full path of the gRPC method; "" for raw bytes."""
    takes_stream: bool = False
    returns_stream: bool = False
    leaves_after: int | None = None
    """Number of answers of a stream after which the client vanishes; None: it waits for the end."""


def shots(honest: Mapping[str, Sequence[bytes]], ports: Sequence[str]) -> SearchStrategy[Shot]:
    """Return a strategy for one shot at one of the ports, those of gRPC and HTTP more often than others.

    Args:
        honest: messages that a service would serve, by method.
        ports: names of the ports, as in `HostileClients`.
    """
    kinds = [_at(port, honest) for port in ports for _ in range(_WEIGHTS.get(port.partition(" ")[0], 1))]
    return st.sampled_from(kinds).flatmap(lambda shots: shots)


def _at(port: str, honest: Mapping[str, Sequence[bytes]]) -> SearchStrategy[Shot]:
    kind, _, role = port.partition(" ")
    if kind in ("http", "metrics"):
        return st.builds(Shot, st.just(port), hostile_http.connections())
    if kind == "socket":
        return st.builds(Shot, st.just(port), _socket_bytes(role.split()[0], honest))
    services = (health_pb2.DESCRIPTOR.services_by_name["Health"],)
    if kind == "admin":
        services = (SERVICES[role][0], *services)
    elif kind == "grpc":
        services = (*SERVICES[role], *services, reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"])
    methods = {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}
    raw = st.builds(Shot, st.just(port), hostile_http2.connections([path.encode() for path in methods]))
    leaving = st.sampled_from((None, None, 0, 1, 3))
    calls = [
        st.builds(
            Shot, st.just(port), hostile(method.input_type, tuple(honest.get(path, ()))), st.just(path),
            st.just(method.client_streaming), st.just(method.server_streaming), leaving,
        )
        for path, method in methods.items()
    ]  # fmt: skip
    return st.one_of(st.sampled_from(calls).flatmap(lambda call: call), raw)


def _socket_bytes(role: str, honest: Mapping[str, Sequence[bytes]]) -> SearchStrategy[bytes]:
    frame_type = (draft_pb2.ProposeFrame if role == "draft" else target_pb2.VerifyFrame).DESCRIPTOR
    path = "/specdec.v1.DraftService/Propose" if role == "draft" else "/specdec.v1.TargetService/Verify"
    frames = hostile(frame_type, tuple(honest.get(path, ())))
    framed = st.one_of(frames.map(prefixed), frames.map(prefixed), frames, st.sampled_from((b"\xff" * 4, b"\0" * 40)))
    greeting = st.one_of(
        st.just(handshake("")), st.just(handshake("")), st.binary(max_size=40), st.just(handshake("x"))
    )
    return st.builds(lambda greeting, parts: greeting + b"".join(parts), greeting, st.lists(framed, max_size=3))


@dataclass
class HostileClients:
    """Sends shots. Use from one event loop; close it at the end."""

    ports: Mapping[str, str]
    """Address of each port, HOST:PORT or the name of a Unix socket."""
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Descriptions of shots whose answer was a fault of the server, or that had no answer."""
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    async def send_all(self, shots: Sequence[Shot]) -> None:
        """Send shots at once, and wait for all answers."""
        await asyncio.gather(*(self._send(shot) for shot in shots))

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def _send(self, shot: Shot) -> None:
        try:
            async with asyncio.timeout(_HANG_S):
                outcome = await (self._call(shot) if shot.method else self._connect(shot))
        except TimeoutError:
            outcome = "HANG"
        self.outcomes[f"{shot.port} {outcome}"] += 1
        if outcome == "HANG" or outcome in _FAULTS or outcome in _HTTP_FAULTS:
            self.faults.append(f"{outcome} after {shot}")

    async def _call(self, shot: Shot) -> str:
        channel = self._channels.setdefault(shot.port, grpc.aio.insecure_channel(self.ports[shot.port]))
        shape = f"{'stream' if shot.takes_stream else 'unary'}_{'stream' if shot.returns_stream else 'unary'}"
        call: Any = getattr(channel, shape)(shot.method)
        try:
            stream = call(_once(shot.content) if shot.takes_stream else shot.content)
            if not shot.returns_stream:
                await stream
                return "OK"
            number = 0
            async for _ in stream:
                number += 1
                if shot.leaves_after is not None and number > shot.leaves_after:
                    stream.cancel()
                    return "LEFT"
                if "Watch" in shot.method or "Subscribe" in shot.method:  # they do not end
                    stream.cancel()
                    return "LEFT"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async def _connect(self, shot: Shot) -> str:
        address = self.ports[shot.port]
        try:
            if shot.port.startswith("socket"):
                reader, writer = await asyncio.open_unix_connection(socket_path(address))
            else:
                host, _, port = address.rpartition(":")
                reader, writer = await asyncio.open_connection(host, int(port))
        except OSError as error:
            return f"UNAVAILABLE: {error}"
        received = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            writer.write(shot.content)
            while len(received) < 1 << 20 and (part := await asyncio.wait_for(reader.read(1 << 16), _LINGER_S)):
                received += part
        writer.transport.abort()
        status = re.match(rb"HTTP/1\.[01] (\d{3})", received)
        return status[1].decode() if status else "SENT"


async def _once(content: bytes) -> Any:
    yield content
