"""Clients with two coordinators: which one they call, depending on the health that each reports."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specdec.client import AsyncClient, Budgets, Client
from specdec.contract.errors import (
    ClientClosed,
    DeadlineExceeded,
    ResourceExhausted,
    SessionBusy,
    SpecdecError,
    Unavailable,
)
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import eventually
from tests.support.scripted_coordinator import Event, Script, ScriptedCoordinator, finished, serve, started, tokens

#: A refused call is retried for 5 s.
BUDGETS = Budgets(connect_s=5.0, target_s=5.0, resume_s=5.0)

Ask = Callable[..., list[int]]


@dataclass
class Scripted:
    """A coordinator whose health service reports SERVING unless a test changes it."""

    servicer: ScriptedCoordinator
    server: grpc.Server
    endpoint: str
    health: health.HealthServicer

    @property
    def num_asked(self) -> int:
        return len(self.servicer.requests)

    def set_serving(self, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self.health.set("", status.SERVING if is_serving else status.NOT_SERVING)


def gives(token_id: int) -> Script:
    return lambda request: [started(request), tokens(0, [token_id]), finished(1)]


def refuses(error: SpecdecError) -> Script:
    error.retry_after_s = 0.0
    return lambda request: [error]


def gives_once(released: threading.Event, token_id: int) -> Script:
    def script(request: pb.GenerateRequest) -> list[Event]:
        assert released.wait(20)
        return gives(token_id)(request)

    return script


def scripted(token_id: int) -> Scripted:
    """Start a coordinator that answers every request with one token."""
    servicer, checked = ScriptedCoordinator([gives(token_id)]), health.HealthServicer()
    server, endpoint = serve(servicer, also=partial(health_pb2_grpc.add_HealthServicer_to_server, checked))
    coordinator = Scripted(servicer, server, endpoint, checked)
    coordinator.set_serving(True)
    return coordinator


@pytest.fixture
def coordinators() -> Iterator[tuple[Scripted, Scripted]]:
    """Two coordinators that answer every request with one token each."""
    both = scripted(1), scripted(2)
    yield both
    for coordinator in both:
        coordinator.server.stop(None)


def ask_blocking(coordinators: Sequence[Scripted], num_requests: int, **options: Any) -> list[int]:
    with Client(endpoint_of(coordinators), budgets=BUDGETS) as client:
        outputs = [client.generate("p", temperature=0, **options) for _ in range(num_requests)]
    return [output.token_ids[0] for output in outputs]


def ask_async(coordinators: Sequence[Scripted], num_requests: int, **options: Any) -> list[int]:
    async def read() -> list[int]:
        async with AsyncClient(endpoint_of(coordinators), budgets=BUDGETS) as client:
            outputs = [await client.generate("p", temperature=0, **options) for _ in range(num_requests)]
        return [output.token_ids[0] for output in outputs]

    return asyncio.run(read())


async def token_id(client: Client | AsyncClient, **options: Any) -> int:
    """Return the token that a client of either kind receives."""
    if isinstance(client, Client):
        return (await asyncio.to_thread(client.generate, "p", temperature=0, **options)).token_ids[0]
    return (await client.generate("p", temperature=0, **options)).token_ids[0]


async def spread_calls(client: Client | AsyncClient, token_ids: Set[int] = frozenset({1, 2})) -> None:
    """Call until six calls in succession receive these tokens: connections and health reports come when they come."""
    while {await token_id(client) for _ in range(6)} != token_ids:
        pass


@asynccontextmanager
async def using(client: Client | AsyncClient) -> AsyncIterator[None]:
    try:
        yield
    finally:
        closing = client.close()
        if closing is not None:
            await closing


def endpoint_of(coordinators: Sequence[Scripted]) -> str:
    return "ipv4:" + ",".join(scripted.endpoint for scripted in coordinators)


@pytest.fixture(params=[ask_blocking, ask_async], ids=["blocking", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    asking: Ask = request.param
    return asking


def test_a_client_spreads_its_calls_over_all_coordinators(coordinators: tuple[Scripted, Scripted], ask: Ask) -> None:
    answers = ask(coordinators, 20)
    assert min(answers.count(1), answers.count(2)) >= 8


def test_a_coordinator_that_does_not_report_serving_is_not_called(
    coordinators: tuple[Scripted, Scripted], ask: Ask
) -> None:
    first, _ = coordinators
    first.set_serving(False)
    assert ask(coordinators, 5) == [2] * 5
    assert first.num_asked == 0


@pytest.mark.parametrize("error", [Unavailable("no target"), ResourceExhausted("full")], ids=["unavailable", "full"])
def test_a_refused_call_is_answered_by_another_coordinator(
    coordinators: tuple[Scripted, Scripted], ask: Ask, error: SpecdecError
) -> None:
    first, _ = coordinators
    first.servicer.scripts = [refuses(error)]
    assert ask(coordinators, 5) == [2] * 5


def test_a_client_does_not_move_to_a_coordinator_that_does_not_report_serving(
    coordinators: tuple[Scripted, Scripted], ask: Ask
) -> None:
    first, second = coordinators
    first.servicer.scripts = [refuses(Unavailable("no target")), gives(1)]
    first.set_serving(False)
    second.set_serving(False)
    assert ask(coordinators, 2) == [1, 1]
    assert second.num_asked == 0


def test_a_client_waits_for_a_busy_session(coordinators: tuple[Scripted, Scripted], ask: Ask) -> None:
    for token_id, coordinator in enumerate(coordinators, 1):
        coordinator.servicer.scripts = [refuses(SessionBusy("another one's")), gives(token_id)]
    assert ask(coordinators, 1)[0] in (1, 2)


def test_a_client_of_one_coordinator_calls_it_although_it_does_not_report_serving(
    coordinators: tuple[Scripted, Scripted], ask: Ask
) -> None:
    first, _ = coordinators
    first.set_serving(False)
    assert ask([first], 3) == [1] * 3


async def test_a_client_spreads_its_calls_once_the_coordinators_serve(coordinators: tuple[Scripted, Scripted]) -> None:
    """None did at its first call, so that it called over the plain connection."""
    for coordinator in coordinators:
        coordinator.set_serving(False)
    async with asyncio.timeout(60), AsyncClient(endpoint_of(coordinators), budgets=BUDGETS) as client:
        assert [await token_id(client) for _ in range(3)] == [1] * 3
        for coordinator in coordinators:
            coordinator.set_serving(True)
        await spread_calls(client)


def test_after_a_refusal_the_next_serving_coordinator_is_called(
    coordinators: tuple[Scripted, Scripted], ask: Ask
) -> None:
    first, second = coordinators
    first.servicer.scripts = [refuses(ResourceExhausted("full"))]
    second.servicer.scripts = [refuses(ResourceExhausted("full")), gives(2)]
    assert ask(coordinators, 1) == [2]


def test_when_the_other_coordinators_stop_the_first_is_called_again(coordinators: tuple[Scripted, Scripted]) -> None:
    first, second = coordinators
    first.servicer.scripts = [refuses(Unavailable("no target")), gives(1)]
    first.set_serving(False)
    with Client(endpoint_of(coordinators), budgets=BUDGETS) as client:
        assert client.generate("p", temperature=0).token_ids == (2,)
        second.server.stop(None).wait()
        assert client.generate("p", temperature=0).token_ids == (1,)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_after_a_broken_connection_the_next_of_the_other_coordinators_is_called(
    coordinators: tuple[Scripted, Scripted], kind: type[Client | AsyncClient]
) -> None:
    """The first is not called, since it does not report SERVING."""
    (first, second), third = coordinators, scripted(3)
    first.set_serving(False)
    client = kind(endpoint_of((first, second, third)), budgets=BUDGETS)

    async with asyncio.timeout(20), using(client):
        assert await token_id(client) in (2, 3)  # connected to the others from now on
        while not (second.num_asked and third.num_asked):
            await token_id(client)
        goes_on = threading.Event()
        for other, given in ((second, 2), (third, 3)):
            other.servicer.scripts = [gives_once(goes_on, given)]
        num_asked = second.num_asked + 1, third.num_asked + 1
        outputs = [asyncio.create_task(token_id(client)) for _ in range(2)]
        await eventually(lambda: (second.num_asked, third.num_asked) == num_asked)
        second.server.stop(None).wait()
        goes_on.set()
        assert [await output for output in outputs] == [3, 3]
    assert first.num_asked == 0
    third.server.stop(None)


@pytest.mark.parametrize("is_serving", [True, False])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_after_a_missed_deadline_a_coordinator_is_called_if_it_reports_serving(
    coordinators: tuple[Scripted, Scripted], kind: type[Client | AsyncClient], is_serving: bool
) -> None:
    first, _ = coordinators
    goes_on = threading.Event()
    client = kind(endpoint_of(coordinators), budgets=BUDGETS)

    async with asyncio.timeout(60), using(client):
        await spread_calls(client)
        first.servicer.scripts = [gives_once(goes_on, 1)]
        results = await asyncio.gather(*(token_id(client, timeout=1.0) for _ in range(4)), return_exceptions=True)
        assert any(isinstance(result, DeadlineExceeded) for result in results)
        first.set_serving(is_serving)
        goes_on.set()
        await spread_calls(client, {1, 2} if is_serving else {2})


def test_a_call_without_retries_does_not_wait_for_another_coordinator(coordinators: tuple[Scripted, Scripted]) -> None:
    for coordinator in coordinators:
        coordinator.servicer.scripts = [refuses(Unavailable("no target"))]
    with Client(endpoint_of(coordinators), budgets=Budgets(connect_s=0.0)) as client, pytest.raises(Unavailable):
        client.generate("p", temperature=0)
    assert sum(coordinator.num_asked for coordinator in coordinators) == 1


def test_a_timeout_covers_the_health_checks_of_other_coordinators(coordinators: tuple[Scripted, Scripted]) -> None:
    first, second = coordinators
    first.servicer.scripts = [refuses(Unavailable("no target"))]
    for scripted in (first, second):
        scripted.set_serving(False)
    began_s = time.monotonic()
    budgets = Budgets(connect_s=600.0, resume_s=600.0)
    with Client(endpoint_of(coordinators), budgets=budgets) as client, pytest.raises(DeadlineExceeded):
        client.generate("p", temperature=0, timeout=0.3)
    assert time.monotonic() - began_s < 60.0  # without the timeout it would retry for 600 s


async def test_a_client_closed_while_it_checks_other_coordinators_raises_client_closed(
    coordinators: tuple[Scripted, Scripted],
) -> None:
    first, second = coordinators
    first.servicer.scripts = [refuses(Unavailable("no target"))]
    for scripted in (first, second):
        scripted.set_serving(False)
    client = AsyncClient(endpoint_of(coordinators), budgets=BUDGETS)
    asked = asyncio.create_task(client.generate("p", temperature=0))
    blocking = Client(endpoint_of(coordinators), budgets=BUDGETS)
    generating = asyncio.create_task(asyncio.to_thread(blocking.generate, "p", temperature=0))
    async with asyncio.timeout(20):
        await eventually(lambda: first.num_asked == 2)  # both were refused and check the others for half a second
        await asyncio.sleep(0.2)
        await client.close()
        blocking.close()
        for task in (asked, generating):
            with pytest.raises(ClientClosed):
                await task
