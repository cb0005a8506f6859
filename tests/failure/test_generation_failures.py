"""Failures around a generation, as the client sees them: slower tokens, a clear error, or no effect."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import DRAFT, TARGET
from specdec.contract.errors import VocabularyMismatch
from specdec.contract.types import FinishReason
from specdec.rpc.client import open_link
from specdec.rpc.status_mapping import from_rpc_error
from specdec.state.redis_store import open_registry
from specdec.state.store import Commit, ReplicaRecord
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import (
    MESSAGE_LIMIT_BYTES,
    PROMPT,
    Coordinator,
    Rig,
    eventually,
    request,
    started_coordinator,
)
from tests.support.output import Output, read_rest, read_until
from tests.support.round_rig import NotedEngine
from tests.support.store_sessions import forget_session
from tests.support.table_services import start_service
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]


async def failure(coordinator: Coordinator, asked: pb.GenerateRequest) -> tuple[str, str, str]:
    """Return status code, reason and field of a request that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await coordinator.generate(asked)
    error = from_rpc_error(caught.value)
    return caught.value.code().name, error.reason, error.field


async def test_the_output_is_unchanged_when_the_draft_dies_in_mid_stream() -> None:
    async with started_coordinator() as (rig, coordinator):
        stream = coordinator.stub.Generate(request(max_new_tokens=120, provenance=True, gamma=2))
        output = await read_until(stream, 10)
        await rig.draft.kill()
        await read_rest(stream, output)
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 120)
        assert output.details[-1].source == pb.TOKEN_SOURCE_TARGET
        assert output.finished.stats.num_target_only_steps > 0


async def test_a_draft_that_restarts_is_used_again() -> None:
    async with started_coordinator(draft_salt=0) as (rig, coordinator):
        await rig.draft.kill()
        await coordinator.pools.poll()
        alone = await coordinator.generate(request(max_new_tokens=10))
        assert alone.finished.stats.num_draft_tokens == 0
        address = rig.draft.address
        rig.services.remove(rig.draft)
        rig.services.append(await start_service(DRAFT, salt=0, listen=address))
        while not coordinator.pools.drafts("default")[0].is_alive:
            await coordinator.pools.poll()
        again = await coordinator.generate(request(max_new_tokens=10))
        assert again.finished.stats.num_accepted_tokens > 0
        assert again.token_ids == alone.token_ids


async def test_a_round_goes_on_without_a_late_draft_and_ignores_its_answer() -> None:
    async with Rig(drafts=0) as rig:
        drafts: list[NotedEngine] = []

        def note(engine: Any) -> NotedEngine:
            drafts.append(NotedEngine(engine))
            return drafts[0]

        rig.services.append(await start_service(DRAFT, salt=1, between=note))
        coordinator = await rig.coordinator(draft_timeout_s=0.05)
        rig.draft.worker.gate.clear()
        try:
            output = await coordinator.generate(request(max_new_tokens=24, gamma=2))
        finally:
            rig.draft.worker.gate.set()
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        assert output.finished.stats.num_draft_tokens == 0
        # One of 24 rounds waited for the deadline; on a slow machine a later round may have tried the draft again.
        assert 1 <= len(drafts[0].asked) <= 3
        later = await coordinator.generate(request([9], session_id=output.started.session_id, gamma=2))
        assert later.finished.stats.num_draft_tokens > 0


async def test_without_a_draft_pool_every_round_is_target_only() -> None:
    async with started_coordinator(drafts=0) as (rig, coordinator):
        for mode in (pb.SPECULATION_MODE_REJECTION, pb.SPECULATION_MODE_COUPLED):
            output = await coordinator.generate(request(mode=mode))
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
            assert output.finished.stats.num_target_only_steps == 24


async def test_a_target_that_dies_in_mid_stream_is_replaced_by_another() -> None:
    async with started_coordinator(targets=2) as (rig, coordinator):
        stream = coordinator.stub.Generate(request(max_new_tokens=120, gamma=2))
        output = await read_until(stream, 10)
        serving = next(service for service in rig.of_role(TARGET) if service.engine.info().num_sessions)
        await serving.kill()
        await read_rest(stream, output)
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 120)


