"""Clients that send hostile bytes to every port of a system, and note answers that no client may get.

A shot is one message: a call of a gRPC method, or all bytes of one connection over HTTP/2, HTTP or a Unix socket. Made
at random by `strategies`, and named one by one in `catalogue`.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from specdec.rpc.unix_sockets import handshake, prefixed, socket_path
from specdec.v1 import coordinator_pb2, draft_pb2, target_pb2
from tests.support.hostile import catalogue, strategies
from tests.support.hostile.catalogue import PROPOSE, VERIFY

#: Codes of gRPC for faults of the server itself.
_FAULTS = frozenset(("UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE"))
_HTTP_FAULTS = frozenset(("500", "502"))
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
#: Longest wait for a call's answer; a client that waits in vain reports a hang.
_HANG_S = 60.0
#: Time for which a connection of raw bytes is kept open after its last answer.
_LINGER_S = 0.05

_OPTIONS = (("grpc.max_send_message_length", -1),)

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
    awaits_end: bool = False
    """Whether raw bytes are followed by a wait until the server closes the connection."""


def shots(honest: Mapping[str, Sequence[bytes]], ports: Sequence[str]) -> SearchStrategy[Shot]:
    """Return a strategy for one shot at one of the ports, those of gRPC and HTTP more often than others.

    Args:
        honest: messages that a service would serve, by method.
        ports: names of the ports, as in `HostileClients`.
    """
    kinds = [_at(port, honest) for port in ports for _ in range(_WEIGHTS.get(port.partition(" ")[0], 1))]
    return st.sampled_from(kinds).flatmap(lambda shots: shots)


def methods_of(port: str) -> dict[str, MethodDescriptor]:
    """Return the methods that a gRPC port serves, by full path."""
    kind, _, role = port.partition(" ")
    services = (health_pb2.DESCRIPTOR.services_by_name["Health"],)
    if kind == "admin":
        services = (SERVICES[role][0], *services)
    elif kind == "grpc":
        services = (*SERVICES[role], *services, reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"])
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


def attacks(port: str) -> Iterator[tuple[str, Shot, str]]:
    """Return everything of the catalogue for a port: name, what is sent, and the pattern of the right answers.

    The pattern is "" if any answer is right that is no fault of the server.
    """
    for name, raw in catalogue.RAW.items():
        answers = raw.answers.get(port.partition(" ")[0], "")
        yield name, Shot(port, raw.content, awaits_end=bool(answers)), answers
    if not port.startswith(("grpc", "admin", "health")):
        return
    unserved = "|PERMISSION_DENIED" if port.startswith("admin") else ""
    for path, method in methods_of(port).items():
        call = partial(Shot, port, method=path, takes_stream=method.client_streaming,
                       returns_stream=method.server_streaming)  # fmt: skip
        yield f"{path}: broken bytes", call(catalogue.BROKEN), "INVALID_ARGUMENT|UNIMPLEMENTED" + unserved
        for name, content in catalogue.EXPLOSIONS.get(path, {}).items():
            yield f"{path}: {name}", call(content), "INVALID_ARGUMENT" + unserved


def _at(port: str, honest: Mapping[str, Sequence[bytes]]) -> SearchStrategy[Shot]:
    kind, _, role = port.partition(" ")
    if kind in ("http", "metrics"):
        return st.builds(Shot, st.just(port), strategies.http_connections())
    if kind == "socket":
        return st.builds(Shot, st.just(port), _socket_bytes(role.split()[0], honest))
    methods = methods_of(port)
    raw = st.builds(Shot, st.just(port), strategies.http2_connections([path.encode() for path in methods]))
    leaving = st.sampled_from((None, None, 0, 1, 3))
    calls = [
        st.builds(
            Shot, st.just(port), strategies.hostile(method.input_type, tuple(honest.get(path, ()))), st.just(path),
            st.just(method.client_streaming), st.just(method.server_streaming), leaving,
        )
        for path, method in methods.items()
    ]  # fmt: skip
    return st.one_of(st.sampled_from(calls).flatmap(lambda call: call), raw)


def _socket_bytes(role: str, honest: Mapping[str, Sequence[bytes]]) -> SearchStrategy[bytes]:
    frame_type = (draft_pb2.ProposeFrame if role == "draft" else target_pb2.VerifyFrame).DESCRIPTOR
    path = PROPOSE if role == "draft" else VERIFY
    frames = strategies.hostile(frame_type, tuple(honest.get(path, ())))
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
        await asyncio.gather(*(self.send(shot) for shot in shots))

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def send(self, shot: Shot) -> str:
        """Send a shot; return the code of its answer, or CLOSED or SENT if raw bytes got none.

        For bytes that gRPC's core cannot read, it answers INTERNAL before any service: that is no fault.
        """
        try:
            async with asyncio.timeout(_HANG_S):
                outcome = await (self._call(shot) if shot.method else self._connect(shot))
        except TimeoutError:
            outcome = "HANG"
        self.outcomes[f"{shot.port} {outcome}"] += 1
        if outcome == "HANG" or outcome in _FAULTS or outcome[:3] in _HTTP_FAULTS:
            self.faults.append(f"{outcome} after {shot}")
        return outcome

    async def _call(self, shot: Shot) -> str:
        channel = self._channels.setdefault(
            shot.port, grpc.aio.insecure_channel(self.ports[shot.port], options=_OPTIONS)
        )
        shape = f"{'stream' if shot.takes_stream else 'unary'}_{'stream' if shot.returns_stream else 'unary'}"
        call: Any = getattr(channel, shape)(shot.method)
        try:
            stream = call(_once(shot.content) if shot.takes_stream else shot.content)
            if not shot.returns_stream:
                await stream
                return "OK"
            number, refused = 0, "OK"
            async for answer in stream:
                number += 1
                refused = _refused_item(shot.method, answer) or refused
                if shot.leaves_after is not None and number > shot.leaves_after:
                    stream.cancel()
                    return "LEFT"
                if "Watch" in shot.method or "Subscribe" in shot.method:  # they do not end
                    stream.cancel()
                    return "LEFT"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return refused

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
        received, outcome = b"", "CLOSED"
        try:
            writer.write(shot.content)
            wait_s = None if shot.awaits_end else _LINGER_S
            while len(received) < 1 << 20 and (part := await asyncio.wait_for(reader.read(1 << 16), wait_s)):
                received += part
                if b"grpc-status" in received:
                    break
        except TimeoutError:
            outcome = "SENT"
        except ConnectionError:
            pass
        writer.transport.abort()
        if status := re.match(rb"HTTP/1\.[01] (\d{3})", received):
            kind = re.search(rb'"type": ?"(\w+)"', received)  # of the gateway's error object
            return f"{status[1].decode()} {kind[1].decode()}" if kind else status[1].decode()
        number = re.search(rb"grpc-status(?:\x02(\d\d)|\x01(\d))", received)
        return f"status {_CODES[int(number[1] or number[2])]}" if number else outcome


def _refused_item(method: str, answer: bytes) -> str:
    """Return the code of the first item that a frame of answers refuses, "" if there is none."""
    if method == PROPOSE:
        items: Any = draft_pb2.ProposalFrame.FromString(answer).proposals
    elif method == VERIFY:
        items = target_pb2.VerificationFrame.FromString(answer).verifications
    else:
        items = ()
    return next((_CODES[item.status.code] for item in items if item.status.code), "")


async def _once(content: bytes) -> Any:
    yield content
