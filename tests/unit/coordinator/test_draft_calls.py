"""Rounds whose draft fails, hangs, is busy or returns no token: how long they wait, and how often they call it."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from coordinator.replicas.replica import DRAFT, FIRST_PAUSE_S, MAX_SLACK
from coordinator.round.draft_calls import RUN_PORTION
from coordinator.round.draft_deadline import LEAST_DEADLINE_S
from specdec.contract.errors import Internal
from tests.support.coordinator_rig import PROMPT, eventually
from tests.support.round_rig import RoundRig


async def test_a_draft_that_keeps_failing_is_called_less_and_less_often_but_never_given_up() -> None:
    async with RoundRig() as rig:
        rounds = rig.rounds()
        rig.drafts[0].error = Internal("no draft")
        asked_in = []
        for index in range(260):
            before = len(rig.drafts[0].asked)
            outcome = await rounds.run()
            assert (outcome.num_draft_tokens, len(outcome.token_ids)) == (0, 1)
            if len(rig.drafts[0].asked) > before:
                asked_in.append(index)
            assert outcome.target_only_cause == ("INTERNAL" if asked_in[-1] == index else "paused")
        assert asked_in == [0, 1, 3, 7, 15, 31, 63, 127, 191, 255]


async def test_a_draft_that_answers_again_is_called_in_every_round_and_its_failures_are_forgotten() -> None:
    async with RoundRig() as rig:
        rounds = rig.rounds()
        draft = rig.drafts[0]
        for _ in range(2):
            draft.error = Internal("no draft")
            assert [(await rounds.run()).target_only_cause for _ in range(4)] == [
                "INTERNAL", "INTERNAL", "paused", "INTERNAL",
            ]  # fmt: skip
            assert [(await rounds.run()).target_only_cause for _ in range(3)] == ["paused"] * 3
            draft.error = None
            assert [(await rounds.run()).target_only_cause for _ in range(3)] == [""] * 3


async def test_a_draft_that_answers_without_a_token_has_not_failed_and_is_called_in_every_round() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds()
        rig.drafts[0].drafts_nothing = True
        assert [(await rounds.run()).target_only_cause for _ in range(3)] == ["empty"] * 3
        rig.drafts[0].drafts_nothing = False
        assert (await rounds.run()).num_accepted == 3
        assert [times.num_requested for times in rounds.gamma.told] == [3] * 4


async def test_a_dead_draft_is_out_of_use_at_once_and_the_session_gets_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with RoundRig(drafts=2, draft_salt=0) as rig:
        rounds = rig.rounds()
        await rounds.run()
        serving, other = sorted(range(2), key=lambda index: -len(rig.drafts[index].asked))
        await rig.of(DRAFT)[serving].kill()
        outcome = await rounds.run()
        assert outcome.target_only_cause == "REPLICA_UNAVAILABLE"
        address = rig.of(DRAFT)[serving].address
        assert any(message.startswith(f"draft replica {address} failed: {address}") for message in caplog.messages)
        assert [replica.is_alive for replica in rig.pools.drafts("default")].count(False) == 1
        assert (await rounds.run()).num_accepted == 3
        await rig.of(DRAFT)[other].kill()
        assert (await rounds.run()).target_only_cause == "REPLICA_UNAVAILABLE"
        assert (await rounds.run()).target_only_cause == "no_replica"


async def test_a_session_whose_draft_fails_goes_to_another_draft_of_its_pool() -> None:
    async with RoundRig(drafts=2, draft_salt=0) as rig:
        rounds = rig.rounds()
        await rounds.run()
        serving, other = sorted(rig.drafts, key=lambda draft: -len(draft.asked))
        serving.error = Internal("no draft")
        assert (await rounds.run()).target_only_cause == "INTERNAL"
        assert (await rounds.run()).num_accepted == 3
        assert (len(serving.asked), len(other.asked)) == (2, 1)
        assert other.starts == [0]


async def test_a_draft_that_hangs_costs_one_deadline_and_is_out_of_use_until_it_answers() -> None:
    async with RoundRig(drafts=2, draft_salt=0) as rig:
        rounds = rig.rounds(draft_timeout_s=0.2)
        await rounds.run()
        serving, other = sorted(rig.drafts, key=lambda draft: -len(draft.asked))
        serving.gates["s"] = asyncio.Event()
        late = await rounds.run()
        assert late.target_only_cause == "late"
        assert late.draft_s >= 0.1
        assert [(await rounds.run()).num_accepted for _ in range(6)] == [3] * 6
        assert (len(serving.asked), len(other.asked)) == (2, 6)
        told = rounds.gamma.told[1]
        assert (told.num_requested, told.num_draft_tokens, told.draft_s) == (0, 0, 0.0)


async def test_the_only_draft_is_tried_again_by_one_session_after_a_pause_and_returns_with_its_answer() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds(draft_timeout_s=0.2)
        await rounds.run()
        gate = rig.drafts[0].gates["s"] = asyncio.Event()
        assert [(await rounds.run()).target_only_cause for _ in range(3)] == ["late", "no_replica", "no_replica"]
        replica = rig.pools.drafts("default")[0]
        assert replica.health.is_marked
        gate.set()
        async with asyncio.timeout(FIRST_PAUSE_S * 10):
            await eventually(lambda: replica.is_in_use)
        assert not replica.health.is_marked
        later = [(await rounds.run()).num_accepted for _ in range(RUN_PORTION)]  # a run is open by now
        assert later[-1] == 3


async def test_a_late_draft_that_answers_other_sessions_counts_as_a_failure_of_this_session_only() -> None:
    async with RoundRig(draft_salt=0) as rig:
        late = rig.rounds(draft_timeout_s=0.5)
        await late.run()
        rig.drafts[0].gates["s"] = asyncio.Event()
        causes = []
        for index in range(3):
            rounds = asyncio.ensure_future(late.run())
            others = itertools.count()
            while not rounds.done():
                await rig.rounds(session_id=f"other-{index}-{next(others)}").run()
            causes.append((await rounds).target_only_cause)
        assert causes == ["late", "late", "paused"]
        replica = rig.pools.drafts("default")[0]
        assert replica.is_in_use
        assert replica.health.slack == 1.0  # the other session's answers keep their deadlines


async def test_a_slow_draft_gets_its_deadline_times_its_slack_up_to_the_draft_timeout() -> None:
    async with RoundRig(draft_salt=0) as rig:
        for slack, allowed_s, least_s in ((3.0, 60.0, 3 * LEAST_DEADLINE_S), (1000.0, 0.3, 0.3)):
            rounds = rig.rounds(session_id=f"{slack}", draft_timeout_s=allowed_s)
            rig.drafts[0].gates[f"{slack}"] = asyncio.Event()
            replica = rig.pools.drafts("default")[0]
            replica.health.reset()
            replica.health.slack = slack
            outcome = await asyncio.wait_for(rounds.run(), 30)
            assert outcome.target_only_cause == "late"
            assert least_s <= outcome.draft_s < 30


async def test_a_deadline_fits_the_tokens_that_are_sent_and_learns_from_the_tokens_that_were_run() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds(draft_timeout_s=30.0)
        replica = rig.pools.drafts("default")[0]
        for _ in range(3):
            replica.health.slack = MAX_SLACK  # a starved machine must not miss a deadline
            await rounds.run()
        assert rounds.draft_deadline.asked == rounds.draft_deadline.told == [(3, len(PROMPT)), (3, 2), (3, 2)]
        # The deadline of a hung replica has no time for prefill: its answer brings it back.
        assert replica.health.note_late(called_at=replica.link.heard_at, heard_at=0.0)
        await eventually(lambda: replica.is_in_use)
        replica.health.slack = MAX_SLACK
        assert (await rounds.run()).num_accepted == 3
        assert rounds.draft_deadline.asked[3:] == [(3, 0)]
        assert not replica.health.is_marked
