"""Steps of load on a running system, which clients see take hold and end: in streams, refusals and health checks.

Each step is an async context manager. It begins the step when it is entered and yields once the step has taken hold; it
ends the step afterwards and returns once that has taken effect. `tests.support.signals` reads the metrics meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from specdec.contract.errors import KvMiss, Unavailable
from specdec.contract.types import VerifyRequest
from specdec.observability.loop_lag import INTERVAL_S
from specdec.rpc.client import TargetLink, open_link
from specdec.rpc.status_mapping import from_rpc_error
from tests.support.freezing import frozen_part, stuttering
from tests.support.http_streams import open_stream
from tests.support.injured_stack import Injured
from tests.support.process_rig import ask, run, stub_of
from tests.support.redis_fixture import RedisServer
from tests.support.round_driver import make_round
from tests.support.scraping import Endpoint
from tests.support.stack import Stack, is_serving
from tests.support.tiny_models import build_tiny_pair

NUM_STREAMS = 32
NO_TOKENS = np.empty(0, dtype=np.uint32)
#: Of the tiny target.
BLOCK_TOKENS, BLOCK_BYTES = 16, 12_288
NUM_KV_BLOCKS = 192
#: Tokens of a session that needs more KV than is left beside the short ones, of the short ones, and of an idle one.
LONG_TOKENS, SHORT_TOKENS, NUM_SHORT, IDLE_TOKENS = 104 * BLOCK_TOKENS, 20 * BLOCK_TOKENS, 8, 4 * BLOCK_TOKENS
#: Time that a step of the target takes, and takes while its device is slow, beyond its computation.
STEP_S, SLOW_STEP_S = 0.2, 0.6
#: Time that a step of the draft takes for each of its sequences, beyond its computation, which takes a few milliseconds
#: a second and depends on what else the machine does: a busy draft must be seen beside that.
DRAFT_SEQUENCE_S = 0.001


class Reader:
    """A client that reads one streamed output after the other."""

    def __init__(self, client: httpx2.AsyncClient, prompt: list[int], *, num_tokens: int) -> None:
        self._client = client
        self._fields: dict[str, Any] = {
            "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0,
            "speculation": {"gamma": 3},
        }  # fmt: skip
        self._num_prompt = len(prompt)
        self._sizes: list[int] = []
        """Number of tokens of each event so far."""
        self._has_moved = asyncio.Event()
        self.session_ids: set[str] = set()

    async def run(self) -> None:
        while True:
            async with open_stream(self._client, **self._fields) as stream:
                while not stream.is_done:
                    num_before = stream.indexes[-1] if stream.indexes else 0
                    await stream.read_event()
                    self.session_ids |= stream.session_ids
                    self._sizes.append(stream.indexes[-1] - num_before)
                    self._has_moved.set()

    @property
    def num_blocks(self) -> int:
        """Number of full blocks of the prompt and the first output so far; 0 without output."""
        return (self._num_prompt + sum(self._sizes) - 1) // BLOCK_TOKENS if self._sizes else 0

    async def until(self, is_so: Callable[[list[int]], bool]) -> None:
        """Wait until `is_so` is true of the numbers of tokens of the events that have come since the call."""
        start = len(self._sizes)
        while not is_so(self._sizes[start:]):
            self._has_moved.clear()
            await self._has_moved.wait()

    async def until_events(self, count: int) -> None:
        await self.until(lambda sizes: sum(size > 0 for size in sizes) >= count)

    async def until_drafted(self) -> None:
        """Wait for a round that emits more than the one token which every round gives."""
        await self.until(lambda sizes: max(sizes, default=0) > 1)


@dataclass
class System:
    """The running system with its only stream."""

    stack: Stack
    injured: Injured
    redis: RedisServer
    client: httpx2.AsyncClient
    readers: asyncio.TaskGroup
    endpoints: dict[str, Endpoint]
    stream: Reader

    @asynccontextmanager
    async def reading(self, readers: list[Reader]) -> AsyncIterator[None]:
        """Let further clients read within; afterwards they leave, and their sessions are deleted."""
        tasks = [self.readers.create_task(reader.run()) for reader in readers]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        ids = {session_id for reader in readers for session_id in reader.session_ids}
        await asyncio.gather(*(self.client.delete(f"/v1/sessions/{session_id}") for session_id in ids))


@contextmanager
def started(directory: Path) -> Iterator[tuple[Stack, Injured, RedisServer]]:
    """A coordinator, a gateway, a draft and a target with a slow device and little KV, on a Redis of their own."""
    models = build_tiny_pair("llama", directory / "models", context=4096)
    redis = RedisServer(directory)
    redis.start()
    stack = Stack(
        *models, redis_url=redis.url, has_metrics=True, gateway_arguments=(),
        replica_arguments=["--dtype", "float32", "--self-check", "off"],
        # All streams run at once, and requests wait for KV blocks for as long as it takes.
        coordinator_arguments=[
            "--max-queue", str(NUM_STREAMS), "--max-running", str(NUM_STREAMS), "--max-wait-s", "600",
        ],
        # Outputs have no reserved blocks, so that sessions take blocks from each other.
        target_arguments=[
            "--kv-cache-bytes", str(NUM_KV_BLOCKS * BLOCK_BYTES), "--prefill-budget-ms", "60000",
            "--kv-reserve-tokens", "1", "--max-wait-s", "600",
        ],
    )  # fmt: skip
    (directory / "injuries").mkdir()
    injured = Injured(stack, directory / "injuries")
    try:
        with stack:
            injured.injure("target", "slow", str(STEP_S))
            injured.injure("draft", "slow", f"0 {DRAFT_SEQUENCE_S}")
            yield stack, injured, redis
    finally:
        redis.stop()


@asynccontextmanager
async def running_stream(stack: Stack, injured: Injured, redis: RedisServer) -> AsyncIterator[System]:
    """The system with one stream that runs within, over HTTP."""
    url, limits = f"http://{stack.parts['gateway'].address}", httpx2.Limits(max_connections=None)
    async with (
        httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as client,
        asyncio.TaskGroup() as readers,
    ):
        endpoints = {name: Endpoint(part.metrics) for name, part in stack.parts.items()}
        stream = Reader(client, [5, 17, 99], num_tokens=256)
        running = readers.create_task(stream.run())
        await stream.until_drafted()
        yield System(stack, injured, redis, client, readers, endpoints, stream)
        running.cancel()


# ---- the steps: each begins when it is entered, and returns when it has taken hold, or has ended ------------------


@asynccontextmanager
async def more_streams(system: System) -> AsyncIterator[None]:
    readers = [Reader(system.client, [7 + number, 17, 99], num_tokens=2000) for number in range(NUM_STREAMS - 1)]
    async with system.reading(readers):
        await asyncio.gather(*(reader.until_events(2) for reader in readers))
        await asyncio.to_thread(wait_for_refusal, system.stack.endpoint)
        yield
    # The rounds of the clients that have left end within this time; their tokens came slowly.
    await system.stream.until_events(4)


def wait_for_refusal(address: str) -> None:
    """Return once a request is refused, which is not before all streams run."""
    stub = stub_of(address)
    while True:
        try:
            run(stub, ask(num_tokens=1))
        except grpc.RpcError as error:
            if from_rpc_error(error).reason == "QUEUE_FULL":
                return
            raise


@asynccontextmanager
async def long_sessions(system: System) -> AsyncIterator[None]:
    """Sessions that together need more KV than there is, one of them more than the others leave free.

    No turn of theirs ends within the step. So once they have received tokens for more blocks than there are, turns have
    lost their KV to others, and before them the idle session, whose next call misses it. Until then steps
    take no longer than their computation.
    """
    lengths = [LONG_TOKENS, *[SHORT_TOKENS] * NUM_SHORT]
    prompts = [[7 + number, *([17, 99] * length)[: length - 1]] for number, length in enumerate(lengths)]
    readers = [Reader(system.client, prompt, num_tokens=1200) for prompt in prompts]
    async with idle_session(system.stack.parts["target"].address) as call_again, system.reading(readers):
        system.injured.injure("target", "slow", "0")  # until the KV is full
        while sum(reader.num_blocks for reader in readers) <= NUM_KV_BLOCKS:
            await next_event(readers)
        system.injured.injure("target", "slow", str(STEP_S))
        with pytest.raises(KvMiss):
            await call_again()
        yield


async def next_event(readers: list[Reader]) -> None:
    """Wait until one of the readers has received further tokens."""
    waits = [asyncio.create_task(reader.until_events(1)) for reader in readers]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


@asynccontextmanager
async def idle_session(address: str) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """A session of a target whose turn has ended; yields what makes its next call, which relies on its KV."""
    name, tokens = "idle", [3, *[17, 99] * (IDLE_TOKENS // 2)]
    link = open_link("target", address)
    assert isinstance(link, TargetLink)
    try:
        # The target may be too busy to answer a new connection within the 50 ms of gRPC's first attempt.
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Unavailable), wait=wait_fixed(0.2), stop=stop_after_delay(60), reraise=True
        ):
            with attempt:
                await link.verify(VerifyRequest(make_round(tokens, session_id=name), NO_TOKENS, ()))
        await link.end_turns({name: 1})
        again = make_round([*tokens, 5], session_id=name, epoch=2, start=len(tokens))
        yield lambda: link.verify(VerifyRequest(again, NO_TOKENS, ()))
        await link.release([name])
    finally:
        await link.close()


@asynccontextmanager
async def frozen_draft(system: System) -> AsyncIterator[None]:
    draft = system.endpoints.pop("draft")  # a scrape of a stopped process would wait for it
    with frozen_part(system.stack, "draft"):
        await system.stream.until_events(3)
        yield
    system.endpoints["draft"] = draft
    await system.stream.until_drafted()


@asynccontextmanager
async def killed_draft(system: System) -> AsyncIterator[None]:
    system.stack.kill("draft")
    await system.stream.until_events(3)
    yield
    await asyncio.to_thread(system.stack.restart, "draft")
    await system.stream.until_drafted()


@asynccontextmanager
async def slow_device(system: System) -> AsyncIterator[None]:
    system.injured.injure("target", "slow", str(SLOW_STEP_S))
    await system.stream.until_events(2)
    yield
    system.injured.injure("target", "slow", str(STEP_S))
    await system.stream.until_events(1)


@asynccontextmanager
async def stalled_device(system: System) -> AsyncIterator[None]:
    system.injured.injure("target", "hang")
    await asyncio.to_thread(wait_for_health, system.stack.endpoint, is_healthy=False)
    yield
    system.injured.heal("target", "hang")
    await asyncio.to_thread(wait_for_health, system.stack.endpoint, is_healthy=True)
    await system.stream.until_events(1)


def wait_for_health(address: str, *, is_healthy: bool) -> None:
    while is_serving(address) != is_healthy:
        time.sleep(0.05)


@asynccontextmanager
async def slow_store(system: System) -> AsyncIterator[None]:
    async with stuttering(system.redis.signal, still_s=0.5, running_s=0.1):
        await system.stream.until_events(3)
        yield
    await system.stream.until_events(1)


@asynccontextmanager
async def held_up_coordinator(system: System) -> AsyncIterator[None]:
    process = system.stack.parts["coordinator"].process
    assert process is not None
    # Each stop is longer than the interval of the measurements, so one of them falls into it.
    async with stuttering(process.send_signal, still_s=INTERVAL_S + 0.1, running_s=0.2):
        await system.stream.until_events(3)
        yield
    await system.stream.until_events(1)


STEPS: dict[str, Callable[[System], AbstractAsyncContextManager[None]]] = {
    "1 to 32 streams": more_streams,
    "KV filled": long_sessions,
    "draft frozen": frozen_draft,
    "draft gone": killed_draft,
    "device slow": slow_device,
    "device stalled": stalled_device,
    "store slow": slow_store,
    "coordinator held up": held_up_coordinator,
}
