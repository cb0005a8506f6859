"""Requests routed to what targets draft with by themselves, and scores of those drafts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from coordinator.round.request_router import TRIAL_TOKENS
from coordinator.round.routing_table import MAX_TRIALS
from specdec.contract.errors import ResourceExhausted
from specdec.contract.types import SCORED_GAMMA
from specdec.engine.base import StepPlan
from tests.integration.test_routes import LEFT, add_drafts, ask, routes_of
from tests.support.coordinator_rig import Rig
from tests.support.table_services import start_service
from tests.support.table_worker import TableWorker

#: Time of a slow draft's step; a step of the table model takes about 1 ms.
SLOW_STEP_S = 0.02


def rounds_by_hand(prompt: tuple[int, ...], text: list[int], salt: int) -> tuple[int, int]:
    """Return the tested and accepted draft tokens in the rounds of eight that a greedy draft would have had."""
    draft, start, num_tested, num_accepted = TableWorker(salt=salt), 0, 0, 0
    while start < len(text):
        missing = text[start : start + SCORED_GAMMA]
        drafted = draft.greedy_continuation([*prompt, *text[:start]], len(missing))
        is_right = [ours == theirs for ours, theirs in zip(drafted, missing, strict=True)]
        right = [*is_right, False].index(False)
        num_tested += min(right + 1, len(missing))
        num_accepted += right
        start += right + 1
    return num_tested, num_accepted


async def test_local_drafts_are_scored_as_the_rounds_that_they_would_have_had() -> None:
    async with Rig(drafts=0, local_drafts={"early-exit": 2, "all": 0}) as rig:
        await add_drafts(rig, model=LEFT[0])
        coordinator = await rig.coordinator(routes=True)
        output, pools = await ask(coordinator, task="left", gamma=3)
        assert pools == {"model"}
        num_tested, num_accepted = rounds_by_hand(LEFT, output.token_ids, salt=2)
        routes = await routes_of(coordinator)
        (name,) = routes["early-exit"]
        assert routes["early-exit"][name].num_tested == pytest.approx(num_tested)
        assert routes["early-exit"][name].alpha == pytest.approx(num_accepted / num_tested)
        assert 0.0 < num_accepted / num_tested < 0.9
        assert routes["all"][name].alpha == pytest.approx(1.0)
        assert rig.target.engine.info().num_sessions == 0
        rig.target.engine.check_integrity()


async def test_requests_go_to_local_drafts_where_those_are_faster_and_give_the_same_tokens() -> None:
    async with Rig(drafts=0, local_drafts={"all": 0}) as rig:
        await add_drafts(rig, model=None)
        coordinator = await rig.coordinator(routes=True)
        expected = rig.target.worker.greedy_continuation(LEFT, 40)
        seen: list[set[str]] = []
        while len(seen) < 60 and seen[-2:] != [{"all"}, {"all"}]:
            output, pools = await ask(coordinator, task="left", gamma=4)
            assert output.token_ids == expected
            seen.append(pools)
        assert seen[-2:] == [{"all"}, {"all"}], seen
        assert seen[0] <= {"model"}


@pytest.mark.parametrize("has_model", [True, False])
async def test_local_drafts_of_a_target_that_never_has_time_to_score_get_a_trial(has_model: bool) -> None:
    async with Rig(drafts=0, local_drafts={"early-exit": 1, "all": 0}) as rig:
        never_idle(rig)
        if has_model:
            await add_drafts(rig, model=None)
        coordinator = await rig.coordinator(routes=True)
        expected = rig.target.worker.greedy_continuation(LEFT, 100)
        seen: list[set[str]] = []
        while len(seen) < 60 and seen[-2:] != [{"all"}, {"all"}]:
            output, pools = await ask(coordinator, task="left", gamma=4, max_new_tokens=len(expected))
            assert output.token_ids == expected
            seen.append(pools)
        assert seen[-2:] == [{"all"}, {"all"}], seen


async def test_a_trial_counts_beside_drafts_found_in_text() -> None:
    async with Rig(drafts=0, local_drafts={"all": 0}) as rig:
        never_idle(rig)
        await add_drafts(rig, model=None)
        coordinator = await rig.coordinator(routes=True, lookup=("suffix",))
        seen: set[str] = set()
        for index in range(6):
            prompt = (*LEFT, index)
            await ask(coordinator, prompt, task="short", gamma=4, max_new_tokens=30)  # what the next one finds
            output, pools = await ask(coordinator, prompt, task="left", gamma=4, max_new_tokens=100)
            assert output.token_ids == rig.target.worker.greedy_continuation(prompt, 100)
            seen |= pools
        assert {"suffix", "all"} <= seen
        (route,) = (route for name, route in (await routes_of(coordinator))["all"].items() if name.startswith("left"))
        assert route.is_chosen
        assert route.alpha == pytest.approx(1.0)


async def test_requests_that_want_no_draft_spend_no_trial() -> None:
    async with Rig(drafts=0, local_drafts={"all": 0}) as rig:
        never_idle(rig)
        await add_drafts(rig, model=None)
        coordinator = await rig.coordinator(routes=True)
        for _ in range(MAX_TRIALS + 2):
            await ask(coordinator, task="left", gamma=0, max_new_tokens=100)
        _, pools = await ask(coordinator, task="left", gamma=4, max_new_tokens=100)
        assert "all" in pools


async def test_a_slow_pool_gets_at_most_a_few_trials() -> None:
    async with Rig(drafts=0, local_drafts={"worse": 1}) as rig:
        never_idle(rig)
        slow_down(rig.target.worker, "worse")
        await add_drafts(rig, model=LEFT[0])
        coordinator = await rig.coordinator(routes=True)
        # The first request is too short for a trial, even where its first span is known not to be scored in time.
        used = []
        for num_tokens in (2 * TRIAL_TOKENS, *[120] * 7):
            output, _ = await ask(coordinator, task="left", gamma=4, max_new_tokens=num_tokens)
            used.append({detail.draft_pool for detail in output.details})
        assert sum("worse" in pools for pools in used) in range(1, MAX_TRIALS + 1)
        assert "worse" not in used[0] | used[-1]


def slow_down(worker: TableWorker, local_draft: str) -> None:
    """Make each step of a local draft take much longer than a step with its call, on any machine."""
    execute = worker.execute

    def execute_slowly(plan: StepPlan) -> torch.Tensor:
        if plan.local_draft == local_draft:
            time.sleep(SLOW_STEP_S)
        return execute(plan)

    worker.execute = execute_slowly  # type: ignore[method-assign]


def never_idle(rig: Rig) -> None:
    """Keep the target busy with other calls whenever it is to score."""

    async def score(asked: Any) -> Any:
        raise ResourceExhausted("this replica is busy with other calls", reason="REPLICA_BUSY")

    rig.target.engine.score = score  # type: ignore[method-assign]


async def test_local_drafts_alone_are_routed_to_and_compared() -> None:
    async with Rig(drafts=0, local_drafts={"early-exit": 1, "all": 0}) as rig:
        coordinator = await rig.coordinator(routes=True)
        seen: list[set[str]] = []
        while len(seen) < 60 and seen[-2:] != [{"all"}, {"all"}]:
            seen.append((await ask(coordinator, task="left", gamma=4))[1])
        assert seen[0] <= {"early-exit"}
        assert seen[-2:] == [{"all"}, {"all"}], seen


async def test_a_session_leaves_local_drafts_that_no_target_serves_any_more() -> None:
    async with Rig(targets=0, drafts=0) as rig:
        rig.services = [await start_service("target", salt=0, local_drafts={"all": 0})]
        await add_drafts(rig, model=None)
        rig.services.append(await start_service("target", salt=0))
        coordinator = await rig.coordinator(routes=True)
        while (await ask(coordinator, task="left", gamma=4))[1] != {"all"}:
            pass
        await rig.services[0].kill()
        for _ in range(2):
            output, pools = await ask(coordinator, task="left", gamma=4)
            assert output.token_ids == rig.services[-1].worker.greedy_continuation(LEFT, 40)
            assert pools <= {"model"}
            assert output.finished.stats.num_draft_tokens > 10
            await coordinator.pools.poll()
