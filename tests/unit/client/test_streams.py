"""Streams of both clients against a real gRPC server that breaks them where the test says."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest

from specdec.client import AsyncClient, Budgets, Chunk, Client, Completion
from specdec.contract.errors import (
    Internal,
    InvalidRequest,
    LeaseLost,
    NotFound,
    ResourceExhausted,
    SessionBusy,
    SessionLost,
    SpecdecError,
    StaleEpoch,
    Unavailable,
    Unsupported,
)
from specdec.contract.types import TokenSource
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import Event, Script, ScriptedCoordinator, finished, serve, started, tokens

QUICK = Budgets(connect_s=5.0, resume_s=5.0)
Run = Callable[[list[Script]], tuple[ScriptedCoordinator, list[Chunk], Completion]]


def soon(error: SpecdecError) -> Event:
    error.retry_after_s = 0.0
    return error


def run_blocking(endpoint: str) -> tuple[list[Chunk], Completion]:
    with Client(endpoint, budgets=QUICK) as client, client.generate("p", stream=True, temperature=0) as stream:
        return list(stream), stream.result()


def run_async(endpoint: str) -> tuple[list[Chunk], Completion]:
    async def read() -> tuple[list[Chunk], Completion]:
        async with (
            AsyncClient(endpoint, budgets=QUICK) as client,
            client.generate("p", stream=True, temperature=0) as stream,
        ):
            return [chunk async for chunk in stream], await stream.result()

    return asyncio.run(read())


@pytest.fixture(params=[run_blocking, run_async], ids=["blocking", "async"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    servers = []

    def run_scripts(scripts: list[Script]) -> tuple[ScriptedCoordinator, list[Chunk], Completion]:
        servicer = ScriptedCoordinator(scripts)
        server, endpoint = serve(servicer)
        servers.append(server)
        return (servicer, *request.param(endpoint))

    yield run_scripts
    for server in servers:
        server.stop(None)


def test_a_stream_returns_every_chunk_and_then_the_whole_output(run: Run) -> None:
    servicer, chunks, completion = run([lambda r: [started(r), tokens(0, [5, 6]), tokens(2, [7]), finished(3)]])
    assert [chunk.token_ids for chunk in chunks] == [(5, 6), (7,)]
    assert completion.text == "<5><6><7>"
    assert completion.token_ids == (5, 6, 7)
    assert completion.finish_reason == "length"
    assert completion.usage.num_output_tokens == 3
    assert completion.session_id == servicer.requests[0].session_id != ""
    assert completion.request_id == servicer.requests[0].request_id != ""


def test_an_adapter_that_the_coordinator_does_not_know_is_never_ignored() -> None:
    """One of an earlier version reads past the field, and would answer with the base model."""
    server, endpoint = serve(ScriptedCoordinator([lambda r: [started(r), tokens(0, [5]), finished(1)]]))
    with Client(endpoint) as client:
        with pytest.raises(Unsupported, match="older than adapters"):
            client.generate("hello", adapter="sql")
        assert client.generate("hello", adapter="").token_ids == (5,)
    server.stop(None)


@pytest.mark.parametrize("error", [Unavailable("gone"), LeaseLost("taken"), StaleEpoch("taken")])
def test_a_broken_stream_resumes_after_the_last_token_it_returned(run: Run, error: SpecdecError) -> None:
    servicer, chunks, completion = run(
        [
            lambda r: [started(r), tokens(0, [5, 6]), soon(error)],
            lambda r: [started(r), tokens(2, [7]), soon(error)],
            lambda r: [started(r), tokens(3, [8]), finished(4)],
        ]
    )
    assert [chunk.index for chunk in chunks] == [0, 2, 3]
    assert completion.token_ids == (5, 6, 7, 8)
    first, second, third = servicer.requests
    assert (second.resume_from, third.resume_from) == (2, 3)
    assert second.WhichOneof("input") is None
    assert {r.session_id for r in servicer.requests} == {first.session_id}
    assert {r.request_id for r in servicer.requests} == {first.request_id}


def test_before_the_first_token_the_whole_request_is_sent_again_under_the_same_ids(run: Run) -> None:
    servicer, _, completion = run(
        [
            lambda r: [soon(Unavailable("gone"))],
            lambda r: [started(r), soon(Unavailable("gone again"))],
            lambda r: [started(r), tokens(0, [5]), finished(1)],
        ]
    )
    assert completion.token_ids == (5,)
    assert all(request == servicer.requests[0] for request in servicer.requests)


@pytest.mark.parametrize("error", [LeaseLost("the lease of session s is not ours any more"), StaleEpoch("taken")])
def test_a_lease_lost_at_admission_is_retried_beyond_the_budget_of_a_new_call(
    error: SpecdecError,
) -> None:
    servicer = ScriptedCoordinator(
        [
            lambda r: [soon(error)],
            lambda r: [soon(SessionBusy("busy"))],
            lambda r: [started(r), tokens(0, [5]), finished(1)],
        ]
    )
    server, endpoint = serve(servicer)
    with Client(endpoint, budgets=Budgets(connect_s=0, resume_s=5)) as client:
        assert client.generate("p").token_ids == (5,)
    server.stop(None)
    assert servicer.requests[0] == servicer.requests[1] == servicer.requests[2]


def test_attempts_that_begin_and_bring_no_token_end_with_the_budget(run: Run) -> None:
    with pytest.raises(Unavailable, match="no target"):
        run([lambda r: [started(r), soon(Unavailable("no target"))]])


def test_a_stream_that_the_server_closes_early_is_resumed(run: Run) -> None:
    _, _, completion = run(
        [lambda r: [started(r), tokens(0, [5])], lambda r: [started(r), tokens(1, [6]), finished(2)]]
    )
    assert completion.token_ids == (5, 6)


def test_a_chunk_that_the_caller_holds_is_not_returned_twice(run: Run) -> None:
    _, chunks, completion = run(
        [
            lambda r: [started(r), tokens(0, [5, 6]), soon(Unavailable("gone"))],
            lambda r: [started(r), tokens(0, [5, 6]), tokens(2, [7]), finished(3)],
        ]
    )
    assert len(chunks) == 2
    assert completion.text == "<5><6><7>"


def test_a_busy_session_is_retried_within_the_budget(run: Run) -> None:
    servicer, _, completion = run(
        [
            lambda r: [soon(SessionBusy("another request is running"))],
            lambda r: [started(r), tokens(0, [5]), soon(Unavailable("gone"))],
            lambda r: [soon(SessionBusy("the lease of the lost coordinator is alive"))],
            lambda r: [started(r), tokens(1, [6]), finished(2)],
        ]
    )
    assert completion.token_ids == (5, 6)
    assert servicer.requests[0] == servicer.requests[1]


@pytest.mark.parametrize("reason", ["QUEUE_FULL", "KV_EXHAUSTED"])
def test_a_full_server_is_called_again_with_the_same_request_id(run: Run, reason: str) -> None:
    servicer, _, completion = run(
        [
            lambda r: [soon(ResourceExhausted("full", reason=reason))],
            lambda r: [started(r), tokens(0, [5]), finished(1)],
        ]
    )
    assert completion.token_ids == (5,)
    assert servicer.requests[0] == servicer.requests[1]


def test_a_stream_ended_because_it_was_not_read_is_resumed_after_the_last_token(run: Run) -> None:
    servicer, _, completion = run(
        [
            lambda r: [started(r), tokens(0, [5, 6]), soon(ResourceExhausted("not read"))],
            lambda r: [started(r), tokens(2, [7]), finished(3)],
        ]
    )
    assert completion.token_ids == (5, 6, 7)
    assert servicer.requests[1].resume_from == 2


@pytest.mark.parametrize("error", [SessionBusy("busy", retry_after_s=60), ResourceExhausted("full", retry_after_s=60)])
def test_a_wait_that_would_outlast_the_budget_is_skipped(run: Run, error: SpecdecError) -> None:
    began_s = time.monotonic()
    with pytest.raises(type(error)) as caught:
        run([lambda r: [started(r), error]])
    assert caught.value.retry_after_s == 60
    assert time.monotonic() - began_s < 30  # not the minute that the server asked for


@pytest.mark.parametrize(
    "error", [NotFound("no such session"), SessionLost("log too short"), InvalidRequest("bad", field="sampling.top_p")]
)
def test_a_permanent_error_is_raised_at_once(run: Run, error: NotFound) -> None:
    with pytest.raises(type(error)) as caught:
        run([lambda r: [started(r), tokens(0, [5]), error]])
    assert (caught.value.message, caught.value.reason, caught.value.field) == (error.message, error.reason, error.field)


def test_skipped_tokens_raise_an_error(run: Run) -> None:
    with pytest.raises(Internal, match="where 1 was next"):
        run([lambda r: [started(r), tokens(0, [5]), tokens(2, [7]), finished(3)]])


def test_a_stream_resumes_after_its_server_was_stopped_and_started_again() -> None:
    first = ScriptedCoordinator([lambda r: [started(r), tokens(0, [5]), soon(Unavailable("going down"))]])
    server, endpoint = serve(first)
    second = ScriptedCoordinator([lambda r: [started(r), tokens(1, [6]), finished(2)]])
    with Client(endpoint, budgets=QUICK) as client, client.generate("p", stream=True) as stream:
        assert next(stream).token_ids == (5,)
        server.stop(None).wait()
        server, _ = serve(second, endpoint)
        assert stream.result().token_ids == (5, 6)
        assert second.requests[0].resume_from == 1
    server.stop(None)


def test_a_silent_endpoint_fails_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with Client(endpoint, budgets=Budgets(connect_s=1.0)) as client, pytest.raises(Unavailable, match=endpoint):
            client.generate("p")
    assert time.monotonic() - began < 15.0


def test_the_error_names_an_endpoint_without_a_listener() -> None:
    with Client("127.0.0.1:1", budgets=Budgets(connect_s=0)) as client:
        for call in (partial(client.generate, "p"), client.info):
            with pytest.raises(
                Unavailable, match=r"no coordinator at 127\.0\.0\.1:1: the connection was refused; start one"
            ) as caught:
                call()
            assert caught.value.reason == "COORDINATOR_UNAVAILABLE"


def test_an_unknown_host_is_reported_as_a_missing_coordinator() -> None:
    endpoint = "no-such-host.invalid:50051"
    with Client(endpoint, budgets=Budgets(connect_s=0)) as client, pytest.raises(Unavailable) as caught:
        client.info()
    assert caught.value.reason == "COORDINATOR_UNAVAILABLE"
    assert caught.value.message.startswith(f"no coordinator at {endpoint}: ")

    async def ask() -> None:
        async with AsyncClient(endpoint, budgets=Budgets(connect_s=0)) as client:
            with pytest.raises(Unavailable, match=f"no coordinator at {endpoint}"):
                await client.info()

    asyncio.run(ask())


def test_a_coordinator_without_targets_is_not_reported_as_missing(run: Run) -> None:
    with pytest.raises(Unavailable) as caught:
        run([lambda r: [Unavailable("target: failed to connect to all addresses", retry_after_s=60)]])
    assert (caught.value.reason, caught.value.message) == (
        "REPLICA_UNAVAILABLE", "target: failed to connect to all addresses",
    )  # fmt: skip


class Recovering(ScriptedCoordinator):
    """Refuses four generations and four other calls because it has no target."""

    def __init__(self) -> None:
        super().__init__([*[without_target] * 4, lambda r: [started(r), finished(0)]])
        self._num_asked = 0

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:  # noqa: N802
        self._num_asked += 1
        self.tokenize_error = without_target(request)[0] if self._num_asked <= 4 else None
        return super().Tokenize(request, context)


def without_target(request: object) -> list[Unavailable]:
    return [Unavailable("no target replica", retry_after_s=0.1)]


def test_generations_wait_longer_for_a_target_and_other_calls_do_not() -> None:
    servicer = Recovering()
    server, endpoint = serve(servicer)
    with Client(endpoint, budgets=Budgets(connect_s=0.05, target_s=60.0)) as client:
        assert client.generate("p").token_ids == ()
        with pytest.raises(Unavailable):
            client.tokenize("p")
    assert len(servicer.requests) == 5

    async def ask() -> None:
        async with AsyncClient(endpoint, budgets=Budgets(connect_s=0.05, target_s=60.0)) as client:
            assert (await client.generate("p")).token_ids == ()

    servicer.requests.clear()
    asyncio.run(ask())
    server.stop(None)
    assert len(servicer.requests) == 5


def test_an_unavailable_error_that_grpc_made_does_not_get_the_wait_for_a_target() -> None:
    class Broken(ScriptedCoordinator):
        """Fails four calls as a proxy without a healthy upstream does."""

        def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
            if len(self.requests) < 4:
                self.requests.append(request)
                context.abort(grpc.StatusCode.UNAVAILABLE, "no healthy upstream")
            return super().Generate(request, context)

    server, endpoint = serve(Broken([lambda r: [started(r), finished(0)]]))
    with (
        Client(endpoint, budgets=Budgets(connect_s=0.05, target_s=60.0)) as client,
        pytest.raises(Unavailable, match=r"connection to the coordinator at .* was lost"),
    ):
        client.generate("p")
    server.stop(None)


def test_leaving_a_stream_cancels_the_call_on_the_server() -> None:
    ended = asyncio.run(_leave_early())
    assert ended


async def _leave_early() -> bool:
    servicer = ScriptedCoordinator([lambda r: [started(r), *(tokens(i, [i]) for i in range(1000)), finished(1000)]])
    server, endpoint = serve(servicer)
    async with AsyncClient(endpoint) as client, client.generate("p", stream=True) as stream:
        await anext(stream)
        call = stream._call
    code = await call.code()
    server.stop(None)
    return bool(code.name == "CANCELLED")


def test_a_stream_can_be_resumed_elsewhere_by_session_and_token_count() -> None:
    servicer = ScriptedCoordinator(
        [lambda r: [pb.GenerateResponse(started=pb.Started(request_id="r")), tokens(2, [7]), finished(3)]]
    )
    server, endpoint = serve(servicer)
    with Client(endpoint) as client:
        completion = client.resume("s", 2).result()
    server.stop(None)
    assert (completion.token_ids, completion.request_id, completion.session_id) == ((7,), "r", "s")
    assert servicer.requests[0].resume_from == 2


def test_details_name_source_probabilities_and_text_of_each_token() -> None:
    server, endpoint = serve(
        ScriptedCoordinator([lambda r: [started(r), tokens(0, [1, 2, 3, 4], "acbt"), finished(4)]])
    )
    with Client(endpoint) as client:
        details = client.generate("p", provenance=True).details
    server.stop(None)
    assert [detail.source for detail in details] == list(TokenSource)
    assert [detail.text for detail in details] == ["<1>", "<2>", "<3>", "<4>"]
    assert all(detail.p == 0.5 and detail.q == 0 and detail.logprob is None for detail in details)


def test_tokenize_takes_text_or_messages_and_delete_names_the_session() -> None:
    servicer = ScriptedCoordinator([])
    server, endpoint = serve(servicer)
    with Client(endpoint) as client:
        assert client.tokenize("abc") == (3, 0)
        assert client.tokenize(messages=[{"role": "user", "content": "x"}]) == (0, 1)
        client.delete_session("s")
        with pytest.raises(InvalidRequest):
            client.tokenize()
    server.stop(None)
    assert servicer.deleted == ["s"]
