"""Sessions leave a target whose device hangs or whose process is stopped, and it is used again once it is healthy."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.replicas import liveness
from coordinator.replicas.replica import TargetReplica
from specdec.contract.engine_api import EngineInfo
from specdec.contract.types import Verification, VerifyRequest
from specdec.engine.loop import device_loop
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, TARGET, Rig, eventually, request, started_coordinator
from tests.support.freezing import frozen_thread
from tests.support.output import Output, read_rest, read_until
from tests.support.process_rig import NUM_TOKENS, ask, models, read_some, reference, run, stub_of
from tests.support.process_rig import read_rest as read_rest_of
from tests.support.stack import Stack, is_serving
from tests.support.table_services import Service, start_service

__all__ = ["models", "reference"]

#: Of a test that would otherwise wait for ever, in seconds.
_PATIENCE_S = 20.0


async def _warm(rig: Rig) -> None:
    """Warm up as a process does before it serves: a hang is detected by comparison with earlier steps."""
    for service in rig.services:
        await service.engine.warm_up()


def _serving(rig: Rig, num_steps: dict[str, int]) -> Service:
    """Return the target that has run steps since `num_steps` was recorded by address."""
    return max(rig.of_role("target"), key=lambda service: len(service.worker.steps) - num_steps[service.address])


async def test_a_session_leaves_a_target_whose_device_hangs_and_may_return() -> None:
    async with Rig(targets=2, drafts=0) as rig:
        await _warm(rig)
        coordinator = await rig.coordinator()
        steps = {service.address: len(service.worker.steps) for service in rig.services}
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=200))
        output = await read_until(stream, 10)
        hung = _serving(rig, steps)
        (other,) = (service for service in rig.services if service is not hung)
        hung.worker.gate.clear()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await read_rest(stream, output)
                expected = other.worker.greedy_continuation(PROMPT, 200)
                assert output.token_ids == expected
                assert hung.engine.info().draining
                # A new session does not even try it.
                asked_before = len(other.worker.steps)
                await coordinator.pools.poll()
                assert (await coordinator.generate(request())).token_ids == expected[:24]
                assert len(other.worker.steps) > asked_before
        finally:
            hung.worker.gate.set()
        async with asyncio.timeout(_PATIENCE_S):
            await eventually(lambda: not hung.engine.info().draining)
            await coordinator.pools.poll()
            # Back on the first target, with the other one gone: what the hung step had computed disturbs nothing.
            await other.kill()
            later = await coordinator.generate(request([9], session_id="s", max_new_tokens=20))
        assert later.token_ids == hung.worker.greedy_continuation([*PROMPT, *expected, 9], 20)
        hung.engine.check_integrity()


async def test_the_only_target_fails_its_streams_while_its_device_hangs_and_serves_them_afterwards() -> None:
    async with started_coordinator(drafts=0) as (rig, coordinator):
        await _warm(rig)
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=200))
        output = await read_until(stream, 10)
        rig.target.worker.gate.clear()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await read_rest(stream, output)
                assert from_rpc_error(caught.value).reason == "REPLICA_UNAVAILABLE"
                await coordinator.pools.poll()
                assert not coordinator.pools.is_ready
        finally:
            rig.target.worker.gate.set()
        async with asyncio.timeout(_PATIENCE_S):
            while not coordinator.pools.is_ready:
                await coordinator.pools.poll()
            rest = await coordinator.generate(pb.GenerateRequest(session_id="s", resume_from=len(output.token_ids)))
        assert output.token_ids + rest.token_ids == rig.target.worker.greedy_continuation(PROMPT, 200)


@pytest.fixture(scope="module")
def two_targets(models: tuple[Path, Path]) -> Iterator[Stack]:
    with Stack(models[0], num_targets=2) as stack:
        yield stack


def _frozen_target(stack: Stack, before: dict[str, float]) -> str:
    """Stop the target that has worked more since `before`; return its name."""
    name = max(before, key=lambda part: _cpu_s(stack, part) - before[part])
    process = stack.parts[name].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    return name


def _cpu_s(stack: Stack, name: str) -> float:
    process = stack.parts[name].process
    assert process is not None
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_session_leaves_a_target_whose_process_is_stopped_and_no_token_is_doubled_later(
    two_targets: Stack, reference: list[int]
) -> None:
    stub = stub_of(two_targets.endpoint)
    before = {name: _cpu_s(two_targets, name) for name in ("target", "target2")}
    stream = stub.Generate(ask("frozen", num_tokens=4 * NUM_TOKENS, gamma=0), timeout=_PATIENCE_S)
    output = read_some(stream, 60)
    name = _frozen_target(two_targets, before)
    try:
        read_rest_of(stream, output)
    finally:
        os.kill(two_targets.parts[name].process.pid, signal.SIGCONT)
    assert output.token_ids == reference
    deadline = time.monotonic() + _PATIENCE_S
    used: set[str] = set()
    while len(used) < 2 and time.monotonic() < deadline:  # sessions go to both again
        before = {part: _cpu_s(two_targets, part) for part in before}
        assert run(stub, ask(num_tokens=NUM_TOKENS, gamma=0)).token_ids == reference[:NUM_TOKENS]
        used.add(max(before, key=lambda part: _cpu_s(two_targets, part) - before[part]))
    assert used == {"target", "target2"}
    coordinator_log = two_targets.parts["coordinator"].log
    assert "the replica is stalled" in coordinator_log
    assert "STALE_EPOCH" not in coordinator_log
    assert "the device hangs" not in two_targets.parts[name].log


def _thread_cpu_s(stack: Stack, name: str) -> dict[int, float]:
    """Return the processor time of each thread of a part, by its id."""
    process = stack.parts[name].process
    assert process is not None
    fields = {
        int(path.parent.name): path.read_text().rpartition(")")[2].split()
        for path in Path(f"/proc/{process.pid}/task").glob("*/stat")
    }
    return {thread: (int(each[11]) + int(each[12])) / os.sysconf("SC_CLK_TCK") for thread, each in fields.items()}


def _busiest(before: dict[Any, float], now: dict[Any, float]) -> Any:
    return max(now, key=lambda each: now[each] - before.get(each, 0.0))


@pytest.mark.parametrize("num_streams", [1, 4])
def test_sessions_leave_a_target_whose_device_thread_stands_still_between_two_steps(
    two_targets: Stack, reference: list[int], num_streams: int
) -> None:
    """The sessions' next turns begin on their targets, which then run no step and describe themselves all the time."""
    stub = stub_of(two_targets.endpoint)
    names = ("target", "target2")
    before, threads = {name: _cpu_s(two_targets, name) for name in names}, {
        name: _thread_cpu_s(two_targets, name) for name in names
    }  # fmt: skip
    session = f"turns-{num_streams}"
    first = run(stub, ask(session, num_tokens=4 * NUM_TOKENS, gamma=0))  # enough to tell the busy one by its time
    name = _busiest(before, {name: _cpu_s(two_targets, name) for name in names})
    device_thread = _busiest(threads[name], _thread_cpu_s(two_targets, name))
    logged = two_targets.parts["coordinator"].log
    with frozen_thread(device_thread):
        turn = pb.GenerateRequest(
            session_id=session,
            prompt_token_ids=pb.TokenIds(ids=[7]),
            sampling=pb.SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True),
            speculation=pb.SpeculationParams(gamma=0),
        )
        streams = [stub.Generate(turn, timeout=_PATIENCE_S)]
        streams += [
            stub.Generate(ask(num_tokens=NUM_TOKENS, gamma=0), timeout=_PATIENCE_S) for _ in range(num_streams - 1)
        ]
        outputs = [Output() for _ in streams]
        for stream, output in zip(streams, outputs, strict=True):
            read_rest_of(stream, output)
    assert len(outputs[0].token_ids) == NUM_TOKENS
    assert first.token_ids == reference
    assert all(output.token_ids == reference[:NUM_TOKENS] for output in outputs[1:])
    # The replica has noticed it by itself, and long before the coordinator's own limit.
    assert "device hangs" in two_targets.parts[name].log
    assert "calls are stalled" not in two_targets.parts["coordinator"].log.removeprefix(logged)
    while not is_serving(two_targets.parts[name].address):
        time.sleep(0.1)


