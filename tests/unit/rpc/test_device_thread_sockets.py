"""The device-thread socket: which calls use it, and its behaviour when the device hangs or ends."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from draft_service.proposer import Proposer
from draft_service.servicer import DraftServicer
from specdec.contract import errors
from specdec.contract.types import ProposeRequest
from specdec.engine.loop import watchdog
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc.client import DraftLink
from specdec.rpc.device_thread_socket import CHECK_INTERVAL_S
from specdec.rpc.service_server import DRAFT_SERVICE, ServiceServer
from specdec.rpc.transport_selector import LONE_CALLS
from specdec.rpc.unix_sockets import handshake, socket_path
from tests.support.arithmetic_engines import make_round
from tests.support.coordinator_rig import eventually
from tests.support.links import recorded_frames
from tests.support.open_files import no_more_files
from tests.support.table_worker import TableWorker
from tests.support.watched_worker import WatchedWorker


class NotedProposer(Proposer):
    """A proposer that records the threads of its calls."""

    def __init__(self, worker: WatchedWorker) -> None:
        super().__init__(worker)
        self.threads: list[str] = []

    async def propose(self, request: ProposeRequest) -> Any:
        self.threads.append(threading.current_thread().name)
        return await super().propose(request)


class Replica:
    """A draft service around a table model, with a port and both sockets."""

    def __init__(self) -> None:
        self.worker = WatchedWorker(TableWorker(vocabulary_size=24, num_blocks=256, context=512))
        self.engine = NotedProposer(self.worker)
        self.servicer = DraftServicer(self.engine, EngineMetrics("table", role="draft"))
        self.server = ServiceServer("127.0.0.1:0", service_names=(DRAFT_SERVICE,))
        self.servicer.add_to(self.server.grpc_server)

    async def __aenter__(self) -> Replica:
        await self.server.start()
        await self.engine.warm_up()
        self.engine.threads.clear()
        await self.servicer.open_unix_sockets(1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.worker.let_go()
        await asyncio.gather(self.server.stop(0), self.servicer.close_unix_sockets(0))
        await self.engine.close()
        self.engine.check_integrity()

    @property
    def device_thread_socket(self) -> str:
        return self.servicer.info().device_thread_socket


@asynccontextmanager
async def linked(replica: Replica) -> Any:
    link = DraftLink(replica.server.address)
    announce_unix_sockets(replica, link)
    try:
        yield link
    finally:
        await link.close()


def announce_unix_sockets(replica: Replica, link: DraftLink) -> None:
    """Give the link the names of the replica's sockets, as the coordinator does."""
    info = replica.servicer.info()
    link.transports.unix_socket = info.unix_socket
    link.transports.device_thread_socket = info.device_thread_socket


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets exist on Linux alone")

DEVICE, SERVICE = "specdec-device", "MainThread"
_PATIENCE_S = 20.0


def sockets_named(name: str) -> int:
    """Return how often the kernel lists a name: once for the listener and once for every accepted connection."""
    return sum(line.endswith(name) for line in Path("/proc/net/unix").read_text().splitlines())


def ask(session_id: str = "s", round_id: int = 0, num_tokens: int = 5) -> ProposeRequest:
    return ProposeRequest(make_round(session_id, round_id=round_id, num_tokens=num_tokens), 3)


async def rounds(link: DraftLink, count: int, session_id: str = "s", first: int = 0) -> list[Any]:
    answers = [await link.propose(ask(session_id, first + index, 5 + index)) for index in range(count)]
    return [(answer.draft_token_ids.tolist(), answer.kv_len, answer.num_cached_tokens) for answer in answers]


async def test_lone_calls_run_on_the_device_thread_with_the_same_answers() -> None:
    async with Replica() as replica, linked(replica) as link:
        alone = await rounds(link, LONE_CALLS + 6)
        assert replica.engine.threads == [SERVICE] * (LONE_CALLS - 1) + [DEVICE] * 7
    async with Replica() as replica, linked(replica) as link:
        link.transports.device_thread_socket = ""
        assert await rounds(link, LONE_CALLS + 6) == alone
        assert set(replica.engine.threads) == {SERVICE}