async def test_a_request_that_loses_its_target_fails_as_unavailable_and_can_be_resumed() -> None:
    async with started_coordinator() as (rig, coordinator):
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=120, gamma=2))
        output = await read_until(stream, 10)
        address = rig.target.address
        await rig.target.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_rest(stream, output)
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == ("UNAVAILABLE", "REPLICA_UNAVAILABLE")
        assert error.retryable
        await coordinator.pools.poll()
        assert (await failure(coordinator, request()))[:2] == ("UNAVAILABLE", "REPLICA_UNAVAILABLE")
        rig.services.remove(rig.target)
        rig.services.append(await start_service(TARGET, salt=0, listen=address))
        while not coordinator.pools.is_ready:
            await coordinator.pools.poll()
        rest = await coordinator.generate(request(None, session_id="s", resume_from=len(output.token_ids)))
        assert output.token_ids + rest.token_ids == rig.target.worker.greedy_continuation(PROMPT, 120)


async def test_replicas_that_lost_a_session_receive_it_again_with_unchanged_acceptance() -> None:
    async with started_coordinator(draft_salt=0) as (rig, coordinator):
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=200, gamma=3))
        output = await read_until(stream, 8)
        for service in rig.services:
            await service.engine.release(["s"])
        await read_rest(stream, output)
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 200)
        stats = output.finished.stats
        assert stats.num_accepted_tokens == stats.num_draft_tokens


async def test_wire_bytes_include_the_cost_of_a_kv_miss() -> None:
    async with started_coordinator(drafts=0) as (rig, coordinator):
        costs = []
        for lost in (False, True):
            session_id = f"lost-{lost}"
            await coordinator.generate(request(session_id=session_id, max_new_tokens=100))
            if lost:
                await rig.target.engine.release([session_id])
            turn = await coordinator.generate(request([9], session_id=session_id, max_new_tokens=1))
            costs.append(turn.finished.stats.wire_bytes)
        # Counted are the call that missed, its answer, and the session's 104 tokens in the repeated call.
        assert costs[1] > 2 * costs[0]
        assert costs[1] > costs[0] + 104


@pytest.mark.parametrize("mode", [pb.SPECULATION_MODE_COUPLED, pb.SPECULATION_MODE_OFF], ids=["coupled", "off"])
async def test_another_coordinator_continues_a_stopped_request(mode: int) -> None:
    async with Rig() as rig:
        first, second = await rig.coordinator(), await rig.coordinator()
        asked = request(session_id="s", mode=mode, temperature=1.0, seed=3, max_new_tokens=150, gamma=2)
        expected = await second.generate(request(mode=mode, temperature=1.0, seed=3, max_new_tokens=150, gamma=5))
        stream = first.stub.Generate(asked)
        held = await read_until(stream, 10)
        await first.generations.drain(0.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_rest(stream, held)
        assert from_rpc_error(caught.value).reason == "DRAINING"
        rest = await second.generate(request(None, session_id="s", resume_from=len(held.token_ids)))
        assert held.token_ids + rest.token_ids == expected.token_ids
        assert held.text + rest.text == expected.text
        assert rest.finished.stats.num_rounds > len(rest.chunks)


async def test_a_session_of_a_dead_owner_is_taken_over_when_its_lease_ends() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=150))
        held = await read_until(stream, 10)
        stream.cancel()
        await eventually(lambda: coordinator.generations.num_running == 0)
        # A dead coordinator leaves a lease that is no longer renewed.
        dead = await rig.store.acquire("s", owner="dead", ttl_s=0.5, create=False)
        rest = await coordinator.generate(request(None, session_id="s", resume_from=len(held.token_ids)))
        assert held.token_ids + rest.token_ids == rig.target.worker.greedy_continuation(PROMPT, 150)
        record = await rig.store.load("s")
        assert record is not None
        assert record.epoch > dead.epoch


