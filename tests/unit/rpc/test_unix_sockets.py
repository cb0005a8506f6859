"""Unix sockets beside gRPC: when they are used, how they break, and hostile peers on both sides."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.proposer import Proposer
from draft_service.servicer import DraftServicer
from specdec.contract import errors
from specdec.contract.types import ProposeRequest
from specdec.engine.loop import watchdog
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc import codec, unix_socket_server, unix_sockets
from specdec.rpc.client import DraftLink
from specdec.rpc.frames import MAX_OPEN_ITEMS
from specdec.rpc.framing import join_items
from specdec.rpc.service_server import DRAFT_SERVICE, ServiceServer
from specdec.rpc.unix_sockets import FrameReader, handshake, is_name, new_name, prefixed, socket_path
from specdec.v1 import draft_pb2
from tests.support.arithmetic_engines import ArithmeticDraft, make_round
from tests.support.coordinator_rig import eventually
from tests.support.table_worker import TableWorker
from tests.support.watched_worker import WatchedWorker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets exist on Linux alone")

MAX_FRAME_BYTES = 1 << 20
PATIENCE_S = 30.0
GRACE_S = 10 * PATIENCE_S


class Replica:
    """A draft service around the arithmetic engine or another one, with a port and a Unix socket."""

    def __init__(self, engine: Any = None) -> None:
        self.engine = ArithmeticDraft() if engine is None else engine
        self.servicer = DraftServicer(self.engine, EngineMetrics("arithmetic", role="draft"))
        self.server = ServiceServer("127.0.0.1:0", service_names=(DRAFT_SERVICE,))
        self.servicer.add_to(self.server.grpc_server)

    async def __aenter__(self) -> Replica:
        await self.server.start()
        await self.servicer.open_unix_socket(MAX_FRAME_BYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(self.server.stop(0), self.servicer.close_unix_socket(0))

    @property
    def num_connections(self) -> int:
        """Number of open connections: the kernel lists a name once for each of them and once for the listener."""
        return sum(line.endswith(self.unix_socket) for line in Path("/proc/net/unix").read_text().splitlines()) - 1

    @property
    def unix_socket(self) -> str:
        return self.servicer.info().unix_socket


@asynccontextmanager
async def linked(replica: Replica, unix_socket: str | None = None) -> Any:
    link = DraftLink(replica.server.address)
    link.transports.unix_socket = replica.unix_socket if unix_socket is None else unix_socket
    try:
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def false_unix_socket(answers: Callable[[asyncio.StreamWriter], None]) -> Any:
    """Serve a socket that answers a handshake with other bytes; yield its name."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        answers(writer)
        await reader.read()
        writer.close()

    name = new_name()
    server = await asyncio.start_unix_server(serve, socket_path(name))
    try:
        yield name
    finally:
        server.close()


def ask(session_id: str = "s") -> ProposeRequest:
    return ProposeRequest(make_round(session_id), 3)


async def test_calls_use_the_unix_socket_if_the_replica_has_one() -> None:
    async with Replica() as replica, linked(replica) as link:
        await replica.server.stop(0)  # the gRPC port is closed
        assert (await link.propose(ask())).draft_token_ids.tolist() == [3, 4, 5]


async def test_a_replica_without_unix_sockets_names_none() -> None:
    assert DraftServicer(ArithmeticDraft(), EngineMetrics("arithmetic", role="draft")).info().unix_socket == ""


@pytest.mark.parametrize(
    "name",
    ["", "/var/run/docker.sock", "@specdec-lane-", "@other-" + "0" * 32, "@specdec-lane-" + "0" * 32 + "\n", "@" * 200],
)
async def test_a_link_never_connects_to_a_name_of_another_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: object, **__: object) -> None:
        raise AssertionError("connected")

    async with Replica() as replica, linked(replica, name) as link:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", connect)
        assert not is_name(name)
        assert (await link.propose(ask())).kv_len == 5


async def test_a_socket_without_a_listener_fails_no_call() -> None:
    """This is the case of a replica on another machine or in another container."""
    async with Replica() as replica, linked(replica, new_name()) as link:
        calls = [link.propose(ask(f"s{index}")) for index in range(3)]
        assert [answer.kv_len for answer in await asyncio.gather(*calls)] == [5, 5, 5]


async def test_a_call_fails_when_its_socket_is_broken_off_while_connecting() -> None:
    async with Replica() as replica, linked(replica) as link:
        call = asyncio.create_task(link.propose(ask()))
        await asyncio.sleep(0)
        link.break_off("it stands still")
        with pytest.raises(errors.Unavailable, match="it stands still"):
            await call