async def test_a_lone_call_is_sent_in_the_turn_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Replica() as replica, linked(replica) as link:
        await rounds(link, LONE_CALLS + 1)
        frames = recorded_frames(monkeypatch)
        asked = asyncio.create_task(link.propose(ask(round_id=100, num_tokens=20)))
        await asyncio.sleep(0)  # the call has started; callbacks at the end of the turn come after this
        assert frames == [1]
        await asked


async def test_concurrent_calls_run_on_the_services_thread() -> None:
    async with Replica() as replica, linked(replica) as link:
        await rounds(link, LONE_CALLS)
        replica.engine.threads.clear()
        await asyncio.gather(*(rounds(link, 10, f"s{index}") for index in range(4)))
        assert replica.engine.threads.count(DEVICE) <= 1  # the first call, which started alone
        replica.engine.threads.clear()
        await rounds(link, LONE_CALLS + 1, first=100)
        assert replica.engine.threads[-1] == DEVICE  # calls come alone again


async def test_the_same_call_over_both_sockets_runs_once() -> None:
    async with Replica() as replica, linked(replica) as link, linked(replica) as other:
        await rounds(link, LONE_CALLS)
        replica.worker.allow(0)
        first = asyncio.create_task(link.propose(ask("t")))
        await replica.worker.held()
        steps = len(replica.worker.plans)
        second = asyncio.create_task(other.propose(ask("t")))
        await eventually(lambda: replica.engine.threads[-1] == SERVICE)
        replica.worker.let_go()
        answers = [(await call).draft_token_ids.tolist() for call in (first, second)]
        assert answers[0] == answers[1]
        assert replica.engine.threads[-2:] == [DEVICE, SERVICE]
        assert len(replica.worker.plans) == steps + 2  # of three tokens


async def test_a_call_that_arrives_during_a_step_is_read_between_two_steps() -> None:
    async with Replica() as replica, linked(replica) as link, linked(replica) as other:
        await rounds(link, LONE_CALLS)
        replica.worker.allow(0)
        long = asyncio.create_task(other.propose(ProposeRequest(make_round("long"), 12)))
        await replica.worker.held()
        num_made = len(replica.engine.threads)
        call = asyncio.create_task(link.propose(ProposeRequest(make_round("t"), 1)))
        await asyncio.sleep(0.05)
        assert len(replica.engine.threads) == num_made  # not while a step runs
        replica.worker.allow(6)
        async with asyncio.timeout(_PATIENCE_S):
            await call
            assert not long.done()
            replica.worker.let_go()
            await long
        assert replica.engine.threads[-2:] == [SERVICE, DEVICE]


async def test_a_hung_device_fails_its_callers_at_once_and_has_a_new_socket_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.2)
    async with Replica() as replica, linked(replica) as link, linked(replica) as other:
        await rounds(link, LONE_CALLS)
        name = replica.device_thread_socket
        replica.worker.allow(0)
        call = asyncio.create_task(link.propose(ask("t")))
        await replica.worker.held()
        async with asyncio.timeout(_PATIENCE_S):
            with pytest.raises(errors.Unavailable, match="closed the Unix socket"):
                await call
            with pytest.raises(errors.Unavailable, match="hangs"):
                await link.propose(ask("t"))
            assert replica.device_thread_socket == ""
            # A peer that knows the old name cannot connect.
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_unix_connection(socket_path(name))
        replica.worker.let_go()
        await eventually(lambda: replica.device_thread_socket not in ("", name))
        replica.engine.threads.clear()
        for each in (link, other):
            announce_unix_sockets(replica, each)
            async with asyncio.timeout(_PATIENCE_S):
                await rounds(each, LONE_CALLS + 1, "u", first=100 * (each is other))
            assert replica.engine.threads[-1] == DEVICE