async def test_a_coordinator_that_lost_its_lease_shows_no_further_token() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=400))
        held = await read_until(stream, 10)
        await forget_session(rig.store._connection, "s")
        thief = await rig.store.acquire("s", owner="thief", ttl_s=5.0, create=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_rest(stream, held)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        record = await rig.store.load("s")
        assert record is not None
        assert (record.epoch, record.num_tokens) == (thief.epoch, 0)


async def test_a_live_owner_appends_tokens_that_the_store_lost() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=100, gamma=2))
        output = await read_until(stream, 10)
        key = "specdec:default:{s}:tokens"
        await rig.store._connection.run_command("SETRANGE", key, 0, b"")  # checks that the key exists under this name
        await rig.store._connection.run_command("SET", key, np.array(PROMPT, "<u4").tobytes(), "KEEPTTL")
        await read_rest(stream, output)
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 100)
        assert (await rig.store.read_tokens("s")).tolist() == [*PROMPT, *output.token_ids]


BAD_REQUESTS = {
    "no input": (request(None), "INVALID_ARGUMENT", "INVALID_REQUEST", "input"),
    "empty prompt": (pb.GenerateRequest(prompt=""), "INVALID_ARGUMENT", "INVALID_REQUEST", "prompt"),
    "empty ids": (request([]), "INVALID_ARGUMENT", "INVALID_REQUEST", "prompt_token_ids"),
    "id outside": (request([24]), "INVALID_ARGUMENT", "INVALID_REQUEST", "prompt_token_ids"),
    "long prompt": (request([5] * 512), "INVALID_ARGUMENT", "CONTEXT_TOO_LONG", "prompt_token_ids"),
    "long output": (
        request([5] * 500, max_new_tokens=13),
        "INVALID_ARGUMENT",
        "CONTEXT_TOO_LONG",
        "sampling.max_new_tokens",
    ),
    "nan": (request(temperature=float("nan")), "INVALID_ARGUMENT", "INVALID_REQUEST", "sampling.temperature"),
    "negative": (request(temperature=-1.0), "INVALID_ARGUMENT", "INVALID_REQUEST", "sampling.temperature"),
    "top_p": (request(top_p=1.5), "INVALID_ARGUMENT", "INVALID_REQUEST", "sampling.top_p"),
    "min_p": (request(min_p=1.0), "INVALID_ARGUMENT", "INVALID_REQUEST", "sampling.min_p"),
    "gamma": (request(gamma=9), "INVALID_ARGUMENT", "INVALID_REQUEST", "speculation.gamma"),
    "pool": (request(draft_pool="nowhere"), "NOT_FOUND", "POOL_NOT_FOUND", "speculation.draft_pool"),
    "a very long pool": (request(draft_pool="x" * 100_000), "NOT_FOUND", "POOL_NOT_FOUND", "speculation.draft_pool"),
    "unknown session": (
        request(None, session_id="nobody", resume_from=0),
        "NOT_FOUND",
        "SESSION_NOT_FOUND",
        "session_id",
    ),
    "chat": (
        pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])),
        "INVALID_ARGUMENT",
        "NO_CHAT_TEMPLATE",
        "messages",
    ),
    "both": (
        pb.GenerateRequest(session_id="s", prompt="w5", resume_from=1),
        "INVALID_ARGUMENT",
        "INVALID_REQUEST",
        "resume_from",
    ),
}