async def test_a_broken_socket_fails_its_pending_calls_and_the_next_call_uses_grpc() -> None:
    async with Replica() as replica, linked(replica) as link:
        pending = [asyncio.create_task(link.propose(ask(f"hold {index}"))) for index in range(3)]
        await replica.engine.asked["hold 2"].wait()
        await replica.servicer.close_unix_socket(0)
        for call in pending:
            with pytest.raises(errors.Unavailable, match="closed the Unix socket"):
                await call
        assert sorted(replica.engine.given_up) == ["hold 0", "hold 1", "hold 2"]
        assert (await link.propose(ask())).kv_len == 5


async def test_a_link_moves_to_a_newly_known_socket_once_no_call_is_pending() -> None:
    async with Replica() as replica, linked(replica, "") as link:
        held = asyncio.create_task(link.propose(ask("hold")))
        await replica.engine.asked["hold"].wait()
        link.transports.unix_socket = replica.unix_socket
        assert (await link.propose(ask())).kv_len == 5
        assert not held.done()  # its stream stays open
        replica.engine.release_held.set()
        await held
        assert (await link.propose(ask())).kv_len == 5
        await replica.server.stop(0)
        assert (await link.propose(ask())).kv_len == 5


async def test_a_socket_of_another_model_answers_no_call() -> None:
    async with Replica() as replica, linked(replica) as link:
        with pytest.raises(errors.Unavailable, match="meant for model other"):
            await link.propose(ask(), model="other")
        assert replica.engine.seen == []
        assert (await link.propose(ask(), model="model")).kv_len == 5


async def test_the_handshake_on_a_socket_states_the_process() -> None:
    async with Replica() as replica, linked(replica) as link:
        met: list[str] = []
        link.on_handshake = met.append
        await link.propose(ask())
        await link.propose(ask())
        assert met == [replica.servicer.info().incarnation]


async def test_a_process_of_another_user_is_refused_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Replica() as replica, linked(replica) as link:
        monkeypatch.setattr(unix_socket_server, "is_of_this_user", lambda connection: False)
        assert (await link.propose(ask())).kv_len == 5  # over gRPC
        assert replica.num_connections == 0
    monkeypatch.undo()
    async with Replica() as replica, linked(replica) as link:
        monkeypatch.setattr("specdec.rpc.unix_socket_transport.is_of_this_user", lambda connection: False)
        assert (await link.propose(ask())).kv_len == 5
        assert replica.num_connections == 0


def test_the_user_at_the_other_end_of_a_socket_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert unix_sockets.is_of_this_user(ours)
        if os.geteuid() == 0:  # sockets of root are accepted by every user
            os.seteuid(65534)
            try:
                stranger, other = socket.socketpair(socket.AF_UNIX)
            finally:
                os.seteuid(0)
            with stranger, other:
                assert not unix_sockets.is_of_this_user(stranger)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            assert not unix_sockets.is_of_this_user(ours)


