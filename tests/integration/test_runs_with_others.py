"""Runs beside what else there is: drains, model updates, other tenants, little KV, learning logs and the cold tier."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.replicas.replica import TARGET
from specdec.contract.engine_api import EngineInfo
from specdec.contract.tenant import TENANT_KEY
from specdec.contract.types import BLOCK_TOKENS, RunLimit, Verification, VerifyRequest
from specdec.engine.base import StepPlan
from specdec.service.model_grace import ModelGrace
from specdec.state.redis_store import open_registry
from specdec.v1 import coordinator_pb2 as pb
from target_service.verifier import Verifier
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, request
from tests.support.logged import CountedLog, logged
from tests.support.output import Output, read_rest, read_until
from tests.support.redis_fixture import redis_server, redis_url
from tests.support.round_driver import make_round
from tests.support.table_services import start_service
from tests.support.table_worker import TableWorker, held_steps_are_no_hangs
from tests.support.tier_rig import RUN_BYTES, RUN_TOKENS, Replica

__all__ = ["held_steps_are_no_hangs", "redis_server", "redis_url"]

NO_DRAFT = np.empty(0, dtype=np.uint32)
PATIENCE_S = 120.0
NUM_RUNS = 32
SAMPLED: dict[str, Any] = {"mode": pb.SPECULATION_MODE_COUPLED, "temperature": 1.0, "seed": 5}


async def begin(coordinator: Coordinator, num_tokens: int) -> list[tuple[Any, Output]]:
    """Begin generations in runs; return their streams with some tokens of each."""
    asked = [request(session_id=f"s{index}", gamma=0, max_new_tokens=num_tokens) for index in range(NUM_RUNS)]
    streams = [coordinator.stub.Generate(each) for each in asked]
    return [(stream, await read_until(stream, 2)) for stream in streams]


async def rest_of(streams: list[tuple[Any, Output]]) -> list[list[int]]:
    return [output.token_ids for output in await asyncio.gather(*(read_rest(*each) for each in streams))]


def num_faults(coordinator: Coordinator) -> float:
    labels = {"model_name": "table", "role": TARGET, "pool": "default"}
    return coordinator.metrics.registry.get_sample_value("specdec:replica_faults_total", labels) or 0.0


async def test_runs_of_a_target_that_drains_go_on_elsewhere_without_a_lost_token() -> None:
    async with asyncio.timeout(PATIENCE_S), Rig(targets=2, drafts=0, num_blocks=2048) as rig:
        coordinator = await rig.coordinator(max_running=NUM_RUNS)
        streams = await begin(coordinator, 150)
        rig.target.servicer.drain()
        await eventually(lambda: rig.target.engine.info().num_running == 0)
        num_steps = len(rig.target.worker.steps)
        assert await rest_of(streams) == [rig.target.worker.greedy_continuation(PROMPT, 150)] * NUM_RUNS
        assert len(rig.target.worker.steps) == num_steps
        assert num_faults(coordinator) == 0


async def test_a_target_that_leaves_with_its_model_serves_its_runs_to_their_end_also_those_older_than_its_grace() -> (
    None
):
    async with asyncio.timeout(PATIENCE_S), Rig(targets=1, drafts=0, num_blocks=2048) as rig:
        coordinator = await rig.coordinator(max_running=NUM_RUNS)
        registry = open_registry(f"memory://{secrets.token_hex(8)}")
        streams = await begin(coordinator, 300)
        turns = rig.target.servicer.open_turns
        for session, turn in turns._turns.items():  # the calls that began the runs were long ago
            turns._turns[session] = turn._replace(called_s=turn.called_s - 1000.0)
        assert turns.num_open(60.0) < NUM_RUNS
        await eventually(lambda: turns.num_open(60.0) == NUM_RUNS)  # renewals of all of them have come
        rig.target.servicer.leave()
        leaving = asyncio.create_task(ModelGrace(registry, rig.target.servicer.info, turns, 60.0).wait())
        assert await rest_of(streams) == [rig.target.worker.greedy_continuation(PROMPT, 300)] * NUM_RUNS
        await leaving
        assert turns.num_open(60.0) == 0
        await registry.close()


class Plain:
    """A target as of an older version: it makes no runs, and does not say so."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def info(self) -> EngineInfo:
        described: EngineInfo = replace(self._engine.info(), max_run=0)
        return described


