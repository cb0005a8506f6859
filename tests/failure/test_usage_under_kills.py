"""Usage records while coordinators are killed in the middle of turns: each turn is billed once, with its tokens."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from specdec.client import AsyncClient, AsyncStream, Budgets
from specdec.contract.errors import NotFound, SpecdecError
from specdec.state.usage_records import BROKEN, UsageRecord, UsageRecords, open_usage
from tests.support.process_rig import PROMPT, models
from tests.support.redis_fixture import RedisServer, redis_server
from tests.support.stack import Stack

__all__ = ["models", "redis_server"]

SESSION_TTL_S = 20
NUM_COORDINATORS = 4
NUM_CLIENTS = 6
MAX_LEFT_TOKENS = 150
#: Of a client between two sessions: coordinators that start need the processors.
PAUSE_S = 0.3


@pytest.fixture(scope="module")
def stack(models: tuple[Path, Path], redis_server: RedisServer) -> Iterator[Stack]:
    arguments = ["--lease-ttl-s", "2", "--session-ttl-s", str(SESSION_TTL_S), "--draft-timeout-s", "20"]
    url = redis_server.url
    with Stack(*models, redis_url=url, num_coordinators=NUM_COORDINATORS, coordinator_arguments=arguments) as stack:
        yield stack


@dataclass
class Bills:
    """Counts that clients got, by session and request: prompt, cached, output, drafted and accepted tokens."""

    told: dict[tuple[str, str], tuple[int | None, ...]] = field(default_factory=dict)
    broken: set[tuple[str, str]] = field(default_factory=set)
    num_asked_again: int = 0
    ended: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released by each turn that ends."""


@pytest.mark.timeout(900)
async def test_a_dozen_kills_leave_each_turn_with_one_exact_record(stack: Stack) -> None:
    await _check_kills(stack, 12)


@pytest.mark.full
@pytest.mark.timeout(5400)
async def test_hundreds_of_kills_leave_each_turn_with_one_exact_record(stack: Stack) -> None:
    await _check_kills(stack, 300)


async def _check_kills(stack: Stack, num_kills: int) -> None:
    addresses = ",".join(part.address for part in stack.parts.values() if part.module == "coordinator")
    bills, is_over = Bills(), asyncio.Event()
    usage = open_usage(_redis_url(stack))
    since_ms = await usage.server_ms()
    async with AsyncClient(f"ipv4:{addresses}", budgets=Budgets(connect_s=60.0, resume_s=60.0)) as client:
        clients = [
            asyncio.create_task(_run_turns(client, number, bills, is_over, random.Random(number)))
            for number in range(NUM_CLIENTS)
        ]
        await _kill(stack, num_kills, bills, random.Random(1))
        is_over.set()
        await asyncio.gather(*clients)
    records = await _all_records(usage, since_ms, bills)
    await usage.close()
    found = Counter((record.session, record.request) for record in records)
    num_wrong = sum(bills.told.get((record.session, record.request)) != _counts(record) for record in records)
    outcomes = Counter(record.outcome for record in records)
    print(
        f"{num_kills} kills, {len(bills.told)} turns, {len(bills.broken)} left, {bills.num_asked_again} "
        f"asked again; billed twice {sum(count > 1 for count in found.values())}, not at all "
        f"{len(bills.told.keys() - found.keys())}, tokens off {num_wrong}"
    )
    assert len(bills.told) >= num_kills
    assert found == Counter(dict.fromkeys(bills.told, 1))
    assert num_wrong == 0
    assert outcomes == Counter({"length": len(bills.told) - len(bills.broken), BROKEN: len(bills.broken)})


async def _kill(stack: Stack, num_kills: int, bills: Bills, chance: random.Random) -> None:
    """Kill coordinators one after another, in the middle of turns, and start them again beside the next kills.

    Each kill follows the end of a further turn, so that there are as many turns as kills however slow the machine is.
    """
    names = [name for name, part in stack.parts.items() if part.module == "coordinator"]
    starting: dict[str, asyncio.Task[None]] = {}
    for number, name in enumerate(itertools.islice(itertools.cycle(names), num_kills)):
        for started in [starting.pop(each) for each in (name, names[number % len(names) - 2]) if each in starting]:
            await started
        await bills.ended.acquire()
        await asyncio.sleep(chance.uniform(0.0, 0.1))
        await asyncio.to_thread(stack.kill, name)
        starting[name] = asyncio.create_task(asyncio.to_thread(stack.restart, name))
    for started in starting.values():
        await started


