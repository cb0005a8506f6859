"""One client of several coordinators: real processes behind a name whose addresses change, as a headless service's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.systems.simulated import write_tokenizer
from specdec.client import AsyncClient, Client
from tests.support.name_server import NameServer
from tests.support.process_template import ENVIRON, Streams, start_like
from tests.support.scraping import Endpoint
from tests.support.stack import free_port, is_serving

NUM_REQUESTS = 200
#: Of a stream that lasts longer than a connection.
NUM_LONG_TOKENS = 400
#: Connections to the coordinators live this long, give or take a tenth.
AGE_S = 3.0


class Coordinators:
    """Coordinators of one target, on one port of several addresses of loopback."""

    def __init__(self, tokenizer: Path, ending: contextlib.ExitStack) -> None:
        self._tokenizer, self._ending = tokenizer, ending
        self.port, self._target = free_port(), f"127.0.0.1:{free_port()}"
        self._metrics: dict[str, Endpoint] = {}
        self._run("target_service", "--model", "simulated:8b-0.6b", "--listen", self._target)

    def start(self, *hosts: str) -> None:
        """Start a coordinator at each address and wait until they serve."""
        for host in hosts:
            self._metrics[host] = Endpoint(f"127.0.0.1:{free_port()}")
            flags = ["--tokenizer", str(self._tokenizer), "--target-endpoint", self._target]
            flags += ["--listen", f"{host}:{self.port}", "--metrics", self._metrics[host].address]
            self._run("coordinator", *flags, "--max-connection-age-s", str(AGE_S), "--insecure")
        for host in hosts:
            while not is_serving(f"{host}:{self.port}"):
                time.sleep(0.05)

    def counts(self) -> list[int]:
        """Requests that each coordinator has finished."""
        return [
            int(endpoint.scrape_now().value("request_success_total", finished_reason="length"))
            for endpoint in self._metrics.values()
        ]

    def _run(self, service: str, *flags: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")} | ENVIRON
        arguments = ["--redis-url", "memory://", "--log-level", "error", *flags]
        with open(os.devnull, "r+b") as nothing:
            process = start_like(service, arguments, environ, Streams(nothing, nothing, nothing))
        self._ending.callback(process.wait)
        self._ending.callback(process.kill)


@pytest.fixture
def coordinators(tmp_path: Path) -> Iterator[Coordinators]:
    with contextlib.ExitStack() as ending:
        yield Coordinators(write_tokenizer(tmp_path), ending)


async def ask(client: AsyncClient, num_requests: int, *, at_once: int = 8) -> None:
    slots = asyncio.Semaphore(at_once)

    async def generate(seed: int) -> None:
        async with slots:
            await client.generate(prompt_token_ids=[1 + seed % 1000, 2, 3], max_new_tokens=1, ignore_eos=True)

    await asyncio.gather(*(generate(seed) for seed in range(num_requests)))


async def gained(coordinators: Coordinators, client: AsyncClient, num_requests: int, **options: int) -> list[int]:
    before = await asyncio.to_thread(coordinators.counts)
    await ask(client, num_requests, **options)
    return [after - one for after, one in zip(await asyncio.to_thread(coordinators.counts), before, strict=True)]


async def test_a_client_loads_all_coordinators_and_those_that_join(coordinators: Coordinators) -> None:
    coordinators.start("127.0.0.2", "127.0.0.3")
    with NameServer(["127.0.0.2", "127.0.0.3"]) as names:
        async with AsyncClient(names.target(coordinators.port)) as client:
            two = await gained(coordinators, client, NUM_REQUESTS)
            long = asyncio.create_task(
                client.generate(
                    prompt_token_ids=[1, 2, 3], max_new_tokens=NUM_LONG_TOKENS, ignore_eos=True, temperature=0.0
                )
            )
            await asyncio.to_thread(coordinators.start, "127.0.0.4")
            names.addresses = [*names.addresses, "127.0.0.4"]
            joined_s = time.monotonic()
            while time.monotonic() - joined_s < 1.2 * AGE_S:  # with the tenth by which ages differ
                await ask(client, 1)
                await asyncio.sleep(0.05)
            three = await gained(coordinators, client, NUM_REQUESTS)
            output = await long
    print(f"shares of two: {two}, of three: {three}")
    assert sum(two) == NUM_REQUESTS
    assert min(two) >= 0.4 * NUM_REQUESTS
    assert three[2] >= 0.2 * NUM_REQUESTS
    assert len(output.token_ids) == NUM_LONG_TOKENS  # connections that are too old keep their streams


@pytest.mark.full
async def test_calls_that_begin_together_are_spread_from_the_first_one(
    coordinators: Coordinators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator whose connection is ready a moment later than the other one gets no call of the first burst. This
    seldom happens to each of several clients, also on a busy machine.
    """
    monkeypatch.setattr("specdec.client.coordinators.HEALTH_TIMEOUT_S", 60.0)
    coordinators.start("127.0.0.2", "127.0.0.3")
    endpoint = f"127.0.0.2:{coordinators.port},127.0.0.3:{coordinators.port}"
    bursts = []
    for _ in range(5):
        async with AsyncClient(endpoint) as client:
            bursts.append(await gained(coordinators, client, 32, at_once=32))
    print(f"of 32 at once: {bursts}")
    assert max(map(min, bursts)) >= 8

    def generate() -> None:
        with Client(endpoint) as client:
            for seed in range(40):
                client.generate(prompt_token_ids=[seed + 1, 2, 3], max_new_tokens=1, ignore_eos=True)

    before = coordinators.counts()
    await asyncio.to_thread(generate)
    assert min(after - one for after, one in zip(coordinators.counts(), before, strict=True)) >= 8
