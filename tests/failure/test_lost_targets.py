"""Streams wait for a lost target replica: it comes back, it never does, or another model takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from coordinator.replicas import target_wait
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import TARGET
from coordinator.replicas.target_wait import wait_for_any_target
from specdec.contract.errors import SpecdecError, Unavailable
from specdec.rpc.client import open_link
from specdec.rpc.status_mapping import from_rpc_error
from specdec.state.redis_store import open_registry
from specdec.state.store import ReplicaRecord
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, request
from tests.support.output import Output, read_rest, read_until
from tests.support.round_rig import NotedEngine
from tests.support.table_services import start_service

NUM_TOKENS = 120

#: Longer than any of these tests takes.
LONG_S = 600.0


@asynccontextmanager
async def watched(rig: Rig, target_wait_s: float) -> AsyncIterator[Coordinator]:
    """A coordinator that polls its replicas, as a process does."""
    coordinator = await rig.coordinator(target_wait_s=target_wait_s)
    watching = asyncio.create_task(coordinator.pools.watch())
    yield coordinator
    watching.cancel()
    await asyncio.wait([watching])


async def lose_target(rig: Rig, coordinator: Coordinator) -> str:
    """Kill the only target, wait until the coordinator has noticed, and return its address."""
    address = rig.target.address
    await rig.target.kill()
    rig.services.remove(rig.target)
    await eventually(lambda: not coordinator.pools.is_ready)
    return address


async def error_of(stream: Any, output: Output) -> SpecdecError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_rest(stream, output)
    return from_rpc_error(caught.value)


async def test_a_stream_and_a_new_request_outlast_a_target_that_is_away_for_many_polls() -> None:
    async with Rig() as rig, watched(rig, LONG_S) as coordinator:
        expected = rig.target.worker.greedy_continuation(PROMPT, NUM_TOKENS)
        stream = coordinator.stub.Generate(request(max_new_tokens=NUM_TOKENS, gamma=2))
        output = await read_until(stream, 10)
        address = await lose_target(rig, coordinator)
        later = asyncio.create_task(coordinator.generate(request(max_new_tokens=NUM_TOKENS, gamma=2)))
        rest = asyncio.create_task(read_rest(stream, output))
        for _ in range(3):
            await coordinator.pools.poll()
        assert not later.done()
        assert not rest.done()
        rig.services.append(await start_service(TARGET, salt=0, listen=address))
        await rest
        assert output.token_ids == (await later).token_ids == expected


async def test_a_client_that_asks_is_told_that_no_target_lives_while_its_stream_waits() -> None:
    async with Rig() as rig, watched(rig, LONG_S) as coordinator:
        stream = coordinator.stub.Generate(request(max_new_tokens=NUM_TOKENS))
        await read_until(stream, 5)
        await lose_target(rig, coordinator)
        info = await coordinator.stub.GetInfo(pb.GetInfoRequest())
        assert [pool.role for pool in info.pools if pool.replicas] == ["draft"]
        stream.cancel()
        await eventually(lambda: coordinator.generations.num_running == 0)


@pytest.mark.parametrize("is_new", [False, True], ids=["in mid-stream", "before the first token"])
async def test_a_request_fails_with_the_settings_value_when_its_target_never_comes_back(is_new: bool) -> None:
    async with Rig() as rig, watched(rig, 0.5) as coordinator:
        stream, output = coordinator.stub.Generate(request(session_id="s", max_new_tokens=NUM_TOKENS)), Output()
        if is_new:
            await read_rest(stream, output)
        else:
            output = await read_until(stream, 10)
        address = await lose_target(rig, coordinator)
        if is_new:
            stream, output = coordinator.stub.Generate(request()), Output()
        error = await error_of(stream, output)
        assert (error.code, error.reason, error.retryable) == ("UNAVAILABLE", "REPLICA_UNAVAILABLE", True)
        assert error.message == "no target replica came back within 0.5 s (--target-wait-s)"
        # What was shown is kept, and the session goes on once there is a target.
        if not is_new:
            rig.services.append(await start_service(TARGET, salt=0, listen=address))
            await eventually(lambda: coordinator.pools.is_ready)
            rest = await coordinator.generate(request(None, session_id="s", resume_from=len(output.token_ids)))
            assert output.token_ids + rest.token_ids == rig.target.worker.greedy_continuation(PROMPT, NUM_TOKENS)


async def test_a_stream_whose_target_comes_back_with_another_model_fails_at_once() -> None:
    async with Rig() as rig, watched(rig, LONG_S) as coordinator:
        stream = coordinator.stub.Generate(request(max_new_tokens=NUM_TOKENS))
        output = await read_until(stream, 10)
        address = await lose_target(rig, coordinator)
        rig.services.append(await start_service(TARGET, salt=5, listen=address))
        error = await error_of(stream, output)
        assert error.message == "no target replica that serves the session's model can be reached"


async def test_a_target_that_describes_itself_and_fails_every_call_is_given_up_after_the_setting() -> None:
    engines: list[NotedEngine] = []

    def between(engine: Any) -> NotedEngine:
        engines.append(NotedEngine(engine))
        return engines[-1]

    async with Rig(targets=0, drafts=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=between))
        async with watched(rig, 0.5) as coordinator:
            stream = coordinator.stub.Generate(request(max_new_tokens=NUM_TOKENS))
            output = await read_until(stream, 10)
            engines[0].error = Unavailable("the device is away")
            error = await error_of(stream, output)
            assert error.reason == "REPLICA_UNAVAILABLE"
            num_calls = len(engines[0].asked) - len(engines[0].answered)
            assert 1 <= num_calls <= 8  # attempts come at growing intervals


async def test_a_registered_target_that_this_coordinator_cannot_reach_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_wait, "UNREACHABLE_S", 0.0)
    async with Rig(drafts=0) as rig:
        registry = open_registry(f"memory://{id(rig)}")
        await registry.publish(ReplicaRecord(rig.target.address, rig.target.servicer.info()), ttl_s=600.0)
        pools = ReplicaPools("table", open_link, registry=registry, target_wait_s=LONG_S)
        while not pools.is_ready:
            await pools.poll()
        await rig.target.kill()
        while pools.is_ready:
            await pools.poll()
        with pytest.raises(Unavailable, match="is registered but has not answered this coordinator"):
            await wait_for_any_target(pools)
        await registry.remove(rig.target.servicer.info().replica_id)
        await pools.poll()
        waiting = asyncio.create_task(wait_for_any_target(pools))  # it has left: another process may take its place
        await pools.poll()
        assert not waiting.done()
        waiting.cancel()
        await pools.close()
        await registry.close()