async def _run_turns(
    client: AsyncClient, number: int, bills: Bills, is_over: asyncio.Event, chance: random.Random
) -> None:
    """Run sessions of two turns until the kills are over. Every fourth session is left in its first turn."""
    for index in itertools.count():
        if is_over.is_set():
            return
        await asyncio.sleep(PAUSE_S)
        session_id = f"u{number}-{index}"
        if index % 4 == 1:
            await _leave(client, session_id, bills, chance)
            continue
        num_held = 0
        for turn in range(2):
            num_held = await _finish(client, session_id, f"r{turn}", num_held, bills, chance)


async def _finish(
    client: AsyncClient, session_id: str, request_id: str, num_held: int, bills: Bills, chance: random.Random
) -> int:
    """Run a turn to its end; return the number of tokens that the session then holds."""
    num_new = chance.randrange(40, 120)
    while True:
        try:
            async with _stream(client, session_id, request_id, num_new, num_held) as stream:
                done = await stream.result()
            break
        except SpecdecError:  # the client has tried for long enough; the same request goes on
            bills.num_asked_again += 1
    stats, used = done.stats, done.usage
    counts = (used.num_prompt_tokens, used.num_cached_prompt_tokens, used.num_output_tokens)
    bills.told[session_id, request_id] = (*counts, stats.num_draft_tokens, stats.num_accepted_tokens)
    bills.ended.release()
    return used.num_prompt_tokens + used.num_output_tokens


async def _leave(client: AsyncClient, session_id: str, bills: Bills, chance: random.Random) -> None:
    """Leave a turn after some tokens, and note what the log holds of it."""
    num_read, num_wanted = 0, chance.randrange(1, 30)
    async with _stream(client, session_id, "left", MAX_LEFT_TOKENS, 0) as stream:
        with suppress(SpecdecError):
            async for chunk in stream:
                num_read += len(chunk.token_ids)
                if num_read >= num_wanted:
                    break
    while True:
        try:
            session = await client.get_session(session_id)
        except NotFound:
            raise  # it expired before it could be seen
        except SpecdecError:
            continue
        if session.status == "idle":
            break
        await asyncio.sleep(0.1)
    stats, num_output = session.stats, session.num_tokens - len(PROMPT)
    counts = (len(PROMPT), None, num_output, stats.num_draft_tokens, stats.num_accepted_tokens)
    bills.told[session_id, "left"] = counts
    bills.ended.release()
    if num_output < MAX_LEFT_TOKENS:  # else the coordinator was faster than the client's cancellation
        bills.broken.add((session_id, "left"))


def _stream(client: AsyncClient, session_id: str, request_id: str, num_new: int, num_held: int) -> AsyncStream:
    return client.generate(
        prompt_token_ids=PROMPT,
        stream=True,
        session_id=session_id,
        request_id=request_id,
        expected_session_tokens=num_held,
        temperature=0.0,
        ignore_eos=True,
        max_new_tokens=num_new,
        gamma=1 + num_new % 3,
    )


async def _all_records(usage: UsageRecords, since_ms: int, bills: Bills) -> list[UsageRecord]:
    """Return the records once every turn has one, or no session of a turn that was left can still live."""
    deadline = asyncio.get_running_loop().time() + 6 * SESSION_TTL_S
    while True:
        records = [record async for record in usage.read(since_ms, 1 << 45)]
        if len(records) >= len(bills.told) or asyncio.get_running_loop().time() > deadline:
            return records
        await asyncio.sleep(0.5)


def _counts(record: UsageRecord) -> tuple[int | None, ...]:
    cached = None if record.request == "left" else record.cached_tokens
    return record.prompt_tokens, cached, record.output_tokens, record.draft_tokens, record.accepted_tokens


def _redis_url(stack: Stack) -> str:
    arguments = stack.parts["coordinator"].arguments
    return arguments[arguments.index("--redis-url") + 1]
