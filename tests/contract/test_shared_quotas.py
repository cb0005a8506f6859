"""Limits that several processes count together: no process grants what another one has used."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from specdec.contract.errors import Unavailable
from specdec.state.connection import RedisConnection
from specdec.state.shared_quotas import QuotaLimits, QuotaOwner, Refusal, SharedQuotas

LEASE_TTL_S = 30.0
OWNER = QuotaOwner("acme")


@dataclass
class Process:
    """One process with its streams."""

    quotas: SharedQuotas
    limits: QuotaLimits
    streams: list[object] = field(default_factory=list)

    async def take(self, *, is_resumption: bool = False) -> Refusal | None:
        """Ask for a request; a granted one is a stream until `end`."""
        refusal = await self.quotas.take(OWNER, self.limits, lambda: len(self.streams), is_resumption=is_resumption)
        if refusal is None:
            self.streams.append(object())
            self.quotas.entered(OWNER)
        return refusal

    async def take_many(self, number: int) -> int:
        """Ask for requests at once; return how many were granted."""
        return (await asyncio.gather(*(self.take() for _ in range(number)))).count(None)

    def end(self) -> None:
        self.streams.pop()
        self.quotas.note_end(OWNER)


class LosesAnswers(RedisConnection):
    """A connection that breaks after the store has run what it was sent, while `loses` is set."""

    loses = False

    async def run_scripts(self, name: str, calls: Any) -> list[Any]:
        answers = await super().run_scripts(name, calls)
        return [Unavailable("the connection broke")] * len(answers) if self.loses else answers


class Processes:
    """Processes that share a Redis."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connections: list[RedisConnection] = []
        self._running: list[Process] = []
        self.cluster = f"c{uuid.uuid4().hex[:20]}"

    def add(
        self,
        *,
        streams: int | None = None,
        requests: int | None = None,
        tokens: int | None = None,
        lease_ttl_s: float = LEASE_TTL_S,
    ) -> Process:
        connection = RedisConnection(self._url)
        self._connections.append(connection)
        quotas = SharedQuotas(connection, uuid.uuid4().hex, lease_ttl_s=lease_ttl_s, cluster=self.cluster)
        process = Process(quotas, QuotaLimits(streams, requests, tokens))
        self._running.append(process)
        return process

    @property
    def key(self) -> str:
        return f"specdec@{self.cluster}:acme:quota"

    async def pass_time(self, seconds: float) -> None:
        """Let the refill of the allowances believe that this time has passed."""
        counted = int(await self._connections[0].run_command("HGET", self.key, "counted_ms"))
        await self._connections[0].run_command("HSET", self.key, "counted_ms", counted - round(seconds * 1000))

    async def kill(self, process: Process) -> None:
        """End a process without a last report."""
        self._running.remove(process)
        if process.quotas._reporting is not None:
            process.quotas._reporting.cancel()

    async def close(self) -> None:
        for process in self._running:
            await process.quotas.close()
        for connection in self._connections:
            await connection.close()


@pytest.fixture
async def processes(store_url: str) -> AsyncIterator[Processes]:
    processes = Processes(store_url)
    yield processes
    await processes.close()


async def granted_eventually(process: Process) -> None:
    async with asyncio.timeout(20):
        while await process.take() is not None:
            pass


async def test_three_processes_grant_as_many_requests_a_minute_as_one(processes: Processes) -> None:
    began_s = time.monotonic()
    three = [processes.add(requests=60) for _ in range(3)]
    granted = await asyncio.gather(*(process.take_many(40) for process in three))
    num_refilled = math.ceil(time.monotonic() - began_s)  # one a second
    assert 60 <= sum(granted) <= 60 + num_refilled


async def test_requests_a_minute_refill_evenly_and_a_refusal_says_when(processes: Processes) -> None:
    one, other = processes.add(requests=2), processes.add(requests=2)
    assert await one.take() is None
    assert await other.take() is None
    refusal = await one.take()
    assert refusal is not None
    assert refusal.limit == "requests"
    assert 0 < refusal.retry_after_s <= 30
    await processes.pass_time(30)
    assert await other.take() is None
    assert await one.take() is not None
    other.quotas.give_back(OWNER)  # the request found no slot
    await granted_eventually(one)


async def test_streams_of_all_processes_count_and_an_ended_one_is_free_at_once(processes: Processes) -> None:
    one, other = processes.add(streams=3), processes.add(streams=3)
    assert await one.take_many(5) == 3
    refusal = await other.take()
    assert refusal == Refusal("streams", 1.0)
    assert other.quotas.num_others(OWNER) == 3
    one.end()
    assert await other.take() is None  # it waits a moment for the report of the end
    assert await one.take() is not None


async def test_the_streams_of_a_process_that_died_are_free_once_its_lease_has_expired(processes: Processes) -> None:
    dying, other = processes.add(streams=2, lease_ttl_s=1.5), processes.add(streams=2, lease_ttl_s=1.5)
    assert await dying.take_many(2) == 2
    assert await other.take() is not None
    await asyncio.sleep(1.8)
    assert await other.take() is not None  # a living process keeps its lease
    await processes.kill(dying)
    assert await other.take(is_resumption=True) is None  # it waits for the lease
    assert await other.take() is None
    assert await other.take() is not None


