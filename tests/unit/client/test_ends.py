"""Early ends of calls of both clients: a failed stream, a timeout, a closed stream, a closed client."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specdec.client import AsyncClient, Budgets, Client, Completion
from specdec.contract.errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidRequest,
    PartialOutput,
    SessionLost,
    Unavailable,
)
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import Event, ScriptedCoordinator, serve, started, tokens

Serve = Callable[[ScriptedCoordinator], str]


class SilentAfter(ScriptedCoordinator):
    """Plays its script, then stays silent until the call has ended."""

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


def broken_after_two_tokens() -> ScriptedCoordinator:
    return ScriptedCoordinator([lambda r: [started(r), tokens(0, [5, 6]), SessionLost("the log is too short")]])


def fail_in_mid_stream(endpoint: str) -> tuple[list[BaseException], Completion]:
    """Return the errors of iteration and of the first `result()`, and what the second `result()` returns."""
    with Client(endpoint) as client:
        stream = client.generate("p", stream=True, session_id="s")
        assert next(stream).token_ids == (5, 6)
        errors: list[BaseException] = []
        for read in (lambda: next(stream), stream.result):
            with pytest.raises(SessionLost) as caught:
                read()
            errors.append(caught.value)
        assert list(stream) == []
        return errors, stream.result()


def fail_in_mid_stream_async(endpoint: str) -> tuple[list[BaseException], Completion]:
    async def read() -> tuple[list[BaseException], Completion]:
        async with AsyncClient(endpoint) as client:
            stream = client.generate("p", stream=True, session_id="s")
            assert (await anext(stream)).token_ids == (5, 6)
            errors: list[BaseException] = []
            for read in (lambda: anext(stream), stream.result):
                with pytest.raises(SessionLost) as caught:
                    await read()
                errors.append(caught.value)
            assert [chunk async for chunk in stream] == []
            return errors, await stream.result()

    return asyncio.run(read())


@pytest.mark.parametrize("fail", [fail_in_mid_stream, fail_in_mid_stream_async])
def test_a_failed_stream_raises_its_error_once_more_from_result_and_then_returns_the_part_received(
    serving: Serve, fail: Callable[[str], tuple[list[BaseException], Completion]]
) -> None:
    servicer = broken_after_two_tokens()
    (first, second), partial = fail(serving(servicer))
    assert first is second
    assert len(servicer.requests) == 1
    assert (partial.token_ids, partial.text, partial.finish_reason) == ((5, 6), "<5><6>", "cancelled")


@pytest.mark.parametrize("fail", [fail_in_mid_stream, fail_in_mid_stream_async])
def test_the_error_of_a_failed_stream_has_the_output_received_so_far(
    serving: Serve, fail: Callable[[str], tuple[list[BaseException], Completion]]
) -> None:
    (error, _), _ = fail(serving(broken_after_two_tokens()))
    assert isinstance(error, SessionLost)
    assert error.partial == PartialOutput("s", resume_from=2, text="<5><6>", token_ids=(5, 6))


def test_a_failed_generate_call_has_the_output_received_so_far_on_its_error(serving: Serve) -> None:
    with Client(serving(broken_after_two_tokens())) as client, pytest.raises(SessionLost) as caught:
        client.generate("p")
    assert caught.value.partial is not None
    assert caught.value.partial.text == "<5><6>"


def test_an_error_of_a_call_without_a_stream_has_no_partial_output() -> None:
    with Client("127.0.0.1:1", budgets=Budgets(connect_s=0)) as client, pytest.raises(Unavailable) as caught:
        client.info()
    assert caught.value.partial is None


def assert_shows_only_our_frames(error: BaseException) -> None:
    shown = "".join(traceback.format_exception(error))
    assert "site-packages" not in shown
    assert "direct cause" not in shown
    assert "During handling" not in shown


@pytest.mark.parametrize("fail", [fail_in_mid_stream, fail_in_mid_stream_async])
def test_the_traceback_of_a_failed_stream_shows_neither_tenacity_nor_grpc(
    serving: Serve, fail: Callable[[str], tuple[list[BaseException], Completion]]
) -> None:
    for error in fail(serving(broken_after_two_tokens()))[0]:
        assert_shows_only_our_frames(error)


def test_the_traceback_of_a_failed_call_shows_neither_tenacity_nor_grpc() -> None:
    with Client("127.0.0.1:1", budgets=Budgets(connect_s=0.2)) as client, pytest.raises(Unavailable) as caught:
        client.info()
    assert_shows_only_our_frames(caught.value)


def test_the_result_of_a_closed_stream_is_the_part_received(serving: Serve) -> None:
    with Client(serving(two_tokens())) as client:
        stream = client.generate("p", stream=True)
        next(stream)
        stream.close()
        assert_two_tokens(stream.result())
        assert list(stream) == []


def test_the_result_of_a_closed_async_stream_is_the_part_received(serving: Serve) -> None:
    async def leave() -> None:
        async with AsyncClient(serving(two_tokens())) as client:
            stream = client.generate("p", stream=True)
            await anext(stream)
            waiting = asyncio.ensure_future(anext(stream, None))
            await asyncio.sleep(0.05)  # so that the task waits; the result is the same if it does not yet
            await stream.aclose()
            assert await waiting is None
            assert_two_tokens(await stream.result())

    asyncio.run(leave())


def test_a_stream_closed_before_its_first_token_has_an_empty_result() -> None:
    with Client("127.0.0.1:1") as client:
        stream = client.generate("p", stream=True)
        stream.close()
        assert (stream.result().text, stream.result().finish_reason) == ("", "cancelled")


def test_a_timeout_ends_the_call_and_keeps_the_part_received(serving: Serve) -> None:
    servicer = two_tokens()
    with Client(serving(servicer)) as client:
        stream = client.generate("p", stream=True, timeout=0.5)
        assert next(stream).token_ids == (5, 6)
        with pytest.raises(DeadlineExceeded, match=r"timeout of 0\.5 s") as caught:
            next(stream)
        assert (caught.value.code, caught.value.retryable) == ("DEADLINE_EXCEEDED", False)
        stream.close()
        assert_two_tokens(stream.result())
    assert servicer.ended.wait(30)  # the call was cancelled on the server


def test_the_timeout_of_a_client_applies_to_each_of_its_calls(serving: Serve) -> None:
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


def test_a_timeout_ends_retries() -> None:
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
def test_an_invalid_timeout_is_refused_by_name(timeout: Any) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as caught:
        client.generate("p", stream=True, timeout=timeout)
    assert caught.value.field == "timeout"


def test_every_call_of_a_closed_client_raises_client_closed() -> None:
    client = Client("127.0.0.1:1")
    left = client.generate("p", stream=True)
    client.close()
    client.close()
    for call in (client.info, lambda: client.generate("p"), lambda: next(left), lambda: client.delete_session("s")):
        with pytest.raises(ClientClosed, match="closed"):
            call()
    with pytest.raises(ClientClosed):  # at the call, before the stream is read
        client.resume("s", 0)


def test_every_call_of_a_closed_async_client_raises_client_closed() -> None:
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
@pytest.mark.parametrize("endpoint", [50051, b"127.0.0.1:50051"])
def test_an_endpoint_that_is_not_text_is_refused(kind: type[Client] | type[AsyncClient], endpoint: Any) -> None:
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
def test_an_argument_that_does_not_fit_its_message_is_refused_by_field_name(call: Any, field: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=f"^{field}") as refused:
        call(client)
    assert refused.value.field == field


def test_closing_a_client_ends_waiting_calls(serving: Serve) -> None:
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


def test_closing_an_async_client_ends_waiting_calls_and_cancels_no_task(serving: Serve) -> None:
    servicer = SilentAfter(started)

    async def ask() -> None:
        client = AsyncClient(serving(servicer), budgets=Budgets(connect_s=60.0))
        waiting = [asyncio.ensure_future(client.generate("p")), asyncio.ensure_future(client.info())]
        assert await asyncio.to_thread(servicer.asked.wait, 30)
        await client.close()
        assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [ClientClosed] * 2

    asyncio.run(ask())