class _Asked:
    """Counts how often a replica is requested to describe itself."""

    def __init__(self, replica: TargetReplica) -> None:
        self.count = 0
        self._ask = replica.link.info
        replica.link.info = self.info

    async def info(self) -> EngineInfo:
        self.count += 1
        return await self._ask()


async def test_a_long_call_stays_at_its_replica_while_that_describes_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine knows no step times here, so it waits too."""
    monkeypatch.setattr(liveness, "LOOK_INTERVAL_S", 0.02)
    async with Rig(targets=2, drafts=0) as rig:
        coordinator = await rig.coordinator()
        watcher = asyncio.create_task(liveness.watch_targets(coordinator.pools))
        asked = [_Asked(replica) for replica in coordinator.pools.targets()]
        for service in rig.services:
            service.worker.gate.clear()
        try:
            generating = asyncio.create_task(coordinator.generate(request()))
            async with asyncio.timeout(_PATIENCE_S):
                await eventually(lambda: max(replica.count for replica in asked) >= 3)
        finally:
            for service in rig.services:
                service.worker.gate.set()
        assert (await generating).token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        # The other one has not been tried.
        assert sorted(bool(service.worker.steps) for service in rig.services) == [False, True]
        watcher.cancel()


class Deaf:
    """An engine that describes itself and answers no call."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.num_asked = 0
        self.hears = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
        self.num_asked += 1
        await self.hears.wait()
        verification: Verification = await self._engine.verify(request, on_step)
        return verification


async def test_sessions_leave_a_target_that_describes_itself_but_answers_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(device_loop, "NO_STEP_PATIENCE_S", 0.2)
    made: list[Deaf] = []

    def between(engine: Any) -> Deaf:
        made.append(Deaf(engine))
        return made[-1]

    async with Rig(targets=1, drafts=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=between))
        await _warm(rig)
        coordinator = await rig.coordinator()
        (deaf,) = made
        watcher = asyncio.create_task(liveness.watch_targets(coordinator.pools))
        async with asyncio.timeout(_PATIENCE_S):
            outputs = await asyncio.gather(*(coordinator.generate(request([5, 6, 2 + i])) for i in range(4)))
        num_asked = deaf.num_asked
        assert num_asked > 0
        for index, output in enumerate(outputs):
            assert output.token_ids == rig.target.worker.greedy_continuation([5, 6, 2 + index], 24)
        # It describes itself as well as ever, which is not enough now.
        await coordinator.pools.poll()
        await asyncio.gather(*(coordinator.generate(request([7, 6, 2 + i])) for i in range(4)))
        assert deaf.num_asked == num_asked
        # Once it is asked again, and answers, it is one like the others.
        deaf.hears.set()
        (replica,) = (replica for replica in coordinator.pools.targets() if replica.health.is_marked)
        async with asyncio.timeout(_PATIENCE_S):
            while replica.health.is_marked:
                await asyncio.gather(*(coordinator.generate(request([8, 6, 2 + i])) for i in range(4)))
                await coordinator.pools.poll()
        assert deaf.num_asked > num_asked
        watcher.cancel()