async def test_a_resumption_needs_a_stream_and_no_request_of_the_minute(processes: Processes) -> None:
    one = processes.add(streams=2, requests=1, tokens=10)
    assert await one.take() is None
    one.quotas.count_tokens(OWNER, 100)
    assert await one.take() is not None
    assert await one.take(is_resumption=True) is None
    assert await one.take(is_resumption=True) == Refusal("streams", 1.0)


async def test_tokens_that_one_process_used_are_missing_in_the_others(processes: Processes) -> None:
    one, other = processes.add(tokens=600), processes.add(tokens=600)
    assert await one.take() is None
    one.quotas.count_tokens(OWNER, 1199)  # one long stream
    one.end()
    refusal = None
    async with asyncio.timeout(10):
        while refusal is None:
            refusal = await other.take()
    assert refusal.limit == "tokens"
    assert 55 < refusal.retry_after_s <= 60
    await processes.pass_time(61)
    assert await other.take() is None


async def test_tokens_held_in_advance_count_as_used_and_end_with_the_lease(processes: Processes) -> None:
    limits = {"tokens": 100, "lease_ttl_s": 1.0}
    one, other = processes.add(**limits), processes.add(**limits)  # type: ignore[arg-type]
    assert await one.take() is None
    one.quotas.count_tokens(OWNER, 99)
    await granted_eventually(one)  # reports them, and holds the last one
    refusal = await other.take()
    assert refusal is not None
    assert refusal.limit == "tokens"
    await processes.kill(one)
    await granted_eventually(other)


async def test_tokens_are_reported_in_the_background_and_seldom(processes: Processes) -> None:
    one = processes.add(tokens=1_000_000)
    assert await one.take() is None
    before = next(one.quotas._numbers)
    for _ in range(1000):
        one.quotas.count_tokens(OWNER, 1)
        await asyncio.sleep(0)
    assert next(one.quotas._numbers) - before <= 1 + 2  # 1 % of the limit is held in advance


async def test_an_answer_that_was_lost_is_given_again(processes: Processes, store_url: str) -> None:
    raw = RedisConnection(store_url)
    args: list[str | int] = ["p", 7, 30_000, 0, 2, 1, 0, 50, 2, 10, 1000]
    first = await raw.run_script("use_quota", [processes.key], args)
    assert first == await raw.run_script("use_quota", [processes.key], args)
    assert first[:2] == [1, 1]
    assert float(await raw.run_command("HGET", processes.key, "tokens")) == 50
    await raw.close()


async def test_a_call_whose_answer_was_lost_is_counted_once(processes: Processes, store_url: str) -> None:
    connection = LosesAnswers(store_url)
    quotas = SharedQuotas(connection, "p", lease_ttl_s=LEASE_TTL_S, cluster=processes.cluster)
    one, other = Process(quotas, QuotaLimits(None, 2, 600_000)), processes.add(requests=2, tokens=600_000)
    assert await one.take() is None
    quotas.count_tokens(OWNER, 100_000)
    connection.loses = True
    with pytest.raises(Unavailable):
        await one.take()
    connection.loses = False
    assert await one.take() is None  # the lost request was given back
    assert await other.take() is not None
    assert 99_000 < float(await connection.run_command("HGET", processes.key, "tokens")) <= 100_000
    await quotas.close()
    await connection.close()


async def test_a_tenant_that_floods_does_not_delay_the_reports_of_others(processes: Processes) -> None:
    one, other = processes.add(requests=600), processes.add()

    async def flood() -> None:
        while True:
            if await one.take() is None:
                one.end()

    floods = []
    for _ in range(3):  # some of them wait at any time
        floods.append(asyncio.create_task(flood()))
        await asyncio.sleep(0.0005)
    await asyncio.sleep(0.1)
    beta, limits = QuotaOwner("beta"), QuotaLimits(None, None, 600)
    assert await one.quotas.take(beta, limits, lambda: 0) is None
    one.quotas.entered(beta)
    one.quotas.count_tokens(beta, 1200)
    async with asyncio.timeout(20):
        while await other.quotas.take(beta, limits, lambda: 0) is None:
            other.quotas.entered(beta)
            await asyncio.sleep(0.05)
    for task in floods:
        task.cancel()
    await asyncio.wait(floods)


async def test_a_short_lease_does_not_end_a_longer_one(processes: Processes) -> None:
    long, short = processes.add(streams=2, lease_ttl_s=30.0), processes.add(streams=2, lease_ttl_s=3.0)
    assert await long.take_many(2) == 2
    assert await short.take() == Refusal("streams", 1.0)


async def test_without_the_store_a_request_is_refused_as_unavailable() -> None:
    connection = RedisConnection("redis://127.0.0.1:1")
    process = Process(SharedQuotas(connection, "p", lease_ttl_s=1.0), QuotaLimits(1, 1, 1))
    with pytest.raises(Unavailable):
        await process.take()
    await process.quotas.close()
    await connection.close()


async def test_a_cancelled_request_is_given_back(processes: Processes) -> None:
    one = processes.add(streams=1, requests=1)
    taking = asyncio.create_task(one.take())
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait([taking])
    await granted_eventually(one)