async def text_of(*, target_runs: bool, coordinator_runs: bool, **options: Any) -> tuple[list[int], int]:
    """Return the text of a request, and the number of steps that were answered within runs."""
    noted: list[Verification] = []

    class Noting(Plain):
        def info(self) -> EngineInfo:
            return self._engine.info() if target_runs else super().info()

        async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
            assert target_runs or on_step is None
            tell = on_step and (lambda step: (noted.append(step), on_step(step)))
            answer: Verification = await self._engine.verify(request, tell)
            return answer

    async with Rig(targets=0, drafts=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=Noting))
        coordinator = await rig.coordinator()
        if not coordinator_runs:  # an older coordinator does not read the field
            (replica,) = coordinator.pools.targets()
            assert replica.info is not None
            replica.info = replace(replica.info, max_run=0)
        output = await coordinator.generate(request(gamma=0, **options))
        return output.token_ids, len(noted)


@pytest.mark.parametrize(
    "options", [{}, SAMPLED, {"temperature": 1.0, "seed": 3}], ids=["greedy", "coupled", "sampled"]
)
async def test_old_and_new_coordinators_and_targets_together_give_the_same_text(options: dict[str, Any]) -> None:
    text, num_steps = await text_of(target_runs=True, coordinator_runs=True, **options)
    assert num_steps > 0
    for target_runs, coordinator_runs in ((False, True), (True, False), (False, False)):
        assert await text_of(target_runs=target_runs, coordinator_runs=coordinator_runs, **options) == (text, 0)


