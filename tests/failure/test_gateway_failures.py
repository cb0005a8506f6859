"""The gateway in front of two coordinators on a real Redis: a coordinator dies, a client leaves, the gateway drains."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.http_streams import HttpStream, open_stream
from tests.support.redis_fixture import RedisServer, redis_server
from tests.support.scraping import Endpoint
from tests.support.stack import Stack
from tests.support.tiny_models import build_tiny_pair

__all__ = ["redis_server"]

NUM_STREAMS = 16
NUM_TOKENS = 192
CONTEXT = 4096
PROMPT = (5, 17, 99, 42, 3, 8)
COORDINATORS = ("coordinator", "coordinator2")
GREEDY = {"temperature": 0}
#: A mode in which a seed decides the text, whatever the lengths of drafts and whichever coordinator draws.
COUPLED = {"temperature": 1, "seed": 7, "speculation": {"mode": "coupled", "gamma": 1}}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[Stack]:
    models: tuple[Path, Path] = build_tiny_pair("llama", tmp_path_factory.mktemp("models"), context=CONTEXT)
    with Stack(
        *models, redis_url=redis_server.url, num_coordinators=2, has_metrics=True,
        coordinator_arguments=["--lease-ttl-s", "1", "--draft-timeout-s", "20"],
        gateway_arguments=["--drain-grace-s", "120"],
    ) as stack:  # fmt: skip
        yield stack


@asynccontextmanager
async def connected(stack: Stack) -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_connections=None)
    url = f"http://{stack.parts['gateway'].address}"
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        yield client


def fields_of(number: int, *, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """Return a request of its own for each number: the even ones are greedy, the odd ones coupled."""
    prompt = [PROMPT[0] + number, *PROMPT[1:]]
    sampling = COUPLED if number % 2 else GREEDY | {"speculation": {"gamma": 1}}
    return {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, **sampling}


async def open_all(opened: AsyncExitStack, client: httpx2.AsyncClient) -> list[HttpStream]:
    """Begin all streams; each has its first event and none its end."""
    requests = [open_stream(client, **fields_of(number)) for number in range(NUM_STREAMS)]
    streams = await asyncio.gather(*map(opened.enter_async_context, requests))
    await asyncio.gather(*(stream.read_event() for stream in streams))
    return streams


async def open_until_one_runs_many(
    opened: AsyncExitStack, client: httpx2.AsyncClient, stack: Stack
) -> tuple[list[HttpStream], str]:
    """Begin all streams, again if most of them have ended before this process can see which coordinator runs them."""
    while True:
        streams = await open_all(opened, client)
        running = {name: num_running(stack, name) for name in COORDINATORS}
        busiest = max(COORDINATORS, key=running.__getitem__)
        if running[busiest] >= NUM_STREAMS / 4:
            return streams, busiest
        await asyncio.gather(*(stream.read_all() for stream in streams))


async def undisturbed_texts(client: httpx2.AsyncClient) -> list[str]:
    requests = [client.post("/v1/completions", json=fields_of(number)) for number in range(NUM_STREAMS)]
    return [response.json()["choices"][0]["text"] for response in await asyncio.gather(*requests)]


async def assert_whole(streams: list[HttpStream], texts: list[str]) -> None:
    """Read every stream to its end, and compare texts and ids with what nothing disturbs."""
    await asyncio.gather(*(stream.read_all() for stream in streams))
    assert [stream.text for stream in streams] == texts
    for stream in streams:
        assert stream.finish_reason == "length"
        assert len(stream.session_ids) == 1
        *tokens, last = stream.indexes
        assert tokens == sorted(set(tokens))
        assert tokens[-1] == last == NUM_TOKENS


def num_running(stack: Stack, name: str) -> float:
    return Endpoint(stack.parts[name].metrics).scrape_now().value("num_requests_running")


async def test_no_stream_ends_or_differs_when_the_coordinator_of_16_is_killed(stack: Stack) -> None:
    async with connected(stack) as client, AsyncExitStack() as opened:
        texts = await undisturbed_texts(client)
        streams, busiest = await open_until_one_runs_many(opened, client, stack)
        stack.kill(busiest)
        try:
            await assert_whole(streams, texts)
        finally:
            stack.restart(busiest)


async def test_a_client_that_leaves_has_its_request_cancelled_and_its_kv_released(stack: Stack) -> None:
    num_tokens = CONTEXT - 2 * len(PROMPT)
    async with connected(stack) as client:
        async with open_stream(client, **fields_of(0, num_tokens=num_tokens)) as stream:
            await stream.read_event()
        (session_id,) = stream.session_ids
        for name in COORDINATORS:
            await Endpoint(stack.parts[name].metrics).until(lambda page: page.value("num_requests_running") == 0)
        record = (await client.get(f"/v1/sessions/{session_id}")).json()
        assert record["status"] == "idle"
        assert len(PROMPT) < record["num_tokens"] < len(PROMPT) + num_tokens
        for name in ("target", "draft"):
            await Endpoint(stack.parts[name].metrics).until(lambda page: page.value("kv_blocks", state="active") == 0)
        assert (await client.get(f"/v1/sessions/{session_id}")).json()["num_tokens"] == record["num_tokens"]
        page = await Endpoint(stack.parts["gateway"].metrics).until(
            lambda page: page.value("http_disconnects_total") > 0
        )
        assert page.value("http_disconnects_total") == 1


async def test_a_gateway_that_is_asked_to_stop_finishes_its_streams_and_exits_with_0(stack: Stack) -> None:
    async with connected(stack) as client, AsyncExitStack() as opened:
        texts = await undisturbed_texts(client)
        streams = await open_all(opened, client)
        gateway = stack.parts["gateway"].process
        assert gateway is not None
        gateway.send_signal(signal.SIGTERM)
        await assert_whole(streams, texts)
        assert await asyncio.to_thread(gateway.wait) == 0
    with pytest.raises(httpx2.ConnectError):
        async with connected(stack) as client:
            await client.get("/health")
