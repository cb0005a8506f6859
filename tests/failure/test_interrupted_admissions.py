"""Requests that are interrupted during their admission, and the effect of an admission on other requests."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.generation import generation_service
from specdec.state.store import Lease, RequestRecord
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Rig, eventually, request
from tests.support.interrupted_store import InterruptedStore, coordinator_on, reason_of
from tests.support.output import read_rest, read_until
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]


class Gate:
    """A point at which a call of a store waits until a test opens it."""

    def __init__(self) -> None:
        self.reached, self._opened = asyncio.Event(), asyncio.Event()

    async def wait(self, *_: Any) -> None:
        self.reached.set()
        await self._opened.wait()

    def open(self) -> None:
        self._opened.set()


async def test_requests_under_admission_count_towards_the_limit_on_running_requests() -> None:
    async with asyncio.timeout(20), Rig(drafts=0) as rig:
        gate = Gate()
        coordinator = await coordinator_on(rig, InterruptedStore(rig.store, "acquire", before=gate.wait), max_queue=1)
        first = asyncio.create_task(coordinator.generate(request(session_id="a")))
        await gate.reached.wait()
        assert await reason_of(coordinator, request(session_id="b")) == "QUEUE_FULL"
        gate.open()
        await first


async def test_a_session_deleted_during_the_admission_of_its_request_stays_deleted() -> None:
    async with asyncio.timeout(20), Rig(drafts=0) as rig:
        deletions = []

        async def delete(*_: Any) -> None:
            deletion = coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id="s"), timeout=10)
            deletions.append(asyncio.ensure_future(deletion))
            await asyncio.sleep(0.3)

        coordinator = await coordinator_on(rig, InterruptedStore(rig.store, "acquire", before=delete))
        with contextlib.suppress(grpc.aio.AioRpcError):  # the request may also finish first, and is deleted then
            await coordinator.generate(request(session_id="s", max_new_tokens=300))
        await deletions[0]
        await eventually(lambda: coordinator.generations.num_running == 0)
        assert await rig.store.load("s") is None


async def test_the_next_turn_waits_for_a_turn_that_ends_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_service, "LEAVING_GRACE_S", 15.0)  # also a slow machine makes 16 tokens in that time
    async with asyncio.timeout(20), Rig(drafts=0) as rig:
        coordinator = await rig.coordinator()
        stream = coordinator.stub.Generate(request(session_id="s", request_id="a", max_new_tokens=16))
        await read_until(stream, 1)
        rig.target.worker.gate.clear()
        following = request([9], session_id="s", request_id="b", max_new_tokens=4)
        second = asyncio.create_task(coordinator.generate(following))
        await asyncio.sleep(0.05)
        rig.target.worker.gate.set()
        assert len((await second).token_ids) == 4


async def test_the_next_turn_waits_for_the_clean_up_of_an_abandoned_turn() -> None:
    async with asyncio.timeout(20), Rig(drafts=0) as rig:
        gate, store = Gate(), InterruptedStore(rig.store, "nothing")
        coordinator = await coordinator_on(rig, store)
        stream = coordinator.stub.Generate(request(session_id="s", request_id="a", max_new_tokens=400))
        await read_until(stream, 3)
        store.interrupt_next("release", gate.wait)
        stream.cancel()
        await gate.reached.wait()
        following = request([9], session_id="s", request_id="b", max_new_tokens=4)
        second = asyncio.create_task(coordinator.generate(following))
        await asyncio.sleep(0.5)
        gate.open()
        assert len((await second).token_ids) == 4


async def test_readers_and_deletions_are_not_delayed_by_turns_that_wait_for_the_session() -> None:
    """Each of 400 turns waits a quarter of a second: all at the same time, or the test times out."""
    async with asyncio.timeout(60), Rig(drafts=0) as rig:
        coordinator = await rig.coordinator()
        run = coordinator.stub.Generate(request(session_id="s", request_id="a", max_new_tokens=400, ignore_eos=True))
        await read_until(run, 1)
        rig.target.worker.gate.clear()
        others = [
            asyncio.create_task(reason_of(coordinator, request(session_id="s", request_id=f"b{index}")))
            for index in range(400)
        ]
        await asyncio.sleep(0.1)
        resumed = coordinator.stub.Generate(pb.GenerateRequest(session_id="s", request_id="a", resume_from=1))
        await resumed.read()
        assert set(await asyncio.gather(*others)) == {"SESSION_BUSY"}
        rig.target.worker.gate.set()
        run.cancel()
        resumed.cancel()


async def test_a_lease_taken_for_a_request_that_has_finished_meanwhile_is_released() -> None:
    async with asyncio.timeout(30), Rig(drafts=0) as rig:
        first = await rig.coordinator()
        stream = first.stub.Generate(request(session_id="s", request_id="r", max_new_tokens=30))
        held = await read_until(stream, 3)

        async def end(*_: Any) -> None:
            await read_rest(stream, held)
            await eventually(lambda: first.generations.num_running == 0)

        second = await coordinator_on(rig, InterruptedStore(rig.store, "acquire", before=end), lease_ttl_s=5.0)
        rest = await second.generate(request(None, session_id="s", resume_from=1))
        assert rest.token_ids == held.token_ids[1:]
        record = await rig.store.load("s")
        assert record is not None
        assert record.owner == ""


async def test_a_client_that_disconnects_while_its_prompt_is_written_leaves_no_lease() -> None:
    async with asyncio.timeout(30), Rig(drafts=0) as rig:
        gate = Gate()
        coordinator = await coordinator_on(rig, InterruptedStore(rig.store, "begin_request", before=gate.wait))
        stream = coordinator.stub.Generate(request(session_id="s"))
        await gate.reached.wait()
        stream.cancel()
        await asyncio.sleep(0.3)
        gate.open()
        await asyncio.sleep(0.3)
        record = await rig.store.load("s")
        assert record is None or record.owner == ""


async def test_a_drain_ends_after_all_leases_are_released() -> None:
    async with asyncio.timeout(30), Rig(drafts=0) as rig:

        async def wait(*_: Any) -> None:
            await asyncio.sleep(0.5)

        store = InterruptedStore(rig.store, "release", before=wait)
        coordinator = await coordinator_on(rig, store)
        await read_until(coordinator.stub.Generate(request(session_id="s", max_new_tokens=400)), 3)
        await coordinator.generations.drain(0.0)
        record = await rig.store.load("s")
        assert record is not None
        assert record.owner == ""


async def test_a_replay_does_not_show_the_prompt_that_another_coordinator_is_writing() -> None:
    """A coordinator that takes a session first raises its epoch, and then writes the next turn's prompt."""
    async with asyncio.timeout(30), Rig(drafts=0) as rig:
        made = await (await rig.coordinator()).generate(request(session_id="s", request_id="r1", max_new_tokens=6))
        leases: list[Lease] = []

        async def take(*_: Any) -> None:
            leases.append(await rig.store.acquire("s", owner="another", ttl_s=5.0, create=False))
            store.interrupt_next("read_tokens", begin)

        async def begin(*_: Any) -> None:
            record = await rig.store.load("s")
            assert record is not None
            assert record.request is not None
            asked = RequestRecord("r2", "digest", record.request.parameters_json, 1, output_start=len(PROMPT) + 10)
            keep = len(PROMPT) + 2  # a conversation that was edited after its first output tokens
            await rig.store.begin_request(leases[0], asked, keep=keep, token_ids=np.full(8, 9, np.uint32))

        async def look_again(*_: Any) -> None:
            store.interrupt_next("load", take)

        store = InterruptedStore(rig.store, "load", before=look_again)
        late = await coordinator_on(rig, store)
        assert len(made.token_ids) == 6
        assert await reason_of(late, request(session_id="s", request_id="r1", max_new_tokens=6)) == "SESSION_LOST"
        assert len(leases) == 1