class HeldOnceFull(TableWorker):
    """A worker whose first step without a free KV block waits for `go_on`."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks)
        self.is_full, self.go_on = threading.Event(), threading.Event()
        self.num_available = lambda: 1

    def execute(self, plan: StepPlan) -> torch.Tensor:
        if not self.num_available():
            self.is_full.set()
            self.go_on.wait(PATIENCE_S)
        return super().execute(plan)


@pytest.mark.parametrize("num_young", [1, 3])
async def test_without_reservations_the_oldest_turn_waits_one_step_of_the_youngest_run_at_most(num_young: int) -> None:
    """The pool holds half of what all sessions need in the end."""
    worker = HeldOnceFull(num_blocks=4 + 4 * num_young)
    engine = Verifier(worker)
    worker.num_available = lambda: engine._engine_loop._blocks.num_available

    async def run(number: int) -> Verification:
        asked = make_round([3 + number, *PROMPT], session_id=f"young{number}")
        limit = RunLimit(8 * BLOCK_TOKENS, frozenset())
        return await engine.verify(VerifyRequest(asked, NO_DRAFT, (), run=limit), lambda step: None)

    old = [2 + index % 20 for index in range(4 * BLOCK_TOKENS)]
    await engine.verify(VerifyRequest(make_round(old, session_id="old"), NO_DRAFT, ()))
    running = [asyncio.create_task(run(number)) for number in range(num_young)]
    assert await asyncio.to_thread(worker.is_full.wait, PATIENCE_S)
    num_begun = len(worker.steps) + 1
    asked = make_round([*old, 5, 6], session_id="old", round_id=1)
    waiting = asyncio.create_task(engine.verify(VerifyRequest(asked, NO_DRAFT, ())))
    await eventually(lambda: bool(engine._engine_loop._inbox._commands))
    worker.go_on.set()
    assert (await waiting).kv_len == len(old) + 2
    of_old = [any(part.token_ids[-2:] == (5, 6) for part in plan.slices) for plan in worker.steps]
    assert of_old.index(True) - num_begun <= 1
    await asyncio.gather(*running)
    engine.check_integrity()
    await engine.close()


async def shares(max_run: int) -> Counter[str]:
    """Return the tokens of two tenants while both have streams: one has eight, the other comes later with one."""
    counts: Counter[str] = Counter()

    class Limited(Plain):
        def info(self) -> EngineInfo:
            return replace(self._engine.info(), max_run=max_run)

    async with asyncio.timeout(PATIENCE_S), Rig(targets=0, drafts=0, num_blocks=2048) as rig:
        rig.services.append(await start_service(TARGET, salt=0, num_blocks=2048, between=Limited))
        execute = rig.target.worker.execute

        def execute_slowly(plan: StepPlan) -> torch.Tensor:
            time.sleep(0.002 * len(plan.slices))  # eight streams slow each other down, on any machine
            return execute(plan)

        rig.target.worker.execute = execute_slowly
        coordinator = await rig.coordinator(tenant_header=True, max_running=8)

        async def stream(tenant: str, number: int, num_tokens: int) -> None:
            asked = request(session_id=f"{tenant}{number}", gamma=0, max_new_tokens=num_tokens)
            async for response in coordinator.stub.Generate(asked, metadata=((TENANT_KEY, tenant),)):
                counts[tenant] += len(response.tokens.token_ids)

        await stream("few", 1, 200)  # so that the speed of a stream alone is known
        many = [asyncio.create_task(stream("many", number, 480)) for number in range(8)]
        await eventually(lambda: counts["many"] >= 80)
        counts.clear()
        await stream("few", 0, 100)
        told = counts.copy()
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
    return told


async def test_a_tenant_that_comes_later_gets_its_share_of_runs_as_of_rounds() -> None:
    with_runs, with_rounds = await shares(64), await shares(0)
    print(with_runs, with_rounds)
    assert with_runs["few"] == with_rounds["few"] == 100
    assert max(with_runs["many"], with_rounds["many"]) < 400  # without shares it is 800 and more


@pytest.mark.parametrize("options", [{}, SAMPLED, {"temperature": 0.7, "top_k": 5, "seed": 3}])
async def test_the_learning_log_of_runs_is_that_of_rounds(options: dict[str, Any], tmp_path: Path) -> None:
    turns = []
    for max_run in (64, 0):
        folder = tmp_path / str(max_run)

        class Limited(Plain):
            most = max_run

            def info(self) -> EngineInfo:
                return replace(self._engine.info(), max_run=self.most)

        async with Rig(targets=0, drafts=0) as rig:
            rig.services.append(await start_service(TARGET, salt=0, between=Limited))
            coordinator = await rig.coordinator(learning_log=CountedLog(folder))
            await coordinator.generate(request(session_id="s", gamma=0, **options))
        turns.append(logged(folder)[1])
    ((run,), (rounds,)) = turns
    for name in ("token_ids", "num_entries", "entry_ids", "entry_weights"):
        assert getattr(run, name).tolist() == getattr(rounds, name).tolist()
    assert len(run.num_entries) == 24


async def test_the_cold_tier_gets_no_block_of_a_run_before_its_tokens_are_committed(redis_url: str) -> None:
    replica = Replica(TableWorker(num_blocks=64), redis_url)
    replica.wait_up()
    prompt = [2 + index % 20 for index in range(RUN_TOKENS - 6)]
    positions = make_round(prompt, session_id="s", max_session_tokens=0)
    told: list[int] = []
    limit = RunLimit(RUN_TOKENS + 20, frozenset())

    def tell(step: Verification) -> None:
        told.append(step.decided_token_id)

    last = await replica.engine.verify(VerifyRequest(positions, NO_DRAFT, (), run=limit), tell)
    tokens = [*prompt, *told, last.decided_token_id]
    assert len(tokens) == RUN_TOKENS + 20
    await asyncio.to_thread(replica.engine.check_integrity)
    assert replica.tier.tally.num_bytes["written"] == 0
    await replica.ask(tokens, session_id="s", round_id=1)  # which says that they are committed
    await asyncio.to_thread(replica.wait_written, RUN_BYTES)
    await replica.close()


class Counted:
    """A running mean that counts what it observes."""

    def __init__(self, mean: Any) -> None:
        self._mean = mean
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mean, name)

    def observe(self, *values: Any) -> None:
        self.count += 1
        self._mean.observe(*values)


async def test_a_thousand_steps_of_runs_leave_the_time_of_the_link_unchanged() -> None:
    """Only calls tell it: a run makes one for all of its steps, and another one if it was renewed too late."""
    asked: list[VerifyRequest] = []

    class Noting(Plain):
        def info(self) -> EngineInfo:
            described: EngineInfo = self._engine.info()
            return described

        async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
            asked.append(request)
            answer: Verification = await self._engine.verify(request, on_step)
            return answer

    async with Rig(targets=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=Noting))
        coordinator = await rig.coordinator()
        await coordinator.generate(request(gamma=3, max_new_tokens=60))
        asked.clear()
        (stats,) = coordinator.servicer._draft_sources._stats.of_adapter("").values()
        stats.link_s, stats.run_link_s = Counted(stats.link_s), Counted(stats.run_link_s)
        for number in range(4):
            await coordinator.generate(request(session_id=f"s{number}", gamma=0, max_new_tokens=400))
        print(f"{len(asked)} calls, {stats.link_s.count} times of the link, {stats.run_link_s.count} steps of runs")
        assert stats.run_link_s.count == 4 * 400 - len(asked) >= 1000
        assert stats.link_s.count <= len(asked)
