"""Prompts beside running sessions, through a real loop on a device of modelled time: bounded, and without a trace."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from specdec.contract.types import BLOCK_TOKENS, VerifyRequest
from specdec.engine.base import StepPlan
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.simulated.device import ModelledTime
from specdec.engine.simulated.engines import SimulatedTarget
from specdec.engine.simulated.simulated_pair import PRESETS
from target_service.verifier import Verifier
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

FIXED_S, TOKEN_S, BUDGET_S = 10e-3, 1e-3, 60e-3
PROMPT = [3 + index * 7 % 20 for index in range(400)]
NO_DRAFT = np.empty(0, dtype=np.uint32)


class TimedWorker(TableWorker):
    """Its steps take 10 ms and 1 ms a token, of a clock that nothing else moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def execute(self, plan: StepPlan) -> torch.Tensor:
        logits = super().execute(plan)
        self.now_s += FIXED_S + TOKEN_S * sum(len(part.token_ids) for part in plan.slices)
        return logits


class StepLog:
    """Observes steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.num_tokens: list[int] = []

    def observe_step(self, *, num_sequences: int, num_tokens: int, seconds: float) -> None:
        self.seconds.append(seconds)
        self.num_tokens.append(num_tokens)

    def observe_queue(self, seconds: float) -> None:
        """Only steps are observed."""


async def _run_session(verifier: Verifier, worker: TimedWorker, prompt: asyncio.Task[object]) -> list[int]:
    """Rounds of one token each until the prompt has run; the session's tokens."""
    tokens = PROMPT[:8]
    while not prompt.done() or len(tokens) < 20:
        answer = await verifier.verify(
            VerifyRequest(make_round(tokens, session_id="a", round_id=len(tokens)), NO_DRAFT, ())
        )
        tokens = [*tokens, int(answer.choice_token_ids[0])]
    return tokens


async def test_a_long_prompt_lengthens_no_step_beyond_the_budget_and_changes_no_token() -> None:
    worker, log = TimedWorker(), StepLog()
    verifier = Verifier(worker, ReplicaOptions(prefill_budget_s=BUDGET_S), clock=lambda: worker.now_s, observer=log)
    await verifier.warm_up()
    num_warm = len(worker.steps)
    # Someone is away from here on.
    await verifier.verify(VerifyRequest(make_round(PROMPT[:8], session_id="a"), NO_DRAFT, ()))
    prompt = asyncio.create_task(verifier.verify(VerifyRequest(make_round(PROMPT, session_id="b"), NO_DRAFT, ())))
    tokens = await _run_session(verifier, worker, prompt)
    answer = await prompt
    assert answer.choice_token_ids.tolist() == worker.greedy_continuation(PROMPT, 1)
    assert tokens == [*PROMPT[:8], *worker.greedy_continuation(PROMPT[:8], len(tokens) - 8)]
    prefill = [sum(len(part.token_ids) for part in plan.slices if not part.num_logit_rows) for plan in worker.steps]
    assert max(prefill) > BLOCK_TOKENS
    for plan, num_tokens in list(zip(worker.steps, prefill, strict=True))[num_warm:]:
        added_s = TOKEN_S * num_tokens + (FIXED_S if len(plan.slices) == 1 else 0.0)
        assert num_tokens <= BLOCK_TOKENS or added_s <= 1.1 * BUDGET_S
    assert sum(log.seconds) == pytest.approx(worker.now_s)
    assert sum(log.num_tokens) == sum(len(part.token_ids) for plan in worker.steps for part in plan.slices)
    await verifier.close()


async def test_a_prompt_that_can_delay_nobody_runs_in_one_step() -> None:
    worker = TimedWorker()
    verifier = Verifier(worker, ReplicaOptions(prefill_budget_s=BUDGET_S), clock=lambda: worker.now_s)
    await verifier.verify(VerifyRequest(make_round(PROMPT[:8], session_id="a"), NO_DRAFT, ()))
    await verifier.release(["a"])
    await verifier.verify(VerifyRequest(make_round(PROMPT, session_id="b"), NO_DRAFT, ()))
    assert [len(plan.slices[0].token_ids) for plan in worker.steps] == [8, len(PROMPT)]
    await verifier.close()


async def test_a_simulated_replica_keeps_the_budget_too() -> None:
    pair, log = PRESETS["8b-0.6b"], StepLog()
    target = SimulatedTarget(pair, max_gamma=16, observer=log)
    await target.verify(VerifyRequest(make_round(PROMPT[:8], session_id="a"), NO_DRAFT, ()))
    await target.verify(VerifyRequest(make_round(PROMPT, session_id="b"), NO_DRAFT, ()))
    await target.close()
    assert sum(log.num_tokens) == 8 + len(PROMPT)
    assert log.num_tokens[1] == BLOCK_TOKENS
    assert max(log.seconds) <= 50e-3
    assert log.seconds == [ModelledTime.step_s(pair.target, num_tokens) for num_tokens in log.num_tokens]
