"""Stepped wall clocks of Redis and of a coordinator cost a stream nothing, and block no session.

Leases and sessions expire by the clock of Redis: a step ahead ends them early, a step back keeps them for longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from specdec.client import AsyncClient, AsyncStream, Budgets
from specdec.contract.errors import NotFound, SessionLost
from tests.support.process_rig import NUM_TOKENS, PROMPT, models, reference
from tests.support.redis_fixture import RedisServer
from tests.support.stack import Stack
from tests.support.stepped_clocks import SteppedClock, build_library, compiler

__all__ = ["models", "reference"]

LEASE_TTL_S = 1
HOUR_S = 3600.0
#: Time for which a client tries again; much less than the clocks are stepped by.
PATIENCE_S = 240.0
PATIENT = Budgets(connect_s=PATIENCE_S, target_s=PATIENCE_S, resume_s=PATIENCE_S)


@dataclass
class System:
    """Two coordinators on a Redis; the clocks of Redis and of the first coordinator can be stepped."""

    stack: Stack
    redis: RedisServer
    clocks: dict[str, SteppedClock]

    @property
    def endpoint(self) -> str:
        return f"ipv4:{self.stack.endpoint},{self.stack.parts['coordinator2'].address}"


@pytest.fixture(scope="module")
def system(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    if compiler() is None:
        pytest.skip("clocks of processes are stepped by a library that needs a C compiler (cc)")
    directory = tmp_path_factory.mktemp("clocks")
    library = build_library(directory)
    clocks = {name: SteppedClock(directory / f"{name}.clock", library) for name in ("redis", "coordinator")}
    server = RedisServer(directory, machine=clocks["redis"].command)
    server.start()
    arguments = ["--lease-ttl-s", f"{LEASE_TTL_S}", "--draft-timeout-s", "20"]
    try:
        with Stack(
            *models, redis_url=server.url, num_coordinators=2, coordinator_arguments=arguments, clocks=clocks
        ) as stack:
            yield System(stack, server, clocks)
    finally:
        server.stop()


def shown_time_s(server: RedisServer) -> float:
    with redis.Redis.from_url(server.url) as client:
        seconds, microseconds = client.time()
        return float(seconds) + microseconds / 1e6


def long_stream(client: AsyncClient, session_id: str | None = None) -> AsyncStream:
    """Begin a stream of one token a round whose text is `reference`."""
    return client.generate(
        prompt_token_ids=PROMPT, session_id=session_id, temperature=0.0, ignore_eos=True,
        max_new_tokens=4 * NUM_TOKENS, gamma=0, stream=True,
    )  # fmt: skip


def test_the_processes_under_stepped_clocks_see_them(system: System) -> None:
    true_time_s = shown_time_s(system.redis)
    system.clocks["redis"].step(HOUR_S)
    try:
        assert shown_time_s(system.redis) > true_time_s + HOUR_S / 2
    finally:
        system.clocks["redis"].step(0.0)
    coordinator = system.stack.parts["coordinator"].process
    assert coordinator is not None
    mapped = Path(f"/proc/{coordinator.pid}/maps").read_text()
    assert "stepped_clock.so" in mapped
    assert "coordinator.clock" in mapped


@pytest.mark.parametrize(
    ("part", "ahead_s"),
    [
        *(("redis", ahead_s) for ahead_s in (10.0, -10.0, HOUR_S / 2, -HOUR_S / 2, -30 * HOUR_S)),
        *(("coordinator", ahead_s) for ahead_s in (HOUR_S / 2, -HOUR_S / 2, 30 * HOUR_S, -30 * HOUR_S)),
    ],
)
async def test_a_stream_is_the_same_whatever_a_clock_is_set_to(
    system: System, reference: list[int], part: str, ahead_s: float
) -> None:
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        AsyncClient(system.stack.endpoint, budgets=PATIENT) as client,  # the coordinator under a clock of its own
        long_stream(client) as stream,
    ):
        received = list((await anext(stream)).token_ids)
        system.clocks[part].step(ahead_s)
        try:
            async for chunk in stream:
                received += chunk.token_ids
        finally:
            system.clocks[part].step(0.0)
    assert received == reference


async def test_a_step_over_the_life_of_sessions_ends_streams_with_what_happened(
    system: System, reference: list[int]
) -> None:
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        AsyncClient(system.endpoint, budgets=PATIENT) as client,
        long_stream(client, "expired") as stream,
    ):
        await anext(stream)
        system.clocks["redis"].step(30 * HOUR_S)
        try:
            with pytest.raises(SessionLost, match="session expired is gone") as caught:
                await stream.result()
            with pytest.raises(NotFound):
                await client.get_session("expired")
        finally:
            system.clocks["redis"].step(0.0)
        assert caught.value.partial is not None
        received = list(caught.value.partial.token_ids)
        assert received == reference[: len(received)]
        again = await client.generate(
            prompt_token_ids=PROMPT, session_id="expired", temperature=0.0, ignore_eos=True,
            max_new_tokens=NUM_TOKENS,
        )  # fmt: skip
    assert list(again.token_ids) == reference[:NUM_TOKENS]


async def test_a_session_of_a_killed_owner_is_taken_over_though_its_lease_outlives_it_by_an_hour(
    system: System, reference: list[int]
) -> None:
    true_time_s = shown_time_s(system.redis)
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        AsyncClient(system.stack.endpoint, budgets=PATIENT) as client,
        long_stream(client, "orphan") as stream,
    ):
        await anext(stream)
        system.stack.parts["coordinator"].process.kill()
    system.clocks["redis"].step(-HOUR_S)
    try:
        assert shown_time_s(system.redis) < true_time_s
        async with (
            asyncio.timeout(2 * PATIENCE_S),
            AsyncClient(system.stack.parts["coordinator2"].address, budgets=PATIENT) as client,
            client.resume("orphan", resume_from=0) as stream,
        ):
            received = [token_id async for chunk in stream for token_id in chunk.token_ids]
    finally:
        system.clocks["redis"].step(0.0)
        system.stack.restart("coordinator")
    assert received == reference