async def test_a_connection_that_waits_to_be_accepted_by_a_hung_device_is_closed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.2)
    async with Replica() as replica, linked(replica) as link, linked(replica) as late:
        await rounds(link, LONE_CALLS)
        await rounds(late, LONE_CALLS - 1, "late")
        replica.worker.allow(0)
        first = asyncio.create_task(link.propose(ask("t")))
        await replica.worker.held()
        second = asyncio.create_task(late.propose(ask("w")))  # over a device-thread socket without a handshake yet
        async with asyncio.timeout(_PATIENCE_S):
            with pytest.raises(errors.Unavailable, match="closed the Unix socket"):
                await first
            with pytest.raises(errors.Unavailable, match="hangs"):  # the answer over the other socket
                await second


async def test_a_long_step_after_a_hang_does_not_delay_the_new_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.6)
    async with Replica() as replica, linked(replica) as link:
        call = asyncio.create_task(link.propose(ask("t")))
        replica.worker.allow(0)
        await replica.worker.held()
        with pytest.raises(errors.Unavailable):
            await call
        await eventually(lambda: not replica.device_thread_socket)
        replica.worker.allow(1)  # the hung step ends, and the next step is held
        async with asyncio.timeout(_PATIENCE_S):
            await eventually(lambda: bool(replica.device_thread_socket))


async def test_a_draining_replica_answers_calls_in_flight_and_does_not_wait_for_idle_connections() -> None:
    async with Replica() as replica, linked(replica) as link, linked(replica) as idle:
        await rounds(link, LONE_CALLS)
        await rounds(idle, LONE_CALLS, "idle")
        name = replica.device_thread_socket
        assert sockets_named(name) == 3
        replica.worker.allow(0)
        call = asyncio.create_task(link.propose(ask("t")))
        await replica.worker.held()
        replica.servicer.drain()
        ending = asyncio.create_task(replica.servicer.close_unix_sockets(10 * _PATIENCE_S))
        await asyncio.sleep(2 * CHECK_INTERVAL_S)
        assert not ending.done()
        assert replica.device_thread_socket == ""
        replica.worker.let_go()
        async with asyncio.timeout(_PATIENCE_S):
            assert (await call).draft_token_ids.tolist()
            await ending
        assert sockets_named(name) == 0
        with pytest.raises(errors.Unavailable):
            await link.propose(ask("u"))


async def test_a_device_that_hangs_during_a_drain_does_not_delay_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.2)
    async with Replica() as replica, linked(replica) as link:
        await rounds(link, LONE_CALLS)
        replica.worker.allow(0)
        call = asyncio.create_task(link.propose(ask("t")))
        await replica.worker.held()
        replica.servicer.drain()
        async with asyncio.timeout(_PATIENCE_S):
            ending = asyncio.create_task(replica.servicer.close_unix_sockets(10 * _PATIENCE_S))
            with pytest.raises(errors.Unavailable, match="closed the Unix socket"):
                await call
            await ending
        replica.worker.let_go()
        await eventually(lambda: not replica.engine.is_stalled)
        await asyncio.sleep(2 * CHECK_INTERVAL_S)
        assert replica.device_thread_socket == ""  # the servicer has closed it by then


async def test_a_draining_replica_with_an_idle_device_closes_its_sockets_at_once() -> None:
    async with Replica() as replica, linked(replica) as link:
        await rounds(link, LONE_CALLS)
        replica.servicer.drain()
        async with asyncio.timeout(_PATIENCE_S):
            await replica.servicer.close_unix_sockets(10 * _PATIENCE_S)


@pytest.mark.parametrize("words", [b"", handshake("")], ids=["silent", "shakes hands"])
async def test_a_connection_without_calls_that_was_accepted_during_a_step_does_not_delay_a_drain(words: bytes) -> None:
    async with Replica() as replica, linked(replica) as link:
        await rounds(link, LONE_CALLS - 1)
        replica.worker.allow(0)
        call = asyncio.create_task(link.propose(ask("t")))
        await replica.worker.held()
        _, writer = await asyncio.open_unix_connection(socket_path(replica.device_thread_socket))
        writer.write(words)
        await asyncio.sleep(0.1)  # accepted by the service's thread
        replica.servicer.drain()
        ending = asyncio.create_task(replica.servicer.close_unix_sockets(10 * _PATIENCE_S))
        await asyncio.sleep(0.1)
        replica.worker.let_go()
        async with asyncio.timeout(_PATIENCE_S):
            assert (await call).draft_token_ids.tolist()
            await ending
        writer.close()


