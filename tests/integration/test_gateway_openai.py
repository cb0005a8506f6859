"""The official `openai` client and a gateway: the class of every error, retries, and calls that the client gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from gateway.auth import ApiKeys
from specdec.contract.errors import (
    DeadlineExceeded,
    Forbidden,
    Internal,
    NotFound,
    ResourceExhausted,
    SessionBusy,
    SessionLost,
    SpecdecError,
    Unavailable,
    Unsupported,
)
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Rig
from tests.support.gateway_rig import NOWHERE, RunningGateway, eventually, running_gateway
from tests.support.key_files import key_line, write_private
from tests.support.scripted_coordinator import Event, ScriptedCoordinator, finished, serve, started, tokens
from tests.support.table_services import write_chat_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share a gateway

MODEL = "target"
#: Errors of a coordinator by their code over HTTP, with the client's class and the status.
ERRORS: dict[str, tuple[SpecdecError, type[openai.APIStatusError], int]] = {
    "unsupported": (Unsupported("no such mode"), openai.BadRequestError, 400),
    "forbidden": (Forbidden("not yours"), openai.PermissionDeniedError, 403),
    "session_not_found": (NotFound("no such session"), openai.NotFoundError, 404),
    "session_busy": (SessionBusy("another request runs"), openai.ConflictError, 409),
    "session_lost": (SessionLost("the log is too short"), openai.ConflictError, 409),
    "queue_full": (ResourceExhausted("the queue is full"), openai.RateLimitError, 429),
    "quota_exceeded": (ResourceExhausted("too many", reason="QUOTA_EXCEEDED"), openai.RateLimitError, 429),
    "replica_unavailable": (Unavailable("no target"), openai.InternalServerError, 503),
    "deadline_exceeded": (DeadlineExceeded("too slow"), openai.InternalServerError, 504),
    "internal": (Internal("a fault"), openai.InternalServerError, 500),
}
#: Prefix of ids whose error comes after the first token.
AFTER_A_TOKEN = "after-"


def answer_as_named(request: pb.GenerateRequest) -> list[Event]:
    """Fail with the error that the session's id names, or generate two tokens for another id.

    With the prefix `after-` the error comes after the first token.
    """
    code = request.session_id.removeprefix(AFTER_A_TOKEN)
    if code not in ERRORS:
        return [started(request), tokens(0, [1, 2]), finished(2)]
    error = ERRORS[code][0]
    return [started(request), tokens(0, [1]), error] if code != request.session_id else [error]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    server, endpoint = serve(ScriptedCoordinator([answer_as_named]))
    async with running_gateway(endpoint, served_model_name=(MODEL,)) as running:
        yield running
    server.stop(None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(gateway) as client:
        yield client


def client_of(running: RunningGateway, key: str = "unused") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, timeout=120, max_retries=0)


async def create(client: openai.AsyncOpenAI, route: str, session_id: str = "", **options: Any) -> Any:
    """Send a request to the route `chat`, `completions` or `responses`."""
    options["extra_body"] = {**options.get("extra_body", {}), **({"session_id": session_id} if session_id else {})}
    match route:
        case "chat":
            return await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "w5"}], **options
            )
        case "completions":
            return await client.completions.create(model=MODEL, prompt="w5", **options)
        case _:
            return await client.responses.create(model=MODEL, input="w5", **options)


async def read_to_its_end(stream: Any) -> int:
    """Return the number of events that were left."""
    return len([event async for event in stream])


@pytest.mark.parametrize("route", ["chat", "completions", "responses"])
@pytest.mark.parametrize("code", ERRORS)
async def test_an_error_before_the_first_token_is_raised_as_its_class(
    client: openai.AsyncOpenAI, code: str, route: str
) -> None:
    error, kind, status = ERRORS[code]
    for stream in (False, True):
        with pytest.raises(kind) as raised:
            await create(client, route, code, stream=stream)
        assert (raised.value.status_code, raised.value.code) == (status, code)
        assert error.message in raised.value.message
        assert ("retry-after" in raised.value.response.headers) == error.retryable


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize("code", ["unsupported", "internal"])
async def test_an_error_after_the_first_token_is_raised_from_the_stream(
    client: openai.AsyncOpenAI, code: str, route: str
) -> None:
    stream = await create(client, route, AFTER_A_TOKEN + code, stream=True)
    await anext(stream)
    with pytest.raises(openai.APIError) as raised:
        await read_to_its_end(stream)
    assert (raised.value.code, raised.value.message) == (code, ERRORS[code][0].message)


async def test_a_route_that_does_not_exist_is_refused_in_words(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings: this server generates text") as raised:
        await client.embeddings.create(model=MODEL, input="w5", encoding_format="float")
    assert raised.value.code == "not_found"


async def test_a_missing_wrong_or_weak_key_has_its_class(gateway: RunningGateway, tmp_path: Path) -> None:
    write_private(tmp_path / "keys", "".join(key_line(name, f"t {name}") for name in ("generate", "operate")))
    coordinator = gateway.gateway.settings.coordinator[0]
    async with running_gateway(coordinator, keys=ApiKeys(tmp_path / "keys", allow_anonymous=False)) as running:
        for key, kind in (("wrong", openai.AuthenticationError), ("operate", openai.PermissionDeniedError)):
            async with client_of(running, key) as client:
                with pytest.raises(kind):
                    await client.models.list()
        async with client_of(running, "generate") as client:
            assert [model.object async for model in client.models.list()] == ["model"]


async def test_a_gateway_that_is_not_there_is_a_connection_error() -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{NOWHERE}/v1", api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.APIConnectionError):
            await client.models.list()


async def test_the_client_tries_again_what_may_succeed_later() -> None:
    script = [lambda request: [ResourceExhausted("the queue is full")], answer_as_named]
    server, endpoint = serve(ScriptedCoordinator(script))
    async with (
        running_gateway(endpoint, retry_s=0.001, served_model_name=(MODEL,)) as running,
        client_of(running) as client,
    ):
        answer = await create(client.with_options(max_retries=1), "chat")
        assert answer.usage.completion_tokens == 2
    server.stop(None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_its_task_gives_up_ends_the_generation(stream: bool) -> None:
    async with Rig(write_checkpoint=write_chat_tokenizer) as rig:
        coordinator = await rig.coordinator()
        settings = {"served_model_name": (MODEL,)}
        async with running_gateway(coordinator.server.address, **settings) as running, client_of(running) as client:
            endless = {"ignore_eos": True}

            async def call() -> None:
                answer = await create(client, "completions", stream=stream, max_tokens=400, extra_body=endless)
                await read_to_its_end(answer)

            calling = asyncio.create_task(call())
            await eventually(lambda: coordinator.generations.num_running > 0)
            calling.cancel()
            await eventually(lambda: not coordinator.generations.num_running)
            await eventually(lambda: running.count("specdec:http_disconnects_total") == 1)
