"""Admission as clients see it: requests wait for a slot, or are refused before their first token; limits of tenants."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from coordinator.generation.readers import MAX_READERS
from specdec.access.grants import Limits
from specdec.contract.errors import SpecdecError
from specdec.contract.tenant import TENANT_KEY
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, request
from tests.support.output import Output, read_rest, read_until
from tests.support.raw_http2 import literal, unread_call
from tests.support.scraping import served
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]


@asynccontextmanager
async def limited(**settings: Any) -> AsyncIterator[tuple[Rig, Coordinator]]:
    """A coordinator with these settings and a target alone."""
    async with asyncio.timeout(120), Rig(drafts=0) as rig:
        yield rig, await rig.coordinator(**settings)


async def refusal(call: Any) -> SpecdecError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


async def turn(coordinator: Coordinator, asked: pb.GenerateRequest, tenant: str) -> Output:
    output = Output()
    async for response in coordinator.stub.Generate(asked, metadata=((TENANT_KEY, tenant),)):
        output.add(response)
    return output


async def num_waiting(coordinator: Coordinator, count: int) -> None:
    await eventually(lambda: coordinator.generations.admission.queue_state.num_waiting == count)


async def held_slot(rig: Rig, coordinator: Coordinator) -> tuple[Any, Output]:
    """Return a stream that holds a slot, with its output so far; the target stands still."""
    stream = coordinator.stub.Generate(request(session_id="held", max_new_tokens=40))
    output = await read_until(stream, 1)
    rig.target.worker.gate.clear()
    return stream, output


async def test_requests_beyond_the_slots_wait_by_priority_and_all_get_their_tokens() -> None:
    async with limited(max_running=1) as (rig, coordinator):
        stream, output = await held_slot(rig, coordinator)
        tasks = []
        for priority in (3, 1, 2):
            asked = request(session_id=f"s{priority}", max_new_tokens=6)
            asked.priority = priority
            tasks.append(asyncio.create_task(coordinator.generate(asked)))
            await num_waiting(coordinator, len(tasks))
        with served(coordinator.metrics.registry) as endpoint:
            page = await endpoint.scrape()
        assert (page.value("num_requests_queued"), page.value("request_slots")) == (3, 1)
        assert page.value("num_requests_running") == 1
        rig.target.worker.gate.set()
        await read_rest(stream, output)
        expected = rig.target.worker.greedy_continuation(PROMPT, 6)
        assert [made.token_ids for made in await asyncio.gather(*tasks)] == [expected] * 3
        records = [await rig.store.load(f"s{priority}") for priority in (1, 2, 3)]
        epochs = [record.epoch for record in records if record is not None]
        assert epochs == sorted(epochs)  # an epoch is the time at which a session was leased


async def test_a_request_whose_deadline_comes_while_it_waits_never_starts() -> None:
    async with limited(max_running=1) as (rig, coordinator):
        stream, output = await held_slot(rig, coordinator)
        late = coordinator.stub.Generate(request(session_id="late"), timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await late.read()
        assert ended.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
        await num_waiting(coordinator, 0)
        rig.target.worker.gate.set()
        await read_rest(stream, output)
        assert await rig.store.load("late") is None


async def test_a_request_that_would_miss_its_deadline_is_refused_at_once_with_a_time_to_retry() -> None:
    async with limited(max_running=1) as (rig, coordinator):
        await coordinator.generate(request(max_new_tokens=24))  # the speed is known from now on
        stream, output = await held_slot(rig, coordinator)
        speeds = coordinator.generations.admission._slots._speeds
        speeds.note_end(100, running_s=3000.0)  # as if requests took minutes
        error = await refusal(coordinator.stub.Generate(request(), timeout=60.0).read())
        assert (error.reason, error.code) == ("QUEUE_FULL", "RESOURCE_EXHAUSTED")
        assert error.retry_after_s is not None
        assert error.retry_after_s > 10.0
        resumed = coordinator.stub.Generate(request(None, session_id="held", resume_from=0), timeout=60.0)
        assert (await read_until(resumed, 1)).token_ids  # a caller that holds an output is never refused
        rig.target.worker.gate.set()
        await read_rest(stream, output)


async def test_a_deleted_session_and_a_drain_end_the_requests_that_wait() -> None:
    async with limited(max_running=1) as (rig, coordinator):
        await held_slot(rig, coordinator)
        deleted = asyncio.create_task(refusal(coordinator.generate(request(session_id="gone"))))
        drained = asyncio.create_task(refusal(coordinator.generate(request(session_id="left"))))
        await num_waiting(coordinator, 2)
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id="gone"))
        assert (await deleted).reason == "SESSION_NOT_FOUND"
        rig.target.worker.gate.set()
        await coordinator.generations.drain(0.0)
        assert (await drained).reason == "DRAINING"
        assert coordinator.generations.num_running == 0


async def test_a_generation_ends_within_a_round_of_its_callers_deadline_or_cancellation() -> None:
    async with limited() as (rig, coordinator):
        for ends_by_deadline in (True, False):
            stream = coordinator.stub.Generate(request(max_new_tokens=400), timeout=1.0 if ends_by_deadline else None)
            await read_until(stream, 1)
            rig.target.worker.gate.clear()
            if not ends_by_deadline:
                stream.cancel()
            await eventually(lambda: coordinator.generations.num_running == 0)  # although no round can end
            rig.target.worker.gate.set()
        assert coordinator.generations.admission._slots.num_running == 0


LIMITS = Limits(
    max_concurrent=2, max_requests_per_minute=1000, max_tokens_per_minute=60, max_sessions=3, max_prompt_tokens=20
)


async def test_each_limit_of_a_tenant_refuses_its_further_requests_and_not_those_of_others() -> None:
    async with limited(tenant_header=True, tenant_limits=LIMITS) as (rig, coordinator):
        long = await refusal(turn(coordinator, request(range(2, 23)), "a"))
        assert (long.reason, long.retryable) == ("QUOTA_EXCEEDED", False)

        await turn(coordinator, request(session_id="s0", max_new_tokens=1), "b")
        rig.target.worker.gate.clear()
        running = [
            asyncio.create_task(turn(coordinator, request(session_id=f"s{n}", max_new_tokens=1), "b")) for n in (1, 2)
        ]
        await eventually(lambda: coordinator.generations.num_running == 2)
        busy = await refusal(turn(coordinator, request(session_id="s0"), "b"))
        rig.target.worker.gate.set()
        await asyncio.gather(*running)
        assert (busy.reason, busy.retryable, "2 requests at once" in busy.message) == ("QUOTA_EXCEEDED", True, True)

        full = await refusal(turn(coordinator, request(session_id="s3"), "b"))
        assert (full.reason, "3 sessions" in full.message) == ("QUOTA_EXCEEDED", True)
        await turn(coordinator, request([9], session_id="s1", max_new_tokens=1), "b")  # a next turn is allowed
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id="s0"), metadata=((TENANT_KEY, "b"),))
        whole = await turn(coordinator, request(session_id="s3", max_new_tokens=80), "b")
        assert len(whole.token_ids) == 80  # a stream that has begun goes on beyond the limit
        spent = await refusal(turn(coordinator, request([9], session_id="s3"), "b"))
        assert (spent.reason, "60 tokens per minute" in spent.message) == ("QUOTA_EXCEEDED", True)
        assert spent.retry_after_s is not None
        assert 10.0 < spent.retry_after_s <= 60.0

        assert len((await turn(coordinator, request(), "c")).token_ids) == 24


async def test_a_flooding_tenant_does_not_keep_another_tenant_waiting() -> None:
    async with limited(tenant_header=True, max_running=2) as (rig, coordinator):
        rig.target.worker.gate.clear()
        flood = [asyncio.create_task(turn(coordinator, request(max_new_tokens=20), "flood")) for _ in range(12)]
        await num_waiting(coordinator, 10)
        first = coordinator.stub.Generate(request(session_id="o"), metadata=((TENANT_KEY, "other"),))
        await first.read()  # it has begun
        rig.target.worker.gate.set()
        output = await read_rest(first, Output())
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        assert {len(made.token_ids) for made in await asyncio.gather(*flood)} == {20}


async def test_a_request_has_a_limited_number_of_readers_and_the_newest_ones_stay() -> None:
    async with limited() as (rig, coordinator):
        readers = [await held_slot(rig, coordinator)]
        while len(readers) < MAX_READERS + 3:
            stream = coordinator.stub.Generate(request(None, session_id="held", resume_from=0))
            readers.append((stream, await read_until(stream, 1)))
        for stream, output in readers[:3]:
            error = await refusal(read_rest(stream, output))
            assert (error.reason, error.retryable) == ("QUEUE_FULL", False)
            assert "its newest readers go on" in error.message
        rig.target.worker.gate.set()
        expected = rig.target.worker.greedy_continuation(PROMPT, 40)
        for stream, output in readers[3:]:
            assert (await read_rest(stream, output)).token_ids == expected
        for _ in range(MAX_READERS + 3):  # finished outputs are read again as often as one likes, one after the other
            replayed = coordinator.stub.Generate(request(None, session_id="held", resume_from=0))
            assert (await read_rest(replayed, Output())).token_ids == expected
        await eventually(lambda: not coordinator.generations._readers._readers)


async def unread_replays(coordinator: Coordinator, tenant: str, number: int) -> list[socket.socket]:
    """Return connections that replay the output of the session "held", and take no byte of it."""
    message = request(None, session_id="held", resume_from=0).SerializeToString()
    path, header = b"/specdec.v1.CoordinatorService/Generate", literal(TENANT_KEY.encode(), tenant.encode())
    calls = [unread_call(coordinator.server.address, path, message, header) for _ in range(number)]
    await eventually(lambda: coordinator.generations.admission._readers[tenant] == number)
    return calls


async def test_replays_that_are_not_read_count_as_streams_of_their_tenant() -> None:
    limits = Limits(max_concurrent=2)
    async with limited(tenant_header=True, tenant_limits=limits) as (_, coordinator):
        finished = await turn(coordinator, request(session_id="held"), "a")
        calls = await unread_replays(coordinator, "a", 2)
        for asked in (request(), request(None, session_id="held", resume_from=0)):
            error = await refusal(turn(coordinator, asked, "a"))
            assert (error.reason, error.retryable, "2 requests at once" in error.message) == (
                "QUOTA_EXCEEDED", True, True,
            )  # fmt: skip
        assert len((await turn(coordinator, request(), "b")).token_ids) == 24
        for call in calls:
            call.close()
        await eventually(lambda: not coordinator.generations.admission._readers)
        again = await turn(coordinator, request(None, session_id="held", resume_from=0), "a")
        assert again.token_ids == finished.token_ids


async def test_a_client_that_joins_its_request_at_the_limit_takes_the_place_of_the_oldest_reader() -> None:
    async with limited(tenant_limits=Limits(max_concurrent=1)) as (rig, coordinator):
        stream, output = await held_slot(rig, coordinator)
        joined = coordinator.stub.Generate(request(None, session_id="held", resume_from=0))
        rest = await read_until(joined, 1)
        error = await refusal(read_rest(stream, output))
        assert (error.reason, "this one is cut off" in error.message) == ("QUEUE_FULL", True)
        assert (await refusal(coordinator.generate(request()))).reason == "QUOTA_EXCEEDED"
        rig.target.worker.gate.set()
        assert (await read_rest(joined, rest)).token_ids == rig.target.worker.greedy_continuation(PROMPT, 40)


async def test_replays_count_in_the_limit_of_requests_of_a_coordinator() -> None:
    async with limited(tenant_header=True, max_queue=2) as (_, coordinator):
        await turn(coordinator, request(session_id="held"), "a")
        calls = await unread_replays(coordinator, "a", 2)
        error = await refusal(turn(coordinator, request(), "b"))
        assert (error.reason, error.retryable, "--max-queue" in error.message) == ("QUEUE_FULL", True, True)
        for call in calls:
            call.close()
        await eventually(lambda: not coordinator.generations.admission._readers)
        assert len((await turn(coordinator, request(), "b")).token_ids) == 24


async def test_reserved_tokens_of_a_tenants_requests_are_limited_together() -> None:
    limits = Limits(max_reserved_tokens=100)
    async with limited(tenant_header=True, tenant_limits=limits) as (rig, coordinator):
        alone = await refusal(turn(coordinator, request(max_new_tokens=100), "a"))
        assert (alone.reason, alone.retryable) == ("QUOTA_EXCEEDED", False)
        assert f"this request may reach {100 + len(PROMPT)}" in alone.message
        rig.target.worker.gate.clear()
        running = asyncio.create_task(turn(coordinator, request(session_id="s", max_new_tokens=60), "a"))
        await eventually(lambda: coordinator.generations.num_running == 1)
        second = await refusal(turn(coordinator, request(max_new_tokens=60), "a"))
        assert (second.reason, second.retryable) == ("QUOTA_EXCEEDED", True)
        other = asyncio.create_task(turn(coordinator, request(max_new_tokens=60), "b"))
        await eventually(lambda: coordinator.generations.num_running == 2)
        rig.target.worker.gate.set()
        assert {len(output.token_ids) for output in await asyncio.gather(running, other)} == {60}
        await eventually(lambda: coordinator.generations.num_running == 0)
        assert len((await turn(coordinator, request(max_new_tokens=60), "a")).token_ids) == 60
        assert not coordinator.generations.admission.quotas._reserved


async def test_a_batch_waits_for_kv_blocks_and_a_request_that_can_never_have_enough_is_refused_at_once() -> None:
    async with asyncio.timeout(120), Rig(drafts=0, num_blocks=8) as rig:
        coordinator = await rig.coordinator(max_queue=200)
        outputs = await asyncio.gather(*(coordinator.generate(request(max_new_tokens=20)) for _ in range(100)))
        expected = rig.target.worker.greedy_continuation(PROMPT, 20)
        assert [output.token_ids for output in outputs] == [expected] * 100
        error = await refusal(coordinator.generate(request(max_new_tokens=200)))
        assert (error.reason, error.retryable, "KV blocks" in error.message) == ("KV_EXHAUSTED", False, True)


async def test_a_queue_that_would_last_longer_than_the_limit_is_refused_with_a_time_to_retry() -> None:
    async with limited(max_running=1, max_wait_s=60.0) as (rig, coordinator):
        await coordinator.generate(request(max_new_tokens=200, ignore_eos=True))  # the speed is known from now on
        stream, output = await held_slot(rig, coordinator)
        coordinator.generations.admission._slots._speeds.note_end(100, running_s=3000.0)  # as if they took minutes
        first = asyncio.create_task(coordinator.generate(request(session_id="first", max_new_tokens=6)))
        await num_waiting(coordinator, 1)  # one may wait for each slot
        error = await refusal(coordinator.generate(request(session_id="second")))
        assert (error.reason, "--max-wait-s" in error.message) == ("QUEUE_FULL", True)
        assert error.retry_after_s == 60.0
        rig.target.worker.gate.set()
        await read_rest(stream, output)
        await first