async def test_an_engine_that_is_closed_answers_calls_in_flight_and_then_disconnects() -> None:
    async with Replica() as replica, linked(replica) as link:
        await rounds(link, LONE_CALLS)
        name = replica.device_thread_socket
        replica.worker.allow(1)
        call = asyncio.create_task(link.propose(ask("t")))
        await replica.worker.held()
        ending = asyncio.create_task(replica.engine.close())
        replica.worker.let_go()
        assert len((await call).draft_token_ids) == 3  # calls in flight are finished
        async with asyncio.timeout(_PATIENCE_S):
            await ending
            with pytest.raises(errors.Unavailable):
                await link.propose(ask("u"))
            await eventually(lambda: not replica.device_thread_socket)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_unix_connection(socket_path(name))
        assert replica.engine.share_event_loop().is_closed()


async def test_the_socket_is_opened_again_once_file_descriptors_are_free() -> None:
    async with Replica() as replica, linked(replica) as link:
        name = replica.device_thread_socket
        await rounds(link, LONE_CALLS - 1)
        async with asyncio.timeout(_PATIENCE_S):
            with socket.socket(socket.AF_UNIX) as caller, no_more_files():
                caller.connect(socket_path(name))
                await eventually(lambda: replica.device_thread_socket == "")
                with os.fdopen(os.dup(0)):  # takes the descriptor of the listener
                    await asyncio.sleep(2 * CHECK_INTERVAL_S)
            await eventually(lambda: replica.device_thread_socket not in ("", name))
        announce_unix_sockets(replica, link)
        await rounds(link, 2, "t")
        assert replica.engine.threads[-1] == DEVICE


async def test_a_closed_link_disconnects_from_both_sockets() -> None:
    async with Replica() as replica:
        async with linked(replica) as link:
            await rounds(link, LONE_CALLS)
            names = (link.transports.unix_socket, link.transports.device_thread_socket)
            assert [sockets_named(name) for name in names] == [2, 2]
        async with asyncio.timeout(_PATIENCE_S):
            await eventually(lambda: [sockets_named(name) for name in names] == [1, 1])


async def test_the_oldest_call_of_both_sockets_is_the_one_that_has_waited_longest() -> None:
    async with Replica() as replica, linked(replica) as link:
        await rounds(link, LONE_CALLS)
        replica.worker.allow(0)
        first = asyncio.create_task(link.propose(ask("t")))
        await replica.worker.held()
        oldest = link.oldest_pending
        second = asyncio.create_task(link.propose(ask("u")))
        await asyncio.sleep(0.05)
        assert oldest is not None
        assert link.oldest_pending is oldest
        replica.worker.let_go()
        await asyncio.gather(first, second)


async def test_an_idle_device_thread_sleeps_after_any_use_of_its_socket() -> None:
    async with Replica() as replica:
        async with linked(replica) as link:
            await rounds(link, LONE_CALLS + 2)
            replica.worker.allow(0)
            given_up = asyncio.create_task(link.propose(ask("t")))
            await replica.worker.held()
            given_up.cancel()
        replica.worker.let_go()
        await asyncio.gather(*(replica.engine.release([f"u{index}"]) for index in range(200)))
        await asyncio.sleep(0.1)
        began_s = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - began_s < 0.25


async def test_calls_of_a_disconnected_caller_end() -> None:
    async with Replica() as replica:
        async with linked(replica) as link:
            await rounds(link, LONE_CALLS)
            replica.worker.allow(0)
            call = asyncio.create_task(link.propose(ask("t")))
            await replica.worker.held()
            call.cancel()
        replica.worker.let_go()
        await eventually(lambda: replica.servicer.info().num_running <= 1)
        async with linked(replica) as link:
            await rounds(link, LONE_CALLS, "u")
