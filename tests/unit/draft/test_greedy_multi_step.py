"""Greedy multi-step drafts equal single steps, and the cases in which steps are single."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from draft_service.fan_out_policy import Predraft
from draft_service.proposer import DraftOptions, Proposer
from specdec.contract.errors import Internal
from specdec.contract.types import DrawRule, Proposal, ProposeRequest, SamplingFilters
from specdec.engine.base import StepPlan
from specdec.engine.loop.steps import LONGEST_HOST_RUN_S
from specdec.engine.schedule.step_times import StepLoad
from tests.support.multi_step_worker import GreedyMultiStepWorker
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

TOKENS = [3 + index * 7 % 20 for index in range(60)]
GAMMA = 5
GREEDY = SamplingFilters(temperature=0.0)


@dataclass
class Rig:
    """A replica whose steps take `step_s`, which it has measured."""

    step_s: float = 0.001
    token_s: float = 0.0
    worker: TableWorker = field(default_factory=GreedyMultiStepWorker)
    options: DraftOptions = field(default_factory=DraftOptions)
    now_s: float = 0.0
    num_rounds: int = 0

    async def __aenter__(self) -> Rig:
        execute = self.worker.execute

        def slowly(plan: StepPlan):
            self.now_s += self.step_s + self.token_s * sum(len(piece.token_ids) for piece in plan.slices)
            return execute(plan)

        self.worker.execute = slowly  # type: ignore[method-assign]
        self._proposer = Proposer(self.worker, drafting=self.options, clock=lambda: self.now_s)
        await self.propose(SamplingFilters(temperature=0.0, repetition_penalty=1.5))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._proposer.check_integrity()
        await self._proposer.close()

    async def propose(
        self,
        filters: SamplingFilters = GREEDY,
        num_tokens: int = 21,
        draw_rule: DrawRule = DrawRule.DISTRIBUTION,
        session: str = "s",
        gamma: int = GAMMA,
    ) -> Proposal:
        self.num_rounds += 1
        position = make_round(TOKENS[:num_tokens], filters=filters, output_start=20, round_id=self.num_rounds,
                           draw_rule=draw_rule, session_id=session)  # fmt: skip
        return await self._proposer.propose(ProposeRequest(position, gamma))

    def predict_step_s(self, load: StepLoad) -> float:
        return self._proposer._engine_loop._scheduler.predict_step_s(load)

    @property
    def runs(self) -> list[int]:
        assert isinstance(self.worker, GreedyMultiStepWorker)
        return self.worker.runs


@pytest.mark.parametrize("num_end_tokens", [0, 2, 8, 20])
async def test_a_multi_step_draft_equals_single_steps(num_end_tokens: int) -> None:
    filters = SamplingFilters(temperature=0.0, end_token_ids=tuple(range(3, 3 + num_end_tokens)))
    async with Rig() as rig, Rig(worker=TableWorker()) as plain:
        for num_tokens in (21, 23, 22, 36, 37):  # 22: a round that was rejected
            actual, expected = await rig.propose(filters, num_tokens), await plain.propose(filters, num_tokens)
            assert actual.draft_token_ids.tolist() == expected.draft_token_ids.tolist()
            assert (actual.kv_len, actual.supports) == (expected.kv_len, expected.supports)
        assert rig.runs == [GAMMA] * 5


@pytest.mark.parametrize(
    ("filters", "draw_rule"),
    [
        (SamplingFilters(temperature=0.7), DrawRule.DISTRIBUTION),
        (SamplingFilters(temperature=0.7), DrawRule.COUPLED),
        (SamplingFilters(temperature=0.0, presence_penalty=0.5), DrawRule.DISTRIBUTION),
        (SamplingFilters(temperature=0.0, logit_bias={4: 9.0}), DrawRule.DISTRIBUTION),
        (SamplingFilters(temperature=0.0, min_new_tokens=9, end_token_ids=(5, 6, 7)), DrawRule.DISTRIBUTION),
    ],
)
async def test_tokens_that_are_not_the_models_argmax_are_drawn_in_single_steps(
    filters: SamplingFilters, draw_rule: DrawRule
) -> None:
    async with Rig() as rig, Rig(worker=TableWorker()) as plain:
        actual = await rig.propose(filters, draw_rule=draw_rule)
        expected = await plain.propose(filters, draw_rule=draw_rule)
        assert actual.draft_token_ids.tolist() == expected.draft_token_ids.tolist()
        assert rig.runs == []


async def test_sessions_share_a_multi_step_draft_unless_one_of_them_is_not_greedy() -> None:
    for others, num_runs in (((GREEDY, GREEDY), 1), ((GREEDY, SamplingFilters(temperature=0.9)), 0)):
        drafts = []
        async with Rig() as rig, Rig(worker=TableWorker()) as plain:
            for one in (rig, plain):
                for index, filters in enumerate((*others, GREEDY)):  # so that each has few new tokens
                    await one.propose(filters, 20 + index, session=f"s{index}")
                before = len(getattr(one.worker, "runs", ()))
                one.worker.gate.clear()
                while one.worker.entered.acquire(blocking=False):  # entered by the steps before
                    pass
                first = asyncio.ensure_future(one.propose(GREEDY, 22, session="first", gamma=1))
                await asyncio.to_thread(one.worker.entered.acquire)
                calls = [asyncio.ensure_future(one.propose(filters, 22 + index, session=f"s{index}"))
                         for index, filters in enumerate((*others, GREEDY))]  # fmt: skip
                await asyncio.sleep(0.05)
                one.worker.gate.set()
                answers = await asyncio.gather(first, *calls)
                drafts.append([answer.draft_token_ids.tolist() for answer in answers])
                if one is rig:
                    assert rig.runs[before:] == [GAMMA] * num_runs
        assert drafts[0] == drafts[1]
        assert len({tuple(draft) for draft in drafts[0]}) == 4


async def test_multi_step_drafts_are_measured_for_predicted_step_times() -> None:
    """A step takes a millisecond, plus one per token."""
    async with Rig(0.001, token_s=0.001) as rig:
        await rig.propose(num_tokens=22)
        rig.worker.steps.clear()
        for num_tokens in [25, 28, 31, 34, 37, 40, 43, 46] * 4:
            await rig.propose(num_tokens=num_tokens)
        assert rig.runs
        predicted_s = rig.predict_step_s(StepLoad(num_tokens=1, num_context_tokens=40))
        assert 0.0015 < predicted_s < 0.006  # 2 ms, with a margin upwards
        rig.runs.clear()
        await rig.propose(num_tokens=60, session="new")  # a prompt with some known blocks
        assert rig.runs[:1] == [GAMMA - 1]  # after a prefill step


@pytest.mark.parametrize(("step_s", "num_runs"), [(LONGEST_HOST_RUN_S / 20, 1), (LONGEST_HOST_RUN_S / 2, 0)])
async def test_a_call_that_arrives_meanwhile_waits_for_no_long_multi_step_draft(step_s: float, num_runs: int) -> None:
    async with Rig(step_s) as rig:
        await rig.propose()
        assert len(rig.runs) == num_runs


async def test_steps_are_single_while_top_tokens_are_noted() -> None:
    async with Rig(options=DraftOptions(predraft=Predraft.ON)) as rig:
        await rig.propose()
        assert rig.runs == []


async def test_logits_that_are_not_finite_fail_the_call() -> None:
    async with Rig() as rig:
        assert isinstance(rig.worker, GreedyMultiStepWorker)
        third = rig.worker.greedy_continuation(TOKENS[:21], 3)[2]
        rig.worker.non_finite[third] = float("nan")
        with pytest.raises(Internal):
            await rig.propose()
        rig.worker.non_finite.clear()
        assert len((await rig.propose()).draft_token_ids) == GAMMA


async def test_a_crash_of_a_multi_step_draft_fails_its_call_and_the_replica_continues() -> None:
    async with Rig() as rig:
        rig.worker.fail_next = RuntimeError("a kernel failed")
        with pytest.raises(Internal):
            await rig.propose()
        assert len((await rig.propose()).draft_token_ids) == GAMMA
        assert rig.runs == [GAMMA, GAMMA]
