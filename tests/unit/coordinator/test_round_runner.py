"""Rounds against real services: what is sent of a session, how often a failing draft is asked, who takes a target's
place, and what a round tells of itself."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace

import pytest

from coordinator.replicas.lateness import FIRST_PAUSE_S
from coordinator.replicas.pool import DRAFT, TARGET
from coordinator.round.draft_clock import LEAST_DEADLINE_S
from specdec import errors
from specdec.errors import Internal, InvalidRequest, KvMiss, ResourceExhausted, StaleEpoch, Unavailable
from specdec.types import Mode
from tests.support.coordinator_rig import PROMPT, eventually
from tests.support.round_rig import RoundRig

# ---- what is sent ------------------------------------------------------------------------------------------------


async def test_after_accepted_drafts_only_what_no_replica_has_run_is_sent() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds(gamma=3)
        outcomes = [await rounds.run() for _ in range(5)]
        assert [outcome.num_accepted for outcome in outcomes] == [3] * 5
        # The target has run its own three accepted tokens: the bonus token is new to it, to the draft its own last one
        # is too.
        assert [len(request.position.token_ids) for request in rig.targets[0].asked] == [len(PROMPT), 1, 1, 1, 1]
        assert [len(request.position.token_ids) for request in rig.drafts[0].asked] == [len(PROMPT), 2, 2, 2, 2]
        assert [outcome.num_cached_tokens for outcome in outcomes] == rig.targets[0].starts
        told = rounds.gamma.told[1:]
        assert [(times.num_prefilled, times.num_draft_prefilled) for times in told] == [(1, 2)] * 4


async def test_after_a_rejection_a_replica_is_sent_everything_from_the_rejected_token_on_and_misses_nothing() -> None:
    async with RoundRig(draft_salt=1) as rig:
        rounds = rig.rounds(gamma=3)
        lengths, outcomes = [], []
        for _ in range(30):
            lengths.append(len(rounds.tokens))
            outcomes.append(await rounds.run())
        accepted = [outcome.num_accepted for outcome in outcomes]
        assert set(accepted) == {0, 1, 2, 3}
        target_starts = [length + num for length, num in zip(lengths, accepted, strict=True)]
        draft_starts = [length + min(num, 2) for length, num in zip(lengths, accepted, strict=True)]
        assert rig.targets[0].starts == [0, *target_starts[:-1]]
        assert rig.drafts[0].starts == [0, *draft_starts[:-1]]
        assert rounds.tokens.tail(len(PROMPT)).tolist() == rig.of(TARGET)[0].worker.greedy_continuation(
            PROMPT, len(rounds.tokens) - len(PROMPT)
        )


async def test_a_replica_that_lost_the_session_is_sent_all_of_it_once_more() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds(gamma=3)
        await rounds.run()
        length = len(rounds.tokens)
        await rig.targets[0].release(["s"])
        await rig.drafts[0].release(["s"])
        again = await rounds.run()
        assert rig.targets[0].starts == [0, length - 1, 0]
        assert rig.drafts[0].starts == [0, length - 2, 0]
        assert (again.num_accepted, again.num_cached_tokens) == (3, 0)
        assert [len(request.position.token_ids) for request in rig.targets[0].asked[1:]] == [1, length]


async def test_a_target_that_loses_the_session_twice_in_a_round_is_unavailable() -> None:
    async with RoundRig(drafts=0) as rig:
        rounds = rig.rounds()
        rig.targets[0].error = KvMiss("gone", have=0)
        with pytest.raises(Unavailable, match="lost the session twice"):
            await rounds.run()
        assert len(rig.targets[0].asked) == 2


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK, Mode.COUPLED])
async def test_a_sampled_round_of_the_targets_own_model_is_accepted_whole(mode: Mode) -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds(temperature=1.0, mode=mode)
        outcomes = [await rounds.run() for _ in range(4)]
        assert [outcome.num_accepted for outcome in outcomes] == [3] * 4
        assert [len(request.position.token_ids) for request in rig.targets[0].asked] == [len(PROMPT), 1, 1, 1]


# ---- a draft that fails ------------------------------------------------------------------------------------------


async def test_a_draft_that_keeps_failing_is_asked_less_and_less_often_but_never_given_up() -> None:
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


async def test_a_draft_that_answers_again_is_asked_in_every_round_and_its_failures_are_forgotten() -> None:
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


async def test_a_draft_that_answers_without_a_token_has_not_failed_and_is_asked_in_every_round() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds()
        rig.drafts[0].drafts_nothing = True
        assert [(await rounds.run()).target_only_cause for _ in range(3)] == ["empty"] * 3
        rig.drafts[0].drafts_nothing = False
        assert (await rounds.run()).num_accepted == 3
        assert [times.num_asked for times in rounds.gamma.told] == [3] * 4


async def test_a_draft_that_is_gone_is_out_of_use_at_once_and_the_session_takes_another(
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


async def test_a_draft_that_hangs_costs_one_deadline_and_is_left_alone_until_it_is_heard_of() -> None:
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
        assert (told.num_asked, told.num_draft_tokens, told.draft_s) == (0, 0, 0.0)


async def test_the_only_draft_is_tried_again_by_one_session_after_a_pause_and_comes_back_with_its_answer() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds(draft_timeout_s=0.2)
        await rounds.run()
        gate = rig.drafts[0].gates["s"] = asyncio.Event()
        assert [(await rounds.run()).target_only_cause for _ in range(3)] == ["late", "no_replica", "no_replica"]
        replica = rig.pools.drafts("default")[0]
        assert replica.lateness.is_marked
        gate.set()
        async with asyncio.timeout(FIRST_PAUSE_S * 10):
            await eventually(lambda: replica.is_in_use)
        assert not replica.lateness.is_marked
        assert (await rounds.run()).num_accepted == 3


async def test_a_draft_that_answers_others_is_busy_and_its_lateness_counts_as_the_sessions_failure() -> None:
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
        assert replica.lateness.slack == 1.0  # the other session's answers keep their deadlines


async def test_a_draft_that_was_slow_is_waited_for_as_many_times_longer_as_its_slack_and_no_longer_than_allowed() -> (
    None
):
    async with RoundRig(draft_salt=0) as rig:
        for slack, allowed_s, least_s in ((8.0, 60.0, 8 * LEAST_DEADLINE_S), (1000.0, 0.3, 0.3)):
            rounds = rig.rounds(session_id=f"{slack}", draft_timeout_s=allowed_s)
            rig.drafts[0].gates[f"{slack}"] = asyncio.Event()
            replica = rig.pools.drafts("default")[0]
            replica.lateness.forgive()
            replica.lateness.slack = slack
            outcome = await asyncio.wait_for(rounds.run(), 30)
            assert outcome.target_only_cause == "late"
            assert least_s <= outcome.draft_s < 30


async def test_a_deadline_fits_what_is_sent_and_its_clock_learns_what_the_replica_had_to_run() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds(draft_timeout_s=30.0)
        for _ in range(3):
            await rounds.run()
        assert rounds.draft_clock.asked == rounds.draft_clock.told == [(3, len(PROMPT)), (3, 2), (3, 2)]
        # Nobody waits for what a hung replica would have to read: its answer brings it back.
        replica = rig.pools.drafts("default")[0]
        assert replica.lateness.note_late(asked_at=replica.link.heard_at, heard_at=0.0)
        await asyncio.sleep(FIRST_PAUSE_S)
        await rounds.run()
        assert rounds.draft_clock.asked[3:] == [(3, 0)]
        assert not replica.lateness.is_marked


# ---- how much is asked -------------------------------------------------------------------------------------------


async def test_no_more_is_asked_than_may_follow_and_than_the_draft_takes() -> None:
    async with RoundRig(draft_salt=0, max_gamma=4) as rig:
        rounds = rig.rounds(gamma=6)
        assert [(await rounds.run(remaining)).num_draft_tokens for remaining in (100, 5, 3, 2, 1)] == [4, 4, 2, 1, 0]
        assert [request.gamma for request in rig.drafts[0].asked] == [4, 4, 2, 1]
        assert rounds.gamma.told[-1].num_asked == 0


async def test_a_draft_is_asked_up_to_the_end_of_its_own_context_and_not_beyond() -> None:
    async with RoundRig(draft_salt=0, context=len(PROMPT) + 4) as rig:
        rounds = rig.rounds(gamma=3)
        causes = [(await rounds.run()).target_only_cause for _ in range(4)]
        # The last draft token needs no KV.
        assert [request.gamma for request in rig.drafts[0].asked] == [3, 1]
        assert causes[2:] == ["draft_context"] * 2


# ---- a target that fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [Internal("broken"), ResourceExhausted("full"), KvMiss("gone", have=0)], ids=lambda e: e.reason
)
async def test_a_target_that_fails_is_left_for_another_that_is_sent_everything(error: errors.SpecdecError) -> None:
    async with RoundRig(targets=2, draft_salt=0) as rig:
        rounds = rig.rounds()
        await rounds.run()
        length = len(rounds.tokens)
        serving, other = sorted(rig.targets, key=lambda target: -len(target.asked))
        serving.error = error
        outcome = await rounds.run()
        assert other.starts == [0]
        assert (outcome.num_accepted, outcome.num_cached_tokens) == (3, 0)
        serving.error = None
        await rounds.run()
        assert other.starts == [0, length + 3]  # it stays where its KV is now
        assert len(serving.asked) == (3 if isinstance(error, KvMiss) else 2)


async def test_a_failed_target_is_taken_to_hold_nothing_when_the_session_comes_back() -> None:
    async with RoundRig(targets=2, draft_salt=0) as rig:
        rounds = rig.rounds()
        await rounds.run()
        first, second = sorted(rig.targets, key=lambda target: -len(target.asked))
        first.error = Internal("broken")
        await rounds.run()
        first.error, second.error = None, Internal("broken")
        await rounds.run()
        assert first.starts[-1] == 0
        assert len(first.asked) == 3  # nothing was missing


async def test_a_target_that_is_gone_is_out_of_use_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with RoundRig(targets=2, drafts=0) as rig:
        rounds = rig.rounds()
        await rounds.run()
        serving = max(range(2), key=lambda index: len(rig.targets[index].asked))
        await rig.of(TARGET)[serving].kill()
        await rounds.run()
        address = rig.of(TARGET)[serving].address
        assert any(message.startswith(f"target replica {address} failed: {address}") for message in caplog.messages)
        assert [replica.is_alive for replica in rig.pools.targets()].count(False) == 1
        await rig.of(TARGET)[1 - serving].kill()
        with pytest.raises(Unavailable):
            await rounds.run()


async def test_a_session_that_another_coordinator_took_over_is_not_carried_to_another_target() -> None:
    async with RoundRig(targets=2, drafts=0) as rig:
        rounds = rig.rounds()
        await rounds.run()
        serving, other = sorted(rig.targets, key=lambda target: -len(target.asked))
        serving.error = StaleEpoch("taken over")
        with pytest.raises(StaleEpoch):
            await rounds.run()
        assert other.asked == []


async def test_the_fault_of_the_last_target_is_the_rounds_own() -> None:
    async with RoundRig(targets=2, drafts=0) as rig:
        rounds = rig.rounds()
        for target in rig.targets:
            target.error = ResourceExhausted("no blocks", reason="KV_EXHAUSTED")
        with pytest.raises(ResourceExhausted):
            await rounds.run()
        assert sorted(len(target.asked) for target in rig.targets) == [1, 1]


async def test_what_the_last_target_finds_wrong_with_its_question_is_told_as_its_fault_with_its_name() -> None:
    async with RoundRig(drafts=0) as rig:
        rounds = rig.rounds()
        rig.targets[0].error = InvalidRequest("temperature is 9")
        address = rig.of(TARGET)[0].address
        with pytest.raises(Internal, match=f"^target {address} refused a verification: INVALID_ARGUMENT ") as raised:
            await rounds.run()
        assert isinstance(raised.value.__cause__, InvalidRequest)


async def test_only_the_model_that_a_replica_said_it_serves_may_answer() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds()
        await rounds.run()
        draft = rig.pools.drafts("default")[0]
        assert draft.info is not None
        draft.info = replace(draft.info, model_fingerprint="another")
        assert (await rounds.run()).target_only_cause == "REPLICA_UNAVAILABLE"
        assert len(rig.drafts[0].asked) == 1
        target = rig.pools.targets()[0]
        assert target.info is not None
        target.info = replace(target.info, model_fingerprint="another")
        rounds.replicas.target_fingerprint = "another"
        with pytest.raises(Unavailable):
            await rounds.run()
        assert len(rig.targets[0].asked) == 2


# ---- what a round tells ------------------------------------------------------------------------------------------


async def test_rounds_of_others_at_the_same_target_are_told_apart_from_ones_own() -> None:
    async with RoundRig(draft_salt=0) as rig:
        mine, other = rig.rounds(gamma=3), rig.rounds(session_id="other", gamma=2)
        await mine.run()
        for _ in range(2):
            await other.run()
        await mine.run()
        await mine.run()
        told = [(times.num_others, times.num_other_rows) for times in mine.gamma.told]
        assert told == [(0, 0), (2, 6), (0, 0)]
        assert [times.num_draft_tokens for times in mine.gamma.told] == [3, 3, 3]


async def test_a_round_tells_what_it_asked_what_came_of_it_and_what_it_cost() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds(gamma=3)
        began = time.perf_counter()
        outcome = await rounds.run()
        assert 0 < outcome.draft_s < outcome.draft_s + outcome.verify_s <= time.perf_counter() - began
        told = rounds.gamma.told[0]
        assert (told.num_asked, told.num_draft_tokens, told.num_accepted) == (3, 3, 3)
        assert told.committed_len == told.num_prefilled == told.num_draft_prefilled == len(PROMPT)
        assert (told.draft_s, told.verify_s) == (outcome.draft_s, outcome.verify_s)
        assert told.step_tokens == len(PROMPT) + 3
        assert 0 < told.verify_forward_s < outcome.verify_s
        assert outcome.draft_pool == "default"
        assert outcome.wire_bytes > 0
        alone = await rounds.run(1)
        assert (alone.target_only_cause, alone.draft_s, len(alone.token_ids)) == ("off", 0.0, 1)
        told = rounds.gamma.told[1]
        assert (told.num_asked, told.draft_s, told.num_draft_prefilled, told.num_prefilled) == (0, 0.0, 0, 1)
        assert 0 < alone.wire_bytes < outcome.wire_bytes


async def test_what_is_asked_of_the_draft_and_of_the_target_both_count_on_the_wire() -> None:
    prompt = [5] * 400
    async with RoundRig(draft_salt=0) as rig:
        both = (await rig.rounds(prompt=prompt).run()).wire_bytes
        alone = (await rig.rounds(prompt=prompt, gamma=0).run()).wire_bytes
    assert alone > len(prompt)
    assert both > 1.5 * alone