@pytest.mark.parametrize(("asked", "code", "reason", "field"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
async def test_bad_input_is_refused_with_its_field_and_leaves_no_state(
    asked: pb.GenerateRequest, code: str, reason: str, field: str
) -> None:
    async with started_coordinator() as (rig, coordinator):
        await failure(coordinator, request(gamma=9))  # lets gRPC allocate its lasting objects before they are counted
        num_tasks = len(asyncio.all_tasks())
        assert await failure(coordinator, asked) == (code, reason, field)
        await assert_nothing_left(rig, coordinator)
        await eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)


async def assert_nothing_left(rig: Rig, coordinator: Coordinator) -> None:
    assert coordinator.generations.num_running == 0
    assert [service.engine.info().num_sessions for service in rig.services] == [0] * len(rig.services)
    assert await rig.store._connection.run_command("KEYS", "specdec:default:*") == []


async def test_a_message_over_the_size_limit_is_refused_before_it_is_read() -> None:
    async with started_coordinator() as (rig, coordinator):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(pb.GenerateRequest(prompt="x" * (2 * MESSAGE_LIMIT_BYTES)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await assert_nothing_left(rig, coordinator)


async def test_resuming_beyond_the_output_of_a_finished_request_is_an_invalid_request() -> None:
    async with started_coordinator() as (_, coordinator):
        await coordinator.generate(request(session_id="s", max_new_tokens=6))
        asked = request(None, session_id="s", resume_from=7)
        assert await failure(coordinator, asked) == ("INVALID_ARGUMENT", "INVALID_REQUEST", "resume_from")
        whole = await coordinator.generate(request(None, session_id="s", resume_from=6))
        assert whole.token_ids == []
        assert whole.finished.usage.num_output_tokens == 6


async def test_a_request_that_fails_before_its_first_token_leaves_no_session() -> None:
    async with started_coordinator(drafts=0) as (rig, coordinator):
        await rig.target.kill()
        assert (await failure(coordinator, request()))[:2] == ("UNAVAILABLE", "REPLICA_UNAVAILABLE")
        assert await rig.store._connection.run_command("KEYS", "specdec:default:*") == []
        assert coordinator.generations.num_running == 0


async def test_a_full_coordinator_refuses_requests_with_a_retry_delay() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator(max_queue=1)
        stream = coordinator.stub.Generate(request(max_new_tokens=400))
        output = await read_until(stream, 1)
        assert (await failure(coordinator, request()))[:2] == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        await read_rest(stream, output)
        await coordinator.generate(request())


async def test_a_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        stream = coordinator.stub.Generate(request(max_new_tokens=60))
        output = await read_until(stream, 1)
        drain = asyncio.create_task(coordinator.generations.drain(60.0))
        await asyncio.sleep(0)
        assert (await failure(coordinator, request()))[:2] == ("UNAVAILABLE", "DRAINING")
        await read_rest(stream, output)
        await drain
        assert len(output.token_ids) == 60


async def test_a_static_replica_with_another_vocabulary_is_refused_with_both_fingerprints() -> None:
    async with Rig() as rig:
        pools = ReplicaPools("other", open_link, static_endpoints=[(DRAFT, rig.draft.address)])
        with pytest.raises(VocabularyMismatch, match=r"fingerprint table, the tokenizer has other"):
            await pools.watch()  # a slow service may answer only a later poll
        await pools.close()


async def test_a_discovered_replica_with_another_vocabulary_is_left_out() -> None:
    async with Rig() as rig:
        registry = open_registry(f"memory://{id(rig)}")
        for service in rig.services:
            await registry.publish(ReplicaRecord(service.address, service.engine.info()), ttl_s=60.0)
        fitting, other = (
            ReplicaPools("table", open_link, registry=registry),
            ReplicaPools("other", open_link, registry=registry),
        )
        while len(fitting.all_replicas()) < len(rig.services):  # a slow service may answer late
            await fitting.poll()
        await other.poll()
        assert fitting.is_ready
        assert [replica.address for replica in fitting.drafts("default")] == [rig.draft.address]
        assert not other.is_ready
        assert other.all_replicas() == []
        await registry.remove(rig.draft.engine.info().replica_id)
        await fitting.poll()
        assert fitting.drafts("default") == []
        for closing in (fitting, other, registry):
            await closing.close()


async def test_a_closing_commit_without_tokens_is_replayed_like_any_other() -> None:
    async with started_coordinator() as (rig, coordinator):
        output = Output()
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        output = await read_until(stream, 3)
        stream.cancel()
        await eventually(lambda: coordinator.generations.num_running == 0)
        record = await rig.store.load("s")
        lease = await rig.store.acquire("s", owner="closer", ttl_s=5.0, create=False)
        await rig.store.begin_request(lease, record.request, keep=record.num_tokens, token_ids=np.empty(0, np.uint32))
        closing = Commit(record.round_id, record.num_tokens, np.empty(0, np.uint32), "{}", FinishReason.LENGTH, b"")
        await rig.store.commit(lease, closing)
        await rig.store.release(lease)
        replay = await coordinator.generate(request(None, session_id="s", resume_from=0))
        assert replay.token_ids[: len(output.token_ids)] == output.token_ids
        assert replay.finished.reason == pb.FINISH_REASON_LENGTH
