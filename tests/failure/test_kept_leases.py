"""A busy coordinator keeps its short leases; one that hangs or dies loses them."""

from __future__ import annotations

import asyncio
import time

from coordinator.generation.session_leases import LeaseKeeper
from tests.support.coordinator_rig import PROMPT, Rig, eventually, request
from tests.support.output import read_rest, read_until
from tests.support.store_sessions import forget_session

TTL_S = 1.0


def hang(seconds: float) -> None:
    """Block the event loop, and keep the interpreter busy as well."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


async def owner_of(rig: Rig, session_id: str) -> str:
    record = await rig.store.load(session_id)
    assert record is not None
    return record.owner


async def test_a_generation_survives_an_event_loop_that_blocks_for_several_lease_times() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator(lease_ttl_s=TTL_S)
        stream = coordinator.stub.Generate(request(max_new_tokens=200))
        output = await read_until(stream, 10)
        hang(3 * TTL_S)
        await read_rest(stream, output)
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 200)


async def test_leases_of_a_hung_event_loop_expire_and_those_of_a_live_one_are_kept() -> None:
    async with Rig() as rig:
        lease = await rig.store.acquire("s", owner="us", ttl_s=TTL_S, create=True)
        keeper = LeaseKeeper(rig.store, loop_timeout_s=TTL_S)
        keeper.keep(lease)
        await asyncio.sleep(2 * TTL_S)
        assert await owner_of(rig, "s") == "us"
        hang(4 * TTL_S)
        assert await owner_of(rig, "s") == ""
        await keeper.close()


async def test_a_dropped_lease_is_not_renewed_but_its_successor_is() -> None:
    async with Rig() as rig:
        keeper = LeaseKeeper(rig.store)
        first = await rig.store.acquire("s", owner="first", ttl_s=TTL_S, create=True)
        keeper.keep(first)
        await rig.store.release(first)
        second = await rig.store.acquire("s", owner="second", ttl_s=TTL_S, create=False)
        keeper.keep(second)
        keeper.drop(first)
        await asyncio.sleep(3 * TTL_S)
        assert await owner_of(rig, "s") == "second"
        keeper.drop(second)
        await asyncio.sleep(2 * TTL_S)
        assert await owner_of(rig, "s") == ""
        await keeper.close()


async def test_a_lease_that_another_owner_has_taken_is_no_longer_renewed() -> None:
    async with Rig() as rig:
        keeper = LeaseKeeper(rig.store)
        lost = await rig.store.acquire("s", owner="lost", ttl_s=TTL_S, create=True)
        keeper.keep(lost)
        await forget_session(rig.store._connection, "s")
        await rig.store.acquire("s", owner="thief", ttl_s=TTL_S, create=True)
        await eventually(lambda: keeper.num_kept == 0)
        assert await owner_of(rig, "s") in ("thief", "")
        await keeper.close()
