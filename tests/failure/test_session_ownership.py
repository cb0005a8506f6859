"""Ownership of a session when two coordinators, a drain or a disconnecting client interrupt an admission or an end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from specdec.contract.tenant import DEFAULT_TENANT, SessionKey
from specdec.state.store import Commit, Lease, RequestRecord
from tests.support.coordinator_rig import PROMPT, Rig, eventually, request
from tests.support.interrupted_store import InterruptedStore, coordinator_on, keys_of, reason_of
from tests.support.output import read_rest, read_until


async def test_a_coordinator_that_comes_second_leaves_the_session_that_another_created() -> None:
    async with Rig() as rig:
        quick = await rig.coordinator()
        made = []

        async def another_runs_it_to_its_end(*_: object) -> None:
            made.append(await quick.generate(request(session_id="s", max_new_tokens=6)))

        slow = await coordinator_on(rig, InterruptedStore(rig.store, "acquire", before=another_runs_it_to_its_end))
        assert await reason_of(slow, request(session_id="s", max_new_tokens=6)) == "SESSION_BUSY"
        assert (await rig.store.read_tokens("s")).tolist() == [*PROMPT, *made[0].token_ids]
        replayed = await quick.generate(request(None, session_id="s", resume_from=0))
        assert replayed.token_ids == made[0].token_ids


async def test_a_session_replaced_by_one_of_the_same_length_is_noticed() -> None:
    async with Rig() as rig:
        first = await rig.coordinator()
        await first.generate(request(session_id="s", max_new_tokens=6))
        changed = np.full(len(PROMPT) + 6, 9, np.uint32)

        async def another_rewrites_it(*_: object) -> None:
            lease = await rig.store.acquire("s", owner="another", ttl_s=5.0, create=False)
            asked = RequestRecord("r", "digest", "{}", turn=1, output_start=len(changed))
            await rig.store.begin_request(lease, asked, keep=0, token_ids=changed)
            await rig.store.release(lease)

        slow = await coordinator_on(rig, InterruptedStore(rig.store, "acquire", before=another_rewrites_it))
        assert await reason_of(slow, request(session_id="s", max_new_tokens=6)) == "SESSION_BUSY"
        assert (await rig.store.read_tokens("s")).tolist() == changed.tolist()


async def test_a_new_session_taken_over_by_another_coordinator_is_not_deleted_by_its_first_owner() -> None:
    async with Rig() as rig:
        takers = []

        async def another_takes_over(commits: Sequence[tuple[Lease, Commit]]) -> None:
            ((lease, _),) = commits
            await rig.store.release(lease)
            takers.append(await rig.store.acquire("s", owner="another", ttl_s=5.0, create=False))

        stalled = await coordinator_on(rig, InterruptedStore(rig.store, "commit_all", before=another_takes_over))
        assert await reason_of(stalled, request(session_id="s")) == "LEASE_LOST"
        record = await rig.store.load("s")
        assert record is not None
        assert (record.owner, record.epoch, record.num_tokens) == ("another", takers[0].epoch, len(PROMPT))


async def test_a_client_that_disconnects_while_the_lease_is_taken_leaves_no_lease_and_no_session() -> None:
    async with Rig() as rig:
        taken, gate = asyncio.Event(), asyncio.Event()

        async def late_answer() -> None:
            taken.set()
            await gate.wait()

        coordinator = await coordinator_on(rig, InterruptedStore(rig.store, "acquire", after=late_answer))
        stream = coordinator.stub.Generate(request(session_id="s"))
        await taken.wait()
        assert await keys_of(rig)
        stream.cancel()
        # Waits until the server has noticed. A client that leaves later leaves a session that can be resumed.
        await eventually(lambda: any("_give_back" in str(task.get_coro()) for task in asyncio.all_tasks()))
        gate.set()
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if not await keys_of(rig):
                break
        assert await keys_of(rig) == []
        assert (await coordinator.generate(request(session_id="s"))).finished is not None


async def test_an_admission_that_a_drain_overtakes_is_refused_and_leaves_no_state() -> None:
    async with Rig() as rig:

        async def drain(*_: object) -> None:
            await coordinator.generations.drain(0.0)

        coordinator = await coordinator_on(rig, InterruptedStore(rig.store, "begin_request", before=drain))
        assert await reason_of(coordinator, request(session_id="s")) == "DRAINING"
        assert coordinator.generations.num_running == 0
        assert await keys_of(rig) == []


async def test_readers_get_the_end_of_a_request_whose_session_is_deleted_as_it_ends() -> None:
    async with Rig() as rig:
        ending, gate = asyncio.Event(), asyncio.Event()

        async def wait(*_: object) -> None:
            ending.set()
            await gate.wait()

        coordinator = await coordinator_on(rig, InterruptedStore(rig.store, "release", before=wait))
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=12))
        output = await read_until(stream, 12)
        await ending.wait()
        deletion = asyncio.ensure_future(coordinator.generations.delete(SessionKey(DEFAULT_TENANT, "s")))
        await asyncio.sleep(0)
        gate.set()
        async with asyncio.timeout(10):
            await read_rest(stream, output)
            await deletion
        assert output.finished is not None
        await eventually(lambda: coordinator.generations.num_running == 0)
        assert await keys_of(rig) == []
