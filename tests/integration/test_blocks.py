"""Rounds that are committed and shown together: when a block is shown, and what each reader gets of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from coordinator.generation import publisher
from coordinator.generation.publisher import MAX_BLOCK_ROUNDS
from coordinator.replicas.replica import TARGET
from specdec.contract.types import Verification, VerifyRequest
from specdec.engine.base import StepPlan
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, request
from tests.support.output import Output, read_rest, read_until
from tests.support.table_services import start_service
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]

NUM_STREAMS = 4
PATIENCE_S = 120.0


class Noting:
    """An engine that notes the tokens that it has decided, by session."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.decided: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
        tokens = self.decided.setdefault(request.position.session_id, [])

        def take(step: Verification) -> None:
            tokens.append(step.decided_token_id)
            on_step(step)

        answer: Verification = await self._engine.verify(request, on_step and take)
        tokens.append(answer.decided_token_id)
        return answer


@asynccontextmanager
async def hanging(*num_steps: int) -> AsyncIterator[tuple[Rig, Coordinator, Noting]]:
    """Give a target that hangs after these numbers of steps, until its worker's gate is opened, and a coordinator."""
    made: list[Noting] = []

    def between(engine: Any) -> Noting:
        made.append(Noting(engine))
        return made[-1]

    async with asyncio.timeout(PATIENCE_S), Rig(targets=0, drafts=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=between))
        worker = rig.target.worker
        execute = worker.execute

        def execute_some(plan: StepPlan) -> torch.Tensor:
            if len(worker.steps) in num_steps:
                worker.gate.clear()
            return execute(plan)

        worker.execute = execute_some
        try:
            yield rig, await rig.coordinator(), made[0]
        finally:
            worker.gate.set()


async def test_all_that_a_target_has_decided_is_shown_also_when_it_hangs_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rounds than make a block wait for the end of the interval, and no further round comes."""
    monkeypatch.setattr(publisher, "BLOCK_INTERVAL_S", 0.05)
    async with hanging(30 + MAX_BLOCK_ROUNDS // 2) as (rig, coordinator, target):
        asked = [request(session_id=f"s{index}", gamma=0, max_new_tokens=60) for index in range(NUM_STREAMS)]
        streams = [coordinator.stub.Generate(each) for each in asked]
        outputs = [Output() for _ in streams]
        reading = [asyncio.create_task(read_rest(*each)) for each in zip(streams, outputs, strict=True)]
        await eventually(lambda: not rig.target.worker.gate.is_set())
        await eventually(
            lambda: all(output.token_ids == target.decided.get(f"s{index}") for index, output in enumerate(outputs))
        )
        rig.target.worker.gate.set()
        await asyncio.gather(*reading)
        assert [output.token_ids for output in outputs] == [rig.target.worker.greedy_continuation(PROMPT, 60)] * 4


async def test_the_first_and_the_last_token_wait_for_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "BLOCK_INTERVAL_S", 1e6)
    async with hanging(1) as (rig, coordinator, _):
        stream = coordinator.stub.Generate(request(session_id="s", gamma=0, max_new_tokens=3 + MAX_BLOCK_ROUNDS))
        output = await read_until(stream, 1)  # which is shown although no other one comes
        rig.target.worker.gate.set()
        await read_rest(stream, output)
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 3 + MAX_BLOCK_ROUNDS)


async def test_a_token_in_between_waits_for_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test before this one would say nothing."""
    monkeypatch.setattr(publisher, "BLOCK_INTERVAL_S", 1e6)
    async with hanging(1, MAX_BLOCK_ROUNDS) as (rig, coordinator, target):
        stream = coordinator.stub.Generate(request(session_id="s", gamma=0, max_new_tokens=24))
        output = await read_until(stream, 1)
        reading = asyncio.create_task(read_rest(stream, output))
        rig.target.worker.gate.set()
        await eventually(lambda: len(target.decided["s"]) == MAX_BLOCK_ROUNDS)
        await asyncio.wait([reading], timeout=0.5)
        assert len(output.token_ids) == 1
        rig.target.worker.gate.set()
        await reading
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)


@pytest.mark.parametrize("provenance", [True, False])
async def test_a_reader_gets_a_chunk_for_each_round_only_if_it_asks_for_their_origin(
    provenance: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "BLOCK_INTERVAL_S", 1e6)
    async with asyncio.timeout(PATIENCE_S), Rig(drafts=0) as rig:
        coordinator = await rig.coordinator()
        output = await coordinator.generate(request(session_id="s", gamma=0, provenance=provenance))
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        assert output.finished is not None
        assert output.finished.stats.num_rounds == 24
        if provenance:
            assert [len(chunk.token_ids) for chunk in output.chunks] == [1] * 24
        else:
            assert len(output.chunks) <= 2 + 24 // MAX_BLOCK_ROUNDS
