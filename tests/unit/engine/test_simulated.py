"""Simulated engines: steps in virtual time, chosen distributions, and the position protocol of the real engines."""

import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from specdec.contract.errors import InvalidRequest, KvMiss, StaleEpoch
from specdec.contract.types import (
    WEIGHT_TOTAL,
    DrawRule,
    ProposeRequest,
    SamplingFilters,
    SessionPosition,
    VerifyRequest,
)
from specdec.core.random import DrawKey
from specdec.core.rejection import acceptance_bound, verify_rejection
from specdec.engine.schedule.scheduler import Scheduler
from specdec.engine.simulated.device import Branches, ModelledTime, SimulatedDevice, Work
from specdec.engine.simulated.engines import SimulatedDraft, SimulatedTarget
from specdec.engine.simulated.simulated_pair import PRESETS, SimulatedPair, simulated_pair
from specdec.engine.simulated.text import SUPPORT_SIZE, VOCABULARY_SIZE, simulated_vocabulary

STEP_S = 1.0
OUTCOMES = range(11, 16)
AT_ONCE = replace(PRESETS["70b-1b"], target=ModelledTime(0.0, 0.0), draft=ModelledTime(0.0, 0.0))


class VirtualTimeline:
    """A timeline without a clock: it runs all actions in the order of their times."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def at(self, due_s: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (due_s, next(self._order), action))

    def run(self) -> None:
        while self._events:
            due_s, _, action = heapq.heappop(self._events)
            action(due_s)


class Bench:
    """A device in virtual time, and the time at which each of its calls ended."""

    def __init__(self) -> None:
        self.timeline = VirtualTimeline()
        self.device = SimulatedDevice(ModelledTime(STEP_S, 0.0), self.timeline, Scheduler())
        self.ended: dict[str, float] = {}

    def call(self, name: str, at: float, num_steps: int, session_id: str = "", **kwargs: object) -> None:
        finish = lambda now_s: self.ended.__setitem__(name, now_s)  # noqa: E731
        work = Work(session_id or name, 1, num_steps, kwargs.pop("committed_len", 11), finish, **kwargs)
        self.device.submit(work, at)


def test_a_lone_draft_takes_one_step_a_token() -> None:
    bench = Bench()
    bench.call("one", at=0.25, num_steps=4)
    bench.timeline.run()
    assert bench.ended == {"one": 4.25}


def test_a_call_that_waits_when_a_step_begins_joins_it() -> None:
    bench = Bench()
    bench.call("first", at=0.0, num_steps=2)
    bench.call("second", at=0.5, num_steps=2)
    bench.timeline.run()
    assert bench.ended == {"first": 2.0, "second": 3.0}


@pytest.mark.parametrize(
    ("is_hit", "arrival", "ended"),
    [
        (True, 9.0, 9.0),  # all of it is drafted
        (True, 4.5, 6.0),  # the current step drafts the third token, one is left
        (False, 4.5, 9.0),  # the current step is lost
        (False, 9.0, 13.0),
    ],
)
def test_a_hit_uses_its_branch_and_a_miss_waits_for_the_current_step(
    is_hit: bool, arrival: float, ended: float
) -> None:
    bench = Bench()
    # It ends at 1; the steps of its branches at 2, 3, 4, 5 and 6.
    bench.call("before", at=0.0, num_steps=1, session_id="s", branches=Branches(40, 5, OUTCOMES))
    bench.call("after", at=arrival, num_steps=4, session_id="s", is_hit=is_hit)
    bench.timeline.run()
    assert bench.ended["after"] == ended


def test_an_outcome_that_was_not_branched_is_a_miss() -> None:
    bench = Bench()
    bench.call("before", at=0.0, num_steps=1, session_id="s", branches=Branches(40, 5, OUTCOMES))
    bench.call("after", at=9.0, num_steps=4, session_id="s", is_hit=True, committed_len=OUTCOMES.stop)
    bench.timeline.run()
    assert bench.ended["after"] == 13.0


def test_branches_wait_while_another_session_is_served() -> None:
    bench = Bench()
    bench.call("other", at=0.0, num_steps=6)
    bench.call("before", at=0.0, num_steps=1, session_id="s", branches=Branches(40, 5, OUTCOMES))
    bench.call("after", at=5.5, num_steps=4, session_id="s", is_hit=True)
    bench.timeline.run()
    assert bench.ended["other"] == 6.0
    assert bench.ended["after"] == 10.0


def a_round(round_id: int = 0, temperature: float = 0.0, num_tokens: int = 8, seed: int = 5) -> SessionPosition:
    return SessionPosition(
        session_id="s",
        epoch=1,
        round_id=round_id,
        start=0,
        prefix_hash=b"",
        token_ids=np.arange(1, num_tokens + 1, dtype=np.uint32),
        filters=SamplingFilters(temperature=temperature),
        seed=seed,
        turn=0,
        output_start=8,
        draw_rule=DrawRule.DISTRIBUTION,
    )


@asynccontextmanager
async def engines(pair: SimulatedPair = AT_ONCE) -> AsyncIterator[tuple[SimulatedDraft, SimulatedTarget]]:
    draft, target = SimulatedDraft(pair, max_gamma=16), SimulatedTarget(pair, max_gamma=16)
    try:
        yield draft, target
    finally:
        await draft.close()
        await target.close()
        draft.check_integrity()
        target.check_integrity()


async def test_greedy_drafts_agree_with_the_target_with_a_rate_near_alpha() -> None:
    num_agreed, num_rounds, gamma = 0, 100, 16
    async with engines() as (draft, target):
        for index in range(num_rounds):
            position = a_round(round_id=index, num_tokens=8 + gamma * index)
            proposal = await draft.propose(ProposeRequest(position, gamma))
            answer = await target.verify(VerifyRequest(position, proposal.draft_token_ids, ()))
            num_agreed += int((answer.choice_token_ids[:-1] == proposal.draft_token_ids).sum())
    # 1,600 draws of 0.9 have a standard error of 0.0075; one seed, one outcome.
    assert num_agreed / (num_rounds * gamma) == pytest.approx(0.9, abs=0.03)


async def test_a_sampled_round_accepts_each_draft_token_with_probability_alpha() -> None:
    position = a_round(temperature=1.0)
    async with engines() as (draft, target):
        proposal = await draft.propose(ProposeRequest(position, 4))
        supports = tuple(support.token_ids for support in proposal.supports)
        answer = await target.verify(VerifyRequest(position, proposal.draft_token_ids, supports))
    for support, row in zip(proposal.supports, answer.rows, strict=False):
        assert len(support.token_ids) == SUPPORT_SIZE
        assert int(row.weights.sum(dtype=np.int64)) == WEIGHT_TOTAL
        assert 0 < row.tail_token_id < VOCABULARY_SIZE
        assert row.tail_token_id not in support.token_ids
        bounds = [acceptance_bound(entry, support, row) / WEIGHT_TOTAL for entry in range(SUPPORT_SIZE)]
        assert bounds == pytest.approx([0.9] * SUPPORT_SIZE, abs=1e-3)
    decision = verify_rejection(proposal.draft_token_ids, proposal.supports, answer.rows, DrawKey(5, 0, 8))
    assert 1 <= len(decision.token_ids) <= 5


async def test_the_distribution_is_the_same_through_another_support() -> None:
    position = a_round(temperature=1.0)
    async with engines() as (draft, target):
        proposal = await draft.propose(ProposeRequest(position, 1))
        support = proposal.supports[0]
        own = (await target.verify(VerifyRequest(position, proposal.draft_token_ids, (support.token_ids,)))).rows[0]
        part = support.token_ids[10:20]
        seen = (await target.verify(VerifyRequest(position, proposal.draft_token_ids, (part,)))).rows[0]
    assert seen.weights[:-1].astype(int) == pytest.approx(own.weights[10:20].astype(int), abs=40)
    assert int(seen.weights.sum(dtype=np.int64)) == WEIGHT_TOTAL
    assert seen.tail_token_id not in part


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_pre_drafting_and_earlier_rounds_change_no_token(temperature: float) -> None:
    drafts = []
    for predrafts in (True, False):
        async with engines(replace(AT_ONCE, predrafts=predrafts)) as (draft, _):
            if predrafts:
                await draft.propose(ProposeRequest(a_round(temperature=temperature), 4))
            proposal = await draft.propose(ProposeRequest(a_round(1, temperature, num_tokens=10), 4))
            drafts.append(proposal.draft_token_ids.tolist())
    assert drafts[0] == drafts[1]


async def test_alpha_depends_on_the_output_position() -> None:
    pair = simulated_pair("simulated:70b-1b,alpha=1/0,stretch=4")
    async with engines(replace(AT_ONCE, text=pair.text)) as (draft, target):
        proposal = await draft.propose(ProposeRequest(a_round(), 8))
        answer = await target.verify(VerifyRequest(a_round(), proposal.draft_token_ids, ()))
    agrees = (answer.choice_token_ids[:-1] == proposal.draft_token_ids).tolist()
    assert agrees == [True] * 4 + [False] * 4


async def test_positions_follow_the_protocol_of_the_real_engines() -> None:
    async with engines() as (draft, _):
        first = await draft.propose(ProposeRequest(a_round(round_id=1), 4))
        assert await draft.propose(ProposeRequest(a_round(round_id=1), 4)) == first
        assert first.kv_len == 8 + 4 - 1
        with pytest.raises(KvMiss):
            await draft.propose(ProposeRequest(replace(a_round(2), start=8, prefix_hash=b"x" * 16), 4))
        with pytest.raises(StaleEpoch):
            await draft.propose(ProposeRequest(a_round(round_id=0), 4))


@pytest.mark.parametrize(
    "model", ["simulated:1t", "simulated:70b-1b,speed=9", "simulated:70b-1b,alpha=2", "simulated:70b-1b,predraft=maybe"]
)
def test_an_unknown_pair_or_option_is_refused_by_name(model: str) -> None:
    with pytest.raises(InvalidRequest, match="simulated"):
        simulated_pair(model)


def test_presets_have_the_times_of_their_models() -> None:
    pair = PRESETS["70b-1b"]
    assert pair.verify_s(0) == pytest.approx(18.5e-3)
    assert pair.verify_s(4) == pytest.approx(20e-3)
    assert pair.draft_step_s() == pytest.approx(2.5e-3)
    assert pair.branched_step_s(4) == pytest.approx(3e-3, rel=0.01)


def test_the_vocabulary_has_every_id_once() -> None:
    assert sorted(simulated_vocabulary().values()) == list(range(VOCABULARY_SIZE))
