"""Rounds against real services: the tokens that are sent, the failover of a target, and what a round reports.

Drafts that fail are in `test_draft_calls`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.replicas.replica import TARGET
from specdec.contract import errors
from specdec.contract.errors import Internal, InvalidRequest, KvMiss, ResourceExhausted, StaleEpoch, Unavailable
from specdec.contract.types import Mode
from specdec.core.block import verify_block
from specdec.core.random import DrawKey
from specdec.core.rejection import Decision, verify_rejection
from tests.support.coordinator_rig import PROMPT, eventually
from tests.support.round_rig import SEED, RoundRig, Rounds

# ---- what is sent ------------------------------------------------------------------------------------------------


async def test_after_accepted_drafts_only_tokens_that_the_replica_has_not_run_are_sent() -> None:
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


async def test_every_request_carries_its_session_round_seed_and_filters() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds(temperature=0.5, epoch=7, turn=3, num_logprobs=2)
        for _ in range(2):
            await rounds.run()
        for engine in (rig.drafts[0], rig.targets[0]):
            asked = [request.position for request in engine.asked]
            assert [(at.session_id, at.epoch, at.round_id, at.seed, at.turn, at.output_start) for at in asked] == [
                ("s", 7, round_id, SEED, 3, len(PROMPT)) for round_id in range(2)
            ]
            assert {at.filters.temperature for at in asked} == {0.5}
        assert [request.num_logprobs for request in rig.targets[0].asked] == [2, 2]


async def test_after_a_rejection_a_replica_is_sent_all_tokens_from_the_rejected_one_on() -> None:
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


async def test_a_replica_that_lost_the_session_is_sent_all_of_it_again() -> None:
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
async def test_a_sampled_draft_of_the_targets_own_model_is_accepted_as_a_whole(mode: Mode) -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds(temperature=1.0, mode=mode)
        outcomes = [await rounds.run() for _ in range(4)]
        assert [outcome.num_accepted for outcome in outcomes] == [3] * 4
        assert [len(request.position.token_ids) for request in rig.targets[0].asked] == [len(PROMPT), 1, 1, 1]


@pytest.mark.parametrize(
    ("mode", "rule", "other"),
    [(Mode.REJECTION, verify_rejection, verify_block), (Mode.BLOCK, verify_block, verify_rejection)],
)
async def test_a_sampled_round_is_decided_by_the_rule_of_its_mode_with_draws_keyed_by_where_it_began(
    mode: Mode, rule: Callable[..., Decision], other: Callable[..., Decision]
) -> None:
    num_unlike = 0
    async with RoundRig(draft_salt=1) as rig:
        rounds = rig.rounds(temperature=1.0, mode=mode)
        for _ in range(30):
            key = DrawKey(SEED, 0, len(rounds.tokens))
            outcome = await rounds.run()
            proposal, verification = rig.drafts[0].answered[-1], rig.targets[0].answered[-1]
            laws = (proposal.draft_token_ids, proposal.supports, verification.rows, key)
            assert outcome.token_ids == rule(*laws).token_ids
            num_unlike += outcome.token_ids != other(*laws).token_ids
    assert num_unlike > 0


# ---- how much is asked -------------------------------------------------------------------------------------------


async def test_gamma_is_at_most_the_remaining_tokens_and_the_drafts_own_limit() -> None:
    async with RoundRig(draft_salt=0, max_gamma=4) as rig:
        rounds = rig.rounds(gamma=6)
        assert [(await rounds.run(remaining)).num_draft_tokens for remaining in (100, 5, 3, 2, 1)] == [4, 4, 2, 1, 0]
        assert [request.gamma for request in rig.drafts[0].asked] == [4, 4, 2, 1]
        assert rounds.gamma.told[-1].num_requested == 0


async def test_a_draft_is_called_up_to_the_end_of_its_own_context_and_not_beyond() -> None:
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
async def test_a_target_that_fails_is_replaced_by_another_that_is_sent_all_tokens(error: errors.SpecdecError) -> None:
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


async def test_a_failed_target_is_assumed_to_hold_nothing_when_the_session_returns() -> None:
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


async def test_a_dead_target_is_out_of_use_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with RoundRig(targets=2, drafts=0) as rig:
        rounds = rig.rounds()
        await rounds.run()
        serving = max(range(2), key=lambda index: len(rig.targets[index].asked))
        await rig.of(TARGET)[serving].kill()
        await rounds.run_beyond_a_run()
        address = rig.of(TARGET)[serving].address
        assert any(message.startswith(f"target replica {address} failed: {address}") for message in caplog.messages)
        assert [replica.is_alive for replica in rig.pools.targets()].count(False) == 1
        await rig.of(TARGET)[1 - serving].kill()
        with pytest.raises(Unavailable):
            await rounds.run_beyond_a_run()


async def test_a_session_that_another_coordinator_took_over_is_not_sent_to_another_target() -> None:
    async with RoundRig(targets=2, drafts=0) as rig:
        rounds = rig.rounds()
        await rounds.run()
        serving, other = sorted(rig.targets, key=lambda target: -len(target.asked))
        serving.error = StaleEpoch("taken over")
        with pytest.raises(StaleEpoch):
            await rounds.run_beyond_a_run()
        assert other.asked == []


async def test_the_error_of_the_last_target_is_the_error_of_the_round() -> None:
    async with RoundRig(targets=2, drafts=0) as rig:
        rounds = rig.rounds()
        for target in rig.targets:
            target.error = ResourceExhausted("no blocks", reason="KV_EXHAUSTED")
        with pytest.raises(ResourceExhausted):
            await rounds.run()
        assert sorted(len(target.asked) for target in rig.targets) == [1, 1]


async def test_a_request_waits_while_no_target_has_kv_blocks_for_it() -> None:
    async with asyncio.timeout(60), RoundRig(targets=2, drafts=0) as rig:
        for target in rig.targets:
            target.error = ResourceExhausted("no blocks", reason="KV_EXHAUSTED", retry_after_s=0.01)
        waiting = asyncio.create_task(rig.rounds(kv_wait_s=50.0).run())
        await eventually(lambda: min(len(target.asked) for target in rig.targets) >= 2)
        rig.targets[0].error = None
        assert (await waiting).token_ids


async def test_a_request_that_the_last_target_refuses_is_an_internal_error_that_names_the_target() -> None:
    async with RoundRig(drafts=0) as rig:
        rounds = rig.rounds()
        rig.targets[0].error = InvalidRequest("temperature is 9")
        address = rig.of(TARGET)[0].address
        with pytest.raises(Internal, match=f"^target {address} refused a verification: INVALID_ARGUMENT ") as raised:
            await rounds.run()
        assert isinstance(raised.value.__cause__, InvalidRequest)


async def test_a_target_that_answers_a_token_outside_the_vocabulary_is_named_in_the_error() -> None:
    async with RoundRig(drafts=0) as rig:
        address = rig.of(TARGET)[0].address
        with pytest.raises(Internal, match=f"^target {address} answered token id "):
            await rig.rounds(vocabulary_size=0).run()


async def test_only_the_model_that_a_replica_described_may_answer() -> None:
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


async def test_rounds_of_other_sessions_at_the_same_target_are_counted_apart() -> None:
    async with RoundRig(draft_salt=0) as rig:
        mine, other = rig.rounds(gamma=3), rig.rounds(session_id="other", gamma=2)
        await mine.run()
        for _ in range(2):
            await other.run()
        await mine.run()
        await mine.run()
        told = [(times.num_concurrent, times.num_other_rows) for times in mine.gamma.told]
        assert told == [(0, 0), (2, 6), (0, 0)]
        assert [times.num_draft_tokens for times in mine.gamma.told] == [3, 3, 3]


async def test_rounds_of_another_coordinator_are_counted_too() -> None:
    async with RoundRig(draft_salt=0) as rig:
        elsewhere = await rig.connect()
        mine, other = rig.rounds(gamma=3), Rounds(elsewhere, session_id="other", gamma=2)
        await mine.run()
        for _ in range(2):
            await other.run()
        await mine.run()
        await other.run()
        assert [(times.num_concurrent, times.num_other_rows) for times in mine.gamma.told] == [(0, 0), (2, 6)]
        assert [(times.num_concurrent, times.num_other_rows) for times in other.gamma.told] == [(0, 0), (0, 0), (1, 4)]
        await elsewhere.close()


async def test_a_targets_count_of_other_rounds_since_an_earlier_turn_is_ignored() -> None:
    async with RoundRig(draft_salt=0) as rig:
        mine, other = rig.rounds(gamma=3), rig.rounds(session_id="other", gamma=2)
        await mine.run()
        for _ in range(5):
            await other.run()
        next_turn = rig.rounds(gamma=3, prompt=[*PROMPT, 5], turn=1, epoch=2)
        await next_turn.run()
        assert [(times.num_concurrent, times.num_other_rows) for times in next_turn.gamma.told] == [(0, 0)]


async def test_a_round_reports_its_request_its_outcome_and_its_cost() -> None:
    async with RoundRig(draft_salt=0) as rig:
        rounds = rig.rounds(gamma=3)
        began = time.perf_counter()
        outcome = await rounds.run()
        assert 0 < outcome.draft_s < outcome.draft_s + outcome.verify_s <= time.perf_counter() - began
        told = rounds.gamma.told[0]
        assert (told.num_requested, told.num_draft_tokens, told.num_accepted) == (3, 3, 3)
        assert told.committed_len == told.num_prefilled == told.num_draft_prefilled == len(PROMPT)
        assert (told.draft_s, told.verify_s) == (outcome.draft_s, outcome.verify_s)
        assert told.step_tokens == len(PROMPT) + 3
        assert 0 < told.verify_forward_s < outcome.verify_s
        assert outcome.draft_pool == "default"
        assert outcome.wire_bytes > 0
        alone = await rounds.run(1)
        assert (alone.target_only_cause, alone.draft_s, len(alone.token_ids)) == ("off", 0.0, 1)
        told = rounds.gamma.told[1]
        assert (told.num_requested, told.draft_s, told.num_draft_prefilled, told.num_prefilled) == (0, 0.0, 0, 1)
        assert 0 < alone.wire_bytes < outcome.wire_bytes


async def test_the_bytes_of_draft_and_target_calls_are_both_counted() -> None:
    prompt = [5] * 400
    async with RoundRig(draft_salt=0) as rig:
        both = (await rig.rounds(prompt=prompt).run()).wire_bytes
        alone = (await rig.rounds(prompt=prompt, gamma=0).run()).wire_bytes
    assert alone > len(prompt)
    assert both > 1.5 * alone