HANDSHAKE = handshake("model", "incarnation")
#: Bytes of a false socket, and the message that a call on it fails with; "": the handshake did not succeed.
ANSWERS = {
    "garbage": (lambda writer: writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n"), ""),
    "an endless handshake": (lambda writer: writer.write(b"\xff\xff\x00\x00" + bytes(70_000)), ""),
    "a refusal": (lambda writer: writer.write(handshake("not now")), ""),
    "bytes that are not a frame": (lambda writer: writer.write(HANDSHAKE + prefixed(b"\xff\xff\xff")), "not a frame"),
    "an answer to no call": (
        lambda writer: writer.write(
            HANDSHAKE + prefixed(join_items([draft_pb2.Proposal(call_id=77).SerializeToString()]))
        ),
        "answered call 77",
    ),
    "an endless frame": (lambda writer: writer.write(HANDSHAKE + b"\xff\xff\xff\xff"), "not a frame"),
    "nothing at all": (lambda writer: writer.close(), ""),
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_a_false_socket_fails_its_calls_after_the_handshake_and_later_calls_use_grpc(kind: str) -> None:
    answers, expected = ANSWERS[kind]
    async with Replica() as replica, false_unix_socket(answers) as name, linked(replica, name) as link:
        if expected:
            with pytest.raises(errors.Unavailable, match=expected):
                await link.propose(ask())
        assert (await link.propose(ask())).kv_len == 5


async def _speak(name: str, *words: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(socket_path(name))
    for word in words:
        writer.write(word)
    return reader, writer


async def test_hostile_callers_are_logged_at_most_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    async with Replica() as replica:
        for _ in range(20):
            reader, writer = await _speak(replica.unix_socket, b"GET / HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(10):
                assert await reader.read(4096) == b""
            writer.close()
    assert caplog.text.count("closed a Unix-socket connection") in range(1, 10)  # one line, unless this takes seconds


async def test_a_caller_that_sends_without_limit_is_read_up_to_a_limit() -> None:
    num_frames, per_frame = 12, 1024
    async with Replica() as replica:
        reader, writer = await _speak(replica.unix_socket, handshake(""))
        for frame in range(num_frames):
            requests = [
                codec.encode_propose_request(ask(f"hold {frame}.{index}"), frame * per_frame + index)
                for index in range(per_frame)
            ]
            writer.write(prefixed(join_items([request.SerializeToString() for request in requests])))
        num_seen = -1
        while num_seen != len(replica.engine.seen):
            num_seen = len(replica.engine.seen)
            await asyncio.sleep(0.2)
        assert MAX_OPEN_ITEMS <= num_seen <= MAX_OPEN_ITEMS + 4 * per_frame  # plus one read of the socket
        replica.engine.release_held.set()
        frames, num_answered = FrameReader(MAX_FRAME_BYTES), 0
        async with asyncio.timeout(60):
            while num_answered < num_frames * per_frame:
                for frame in frames.frames(await reader.read(1 << 20)):
                    if not frame.startswith(b"specdec-lane"):
                        num_answered += len(draft_pb2.ProposalFrame.FromString(frame).proposals)
        writer.transport.abort()


async def test_calls_cancelled_while_a_replica_does_not_read_are_never_sent() -> None:
    received, begin = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        await reader.readexactly(len(handshake("")))
        writer.write(HANDSHAKE)
        await begin.wait()
        while chunk := await reader.read(1 << 20):
            received += len(chunk)
        writer.close()

    name = new_name()
    server = await asyncio.start_unix_server(serve, socket_path(name), limit=1 << 12)
    async with Replica() as replica:
        async with linked(replica, name) as link:
            for _ in range(100):
                given_up = asyncio.create_task(link.propose(ProposeRequest(make_round(num_tokens=50_000), 3)))
                await asyncio.sleep(0.001)
                given_up.cancel()
                await asyncio.wait([given_up])
            begin.set()
            await asyncio.sleep(0.2)
        server.close()
    assert 0 < received < 2_000_000  # of 10 million


@pytest.mark.parametrize("words", [b"", handshake("")], ids=["silent", "shakes hands"])
async def test_a_draining_replica_answers_its_calls_and_does_not_wait_for_idle_connections(words: bytes) -> None:
    async with Replica() as replica, linked(replica) as link:
        reader, writer = await _speak(replica.unix_socket, words)
        call = asyncio.create_task(link.propose(ask("hold")))
        await replica.engine.asked["hold"].wait()
        replica.servicer.drain()
        ending = asyncio.create_task(replica.servicer.close_unix_socket(GRACE_S))
        async with asyncio.timeout(PATIENCE_S):
            await reader.read()  # the idle connection ends
            assert not ending.done()
            replica.engine.release_held.set()
            assert (await call).kv_len == 5
            await ending
        writer.close()


@pytest.mark.parametrize("num_turns", range(4))
async def test_a_connection_that_is_being_accepted_when_the_drain_begins_is_closed(num_turns: int) -> None:
    async with Replica() as replica:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(socket_path(replica.unix_socket))
            caller.setblocking(False)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            replica.servicer.drain()
            await asyncio.sleep(0.05)  # a replica announces that it drains before it closes its socket
            async with asyncio.timeout(PATIENCE_S):
                await replica.servicer.close_unix_socket(GRACE_S)
                assert await asyncio.get_running_loop().sock_recv(caller, 1) == b""


async def test_a_device_that_hangs_during_a_drain_does_not_delay_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.2)
    worker = WatchedWorker(TableWorker())
    engine = Proposer(worker)
    await engine.warm_up()
    async with Replica(engine) as replica, linked(replica) as link:
        worker.allow(0)
        call = asyncio.create_task(link.propose(ask()))
        await worker.held()
        replica.servicer.drain()
        async with asyncio.timeout(PATIENCE_S):
            ending = asyncio.create_task(replica.servicer.close_unix_socket(GRACE_S))
            with pytest.raises(errors.Unavailable, match="hangs"):
                await call
            await ending
    worker.let_go()
    await eventually(lambda: not engine.is_stalled)
    await engine.close()


async def test_one_connection_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_socket_server, "MAX_CONNECTIONS", 2)
    async with Replica() as replica, linked(replica) as first, linked(replica) as second, linked(replica) as third:
        await asyncio.gather(first.propose(ask()), second.propose(ask()))
        assert (await third.propose(ask())).kv_len == 5  # over gRPC
        assert replica.num_connections == 2


async def test_ended_connections_are_freed() -> None:
    async with Replica() as replica:
        for index in range(20):
            async with linked(replica) as link:
                await link.propose(ask(f"s{index}"))
        async with asyncio.timeout(20.0):
            await eventually(lambda: replica.num_connections == 0)
        gc.collect()
        assert sum(type(kept) is unix_socket_server.UnixSocketConnection for kept in gc.get_objects()) == 0


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 50), max_size=20))
def test_frames_are_the_same_however_their_bytes_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    content = b"".join(map(prefixed, frames))
    reader, received = FrameReader(40), []
    for cut in [*cuts, len(content)]:
        received += reader.frames(content[:cut])
        content = content[cut:]
    assert received == frames
