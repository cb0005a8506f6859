"""How calls of both clients end before their time: a timeout, a stream closed, a client closed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specdec.client import AsyncClient, Budgets, Client, Completion
from specdec.errors import ClientClosed, DeadlineExceeded, InvalidRequest, Unavailable
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import Event, ScriptedCoordinator, serve, started, tokens

Serve = Callable[[ScriptedCoordinator], str]


class SilentAfter(ScriptedCoordinator):
    """Plays its script, then says nothing until the call has ended."""

    def __init__(self, *events: Callable[[pb.GenerateRequest], Event]) -> None:
        super().__init__([lambda request: [event(request) for event in events]])
        self.asked = threading.Event()
        self.ended = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        yield from super().Generate(request, context)
        self.asked.set()
        self._wait_for_the_end(context)

    def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:  # noqa: N802
        self._wait_for_the_end(context)
        return pb.GetInfoResponse()

    def _wait_for_the_end(self, context: Any) -> None:
        ended = threading.Event()
        if context.add_callback(ended.set):
            ended.wait()
        self.ended.set()


def two_tokens() -> SilentAfter:
    return SilentAfter(
        lambda r: pb.GenerateResponse(started=pb.Started(session_id=r.session_id, num_prompt_tokens=3)),
        lambda r: tokens(0, [5, 6], "ac"),
    )


@pytest.fixture
def serving() -> Iterator[Serve]:
    servers = []

    def start(servicer: ScriptedCoordinator) -> str:
        server, endpoint = serve(servicer)
        servers.append(server)
        return endpoint

    yield start
    for server in servers:
        server.stop(None)


def assert_two_tokens(partial: Completion) -> None:
    assert (partial.text, partial.token_ids, partial.finish_reason) == ("<5><6>", (5, 6), "cancelled")
    assert (partial.usage.num_prompt_tokens, partial.usage.num_output_tokens) == (3, 2)
    assert len(partial.details) == 2
    assert partial.stats.num_rounds == 0


def test_what_came_before_a_stream_was_closed_is_its_result(serving: Serve) -> None:
    with Client(serving(two_tokens())) as client:
        stream = client.generate("p", stream=True)
        next(stream)
        stream.close()
        assert_two_tokens(stream.result())
        assert list(stream) == []


def test_what_came_before_an_async_stream_was_closed_is_its_result(serving: Serve) -> None:
    async def leave() -> None:
        async with AsyncClient(serving(two_tokens())) as client:
            stream = client.generate("p", stream=True)
            await anext(stream)
            waiting = asyncio.ensure_future(anext(stream, None))
            await asyncio.sleep(0.05)  # so that it does wait; were it not yet waiting, it should see the same
            await stream.aclose()
            assert await waiting is None
            assert_two_tokens(await stream.result())

    asyncio.run(leave())


def test_a_stream_closed_before_its_first_token_has_an_empty_result() -> None:
    with Client("127.0.0.1:1") as client:
        stream = client.generate("p", stream=True)
        stream.close()
        assert (stream.result().text, stream.result().finish_reason) == ("", "cancelled")


def test_a_call_that_takes_longer_than_its_timeout_is_ended_and_what_came_is_kept(serving: Serve) -> None:
    servicer = two_tokens()
    with Client(serving(servicer)) as client:
        stream = client.generate("p", stream=True, timeout=0.5)
        assert next(stream).token_ids == (5, 6)
        with pytest.raises(DeadlineExceeded, match=r"timeout of 0\.5 s") as caught:
            next(stream)
        assert (caught.value.code, caught.value.retryable) == ("DEADLINE_EXCEEDED", False)
        stream.close()
        assert_two_tokens(stream.result())
    assert servicer.ended.wait(30)  # the server was told


def test_the_timeout_of_a_client_is_that_of_its_every_call(serving: Serve) -> None:
    endpoint = serving(two_tokens())
    with Client(endpoint, timeout=0.3) as client:
        for call in (client.info, lambda: client.generate("p"), lambda: client.resume("s", 0).result()):
            with pytest.raises(DeadlineExceeded):
                call()

    async def ask() -> None:
        async with AsyncClient(endpoint, timeout=0.3) as client:
            for call in (client.info(), client.generate("p"), client.resume("s", 0).result()):
                with pytest.raises(DeadlineExceeded):
                    await call

    asyncio.run(ask())


def test_a_timeout_ends_the_retries_too() -> None:
    servicer = ScriptedCoordinator([lambda r: [Unavailable("no target replica", retry_after_s=0.05)]])
    server, endpoint = serve(servicer)
    began_s = time.monotonic()
    with (
        Client(endpoint, budgets=Budgets(connect_s=60.0)) as client,
        pytest.raises(DeadlineExceeded, match="no target replica"),
    ):
        client.generate("p", timeout=0.5)
    server.stop(None)
    assert len(servicer.requests) > 1
    assert time.monotonic() - began_s < 30  # not the minute of the budget


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5"])
def test_a_timeout_that_is_no_time_is_refused_by_name(timeout: Any) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as caught:
        client.generate("p", stream=True, timeout=timeout)
    assert caught.value.field == "timeout"


def test_a_closed_client_says_so_at_every_call() -> None:
    client = Client("127.0.0.1:1")
    left = client.generate("p", stream=True)
    client.close()
    client.close()
    for call in (client.info, lambda: client.generate("p"), lambda: next(left), lambda: client.delete_session("s")):
        with pytest.raises(ClientClosed, match="closed"):
            call()
    with pytest.raises(ClientClosed):  # here and now, not where it is read
        client.resume("s", 0)


def test_a_closed_async_client_says_so_at_every_call() -> None:
    async def ask() -> None:
        client = AsyncClient("127.0.0.1:1")
        left = client.generate("p", stream=True)
        await client.close()
        for call in (client.info(), client.generate("p"), anext(left)):
            with pytest.raises(ClientClosed, match="closed"):
                await call
        with pytest.raises(ClientClosed):
            client.resume("s", 0)
        with pytest.raises(ClientClosed):
            client.generate("p", stream=True)

    asyncio.run(ask())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("endpoint", [None, 50051, b"127.0.0.1:50051"])
def test_what_is_no_text_is_no_endpoint(kind: type[Client] | type[AsyncClient], endpoint: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"endpoint must be HOST:PORT, got {type(endpoint).__name__}") as refused:
        kind(endpoint)
    assert refused.value.field == "endpoint"


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client.resume("s", -1), "resume_from"),
        (lambda client: client.resume("s", 2**40), "resume_from"),
        (lambda client: client.resume("s", None), "resume_from"),
        (lambda client: client.resume(None, 0), "session_id"),
        (lambda client: client.get_session(7), "session_id"),
        (lambda client: client.delete_session(None), "session_id"),
        (lambda client: client.promote("code", "all"), "share"),
    ],
)
def test_what_does_not_fit_a_message_is_refused_by_field_in_every_call(call: Any, field: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=f"^{field}") as refused:
        call(client)
    assert refused.value.field == field


def test_closing_a_client_ends_the_calls_that_wait(serving: Serve) -> None:
    servicer = SilentAfter(started)
    client = Client(serving(servicer), budgets=Budgets(connect_s=60.0))
    errors: list[BaseException] = []

    def read() -> None:
        try:
            client.generate("p")
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert servicer.asked.wait(30)
    client.close()
    reader.join(30)
    assert [type(error) for error in errors] == [ClientClosed]


def test_closing_an_async_client_ends_the_calls_that_wait_and_cancels_no_task(serving: Serve) -> None:
    servicer = SilentAfter(started)

    async def ask() -> None:
        client = AsyncClient(serving(servicer), budgets=Budgets(connect_s=60.0))
        waiting = [asyncio.ensure_future(client.generate("p")), asyncio.ensure_future(client.info())]
        assert await asyncio.to_thread(servicer.asked.wait, 30)
        await client.close()
        assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [ClientClosed] * 2

    asyncio.run(ask())
