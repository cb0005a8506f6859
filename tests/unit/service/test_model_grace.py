"""How long a target that leaves answers the turns of its model: by open turns, other replicas and coordinators."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from specdec.contract.engine_api import EngineInfo
from specdec.rpc.open_turns import OpenTurns
from specdec.service.model_grace import ModelGrace
from specdec.state.live_coordinators import coordinator_info
from specdec.state.redis_store import open_registry
from specdec.state.store import ReplicaRecord, ReplicaRegistry

COORDINATOR = coordinator_info("c", version="1", model="m", vocabulary_fingerprint="v", num_running=0)
OWN = replace(COORDINATOR, role="target", model_fingerprint="old", incarnation="own", vocabulary_size=8)


@pytest.fixture
async def registry() -> AsyncIterator[ReplicaRegistry]:
    opened = open_registry(f"memory://{secrets.token_hex(8)}")
    yield opened
    await opened.close()


async def register(registry: ReplicaRegistry, *engines: EngineInfo) -> None:
    for number, engine in enumerate(engines):
        address = f"127.0.0.1:{5000 + number + 100 * (engine.role == 'target')}"
        await registry.publish(ReplicaRecord(address, engine), ttl_s=600.0)


async def waited_s(registry: ReplicaRegistry, turns: OpenTurns, grace_s: float = 60.0) -> float:
    began_s = time.monotonic()
    async with asyncio.timeout(60):
        await ModelGrace(registry, lambda: OWN, turns, grace_s).wait()
    return time.monotonic() - began_s


def one_turn() -> OpenTurns:
    turns = OpenTurns()
    turns.note_call("s", 3)
    return turns


async def is_waiting(registry: ReplicaRegistry, turns: OpenTurns) -> bool:
    """Return whether the wait has not ended after a second, which is several looks."""
    task = asyncio.create_task(waited_s(registry, turns))
    _, pending = await asyncio.wait([task], timeout=1.0)
    task.cancel()
    return bool(pending)


async def test_a_replica_without_open_turns_goes_at_once_where_it_is_the_only_target(registry: ReplicaRegistry) -> None:
    await register(registry, COORDINATOR, OWN)
    turns = one_turn()
    turns.end({"s": 3}, ())
    assert not await is_waiting(registry, turns)


async def test_it_stays_for_an_open_turn_until_the_turn_ends(registry: ReplicaRegistry) -> None:
    await register(registry, COORDINATOR, OWN)
    turns = one_turn()
    task = asyncio.create_task(waited_s(registry, turns))
    await asyncio.sleep(0.6)
    turns.end({"s": 2}, ())  # an earlier turn of the session
    turns.end({"s": 3}, {"s"})  # interrupted: a client may resume it
    await asyncio.sleep(0.6)
    assert not task.done()
    turns.note_call("s", 4)
    turns.end({"s": 4}, ())
    assert await task >= 1.2


async def test_it_goes_at_once_where_another_replica_serves_its_model(registry: ReplicaRegistry) -> None:
    await register(registry, COORDINATOR, OWN, replace(OWN, incarnation="new", model_fingerprint="new"))
    assert await is_waiting(registry, one_turn())
    await register(registry, COORDINATOR, replace(OWN, incarnation="draining", draining=True))
    assert await is_waiting(registry, one_turn())
    await register(registry, COORDINATOR, replace(OWN, incarnation="other"))
    assert not await is_waiting(registry, one_turn())


async def test_it_goes_at_once_where_others_together_serve_its_model_with_all_its_adapters(
    registry: ReplicaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(OWN, adapter_names=("sql", "tone"), adapter_fingerprints=("1", "2"))
    monkeypatch.setattr(f"{__name__}.OWN", own)
    sql = replace(own, replica_id="sql", incarnation="sql", adapter_names=("sql",), adapter_fingerprints=("1",))
    await register(registry, COORDINATOR, own, sql)
    assert await is_waiting(registry, one_turn())
    tone = replace(own, replica_id="tone", incarnation="tone", adapter_names=("tone",), adapter_fingerprints=("2",))
    await register(registry, COORDINATOR, own, sql, tone)
    assert not await is_waiting(registry, one_turn())


async def test_it_stays_until_coordinators_know_where_they_may_choose_another_model(registry: ReplicaRegistry) -> None:
    await register(registry, COORDINATOR, OWN, replace(OWN, incarnation="new", model_fingerprint="new"))
    assert await waited_s(registry, OpenTurns()) >= 2.0


async def test_without_a_coordinator_only_a_turn_that_runs_keeps_it(registry: ReplicaRegistry) -> None:
    await register(registry, OWN)
    turns = one_turn()
    assert await is_waiting(registry, turns)
    turns.end({"s": 3}, {"s"})
    assert not await is_waiting(registry, turns)


async def test_the_grace_time_is_the_longest_wait(registry: ReplicaRegistry) -> None:
    await register(registry, COORDINATOR, OWN)
    assert await waited_s(registry, one_turn(), grace_s=0.3) >= 0.3


def test_the_oldest_turns_are_forgotten_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.rpc.open_turns.MAX_TURNS", 2)
    turns = OpenTurns()
    for session_id in ("a", "b", "c"):
        turns.note_call(session_id, 1)
    assert turns.num_open(60.0) == 2
    turns.end({"a": 1}, ())
    assert turns.num_open(60.0) == 2
    turns.forget(["b", "c"])
    assert turns.num_open(60.0) == 0
