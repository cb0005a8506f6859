"""docs/protocol.md section 5 through the verifier and the proposer: rollback, misses, fences, idempotency."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draft_service.proposer import Proposer
from specdec.contract.errors import KvMiss, StaleEpoch
from specdec.contract.types import WEIGHT_TOTAL, DrawRule, ProposeRequest, SamplingFilters, Verification, VerifyRequest
from specdec.core.random import DrawKey
from specdec.core.sparse import draw_from_support
from target_service.verifier import Verifier
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

TOKENS = [3 + index * 7 % 20 for index in range(60)]


@pytest.fixture
def worker():
    return TableWorker()


@pytest.fixture
async def verifier(worker):
    engine = Verifier(worker)
    yield engine
    engine.check_integrity()
    await engine.close()


@pytest.fixture
async def proposer(worker):
    engine = Proposer(worker)
    yield engine
    engine.check_integrity()
    await engine.close()


def _verify(tokens, drafts=(), **options) -> VerifyRequest:
    return VerifyRequest(make_round(tokens, **options), np.array(drafts, dtype=np.uint32), ())


def _expected(worker, tokens, drafts=()) -> list[int]:
    """The greedy choice after the committed tokens and after each draft token."""
    return [worker.greedy_continuation([*tokens, *drafts[:count]], 1)[0] for count in range(len(drafts) + 1)]


def _choices(verification: Verification) -> list[int]:
    return verification.choice_token_ids.tolist()


async def test_a_delta_after_rejected_drafts_rolls_back_and_goes_on(worker, verifier):
    first = await verifier.verify(_verify(TOKENS[:20], [5, 6, 7], round_id=1))
    assert first.kv_len == 23
    assert _choices(first) == _expected(worker, TOKENS[:20], [5, 6, 7])
    tokens = [*TOKENS[:20], 5, 9]  # one draft accepted, one corrected
    second = await verifier.verify(_verify(tokens, [4], round_id=2, start=21))
    assert second.num_cached_tokens == 21
    assert _choices(second) == _expected(worker, tokens, [4])


async def test_accepted_drafts_that_are_sent_again_need_no_second_pass(worker, verifier):
    await verifier.verify(_verify(TOKENS[:20], [5, 6, 7], round_id=1))
    again = await verifier.verify(_verify([*TOKENS[:20], 5, 6, 9], round_id=2, start=20))
    assert again.num_cached_tokens == 22
    assert sum(len(part.token_ids) for part in worker.steps[-1].slices) == 1


async def test_an_unknown_session_misses_from_its_first_token_on(verifier):
    with pytest.raises(KvMiss) as miss:
        await verifier.verify(_verify(TOKENS, start=40))
    assert miss.value.have == 0


async def test_a_replica_that_is_behind_asks_from_its_last_block_boundary_on(worker, verifier):
    await verifier.verify(_verify(TOKENS[:40], round_id=1))
    with pytest.raises(KvMiss) as miss:
        await verifier.verify(_verify(TOKENS[:50], round_id=2, start=45))
    assert miss.value.have == 32
    resent = await verifier.verify(_verify(TOKENS[:50], round_id=2, start=32))
    assert resent.num_cached_tokens == 40  # what was sent again was there already
    assert _choices(resent) == _expected(worker, TOKENS[:50])


async def test_another_token_at_the_same_position_is_found_by_its_hash(worker, verifier):
    """A store that lost its last second: the next owner, of a newer epoch, went another way at token 30."""
    await verifier.verify(_verify(TOKENS[:40], epoch=1, round_id=7))
    other = [*TOKENS[:30], 21, *TOKENS[31:39], 22]
    with pytest.raises(KvMiss) as miss:
        await verifier.verify(_verify(other, epoch=2, start=39))
    assert miss.value.have == 0
    resent = await verifier.verify(_verify(other, epoch=2, start=0))
    assert resent.num_cached_tokens == 16  # token 30 is in a published block, which is never written again
    assert _choices(resent) == _expected(worker, other)


async def test_drafts_assumed_committed_wrongly_are_found_by_their_hash(worker, verifier):
    await verifier.verify(_verify(TOKENS[:20], [5, 6, 7], round_id=1))
    tokens = [*TOKENS[:20], 8, 9, 4, 2]
    with pytest.raises(KvMiss) as miss:
        await verifier.verify(_verify(tokens, round_id=2, start=22))
    assert miss.value.have == 16
    assert _choices(await verifier.verify(_verify(tokens, round_id=2, start=16))) == _expected(worker, tokens)


async def test_blocks_are_pinned_between_a_miss_and_its_resend():
    worker = TableWorker(num_blocks=6)
    verifier = Verifier(worker)
    await verifier.verify(_verify(TOKENS[:40], session_id="a", round_id=1))
    with pytest.raises(KvMiss):
        await verifier.verify(_verify(TOKENS[:50], session_id="a", round_id=2, start=45))
    # Three blocks are left; a fourth could only come from session a.
    await verifier.verify(_verify(list(reversed(TOKENS))[:40], session_id="b"))
    await verifier.verify(_verify([7, *TOKENS[:45]], session_id="c"))
    resent = await verifier.verify(_verify(TOKENS[:50], session_id="a", round_id=2, start=32))
    assert resent.num_cached_tokens == 40
    verifier.check_integrity()
    await verifier.close()


async def test_an_evicted_session_is_just_a_miss():
    worker = TableWorker(num_blocks=4)
    verifier = Verifier(worker)
    await verifier.verify(_verify(TOKENS[:40], session_id="a", round_id=1))
    await verifier.verify(_verify([7, *TOKENS[:60]], session_id="b"))
    with pytest.raises(KvMiss) as miss:
        await verifier.verify(_verify(TOKENS[:41], session_id="a", round_id=2, start=40))
    assert miss.value.have == 0
    resent = await verifier.verify(_verify(TOKENS[:41], session_id="a", round_id=2))
    assert _choices(resent) == _expected(worker, TOKENS[:41])
    await verifier.close()


async def test_a_fresh_session_picks_up_the_blocks_of_another(worker, verifier):
    await verifier.verify(_verify(TOKENS[:40], [1, 2], session_id="a"))
    fresh = await verifier.verify(_verify([*TOKENS[:36], 2, 2], session_id="b"))
    assert fresh.num_cached_tokens == 32
    assert _choices(fresh) == _expected(worker, [*TOKENS[:36], 2, 2])
    first, second = worker.steps[0].slices[0], worker.steps[1].slices[0]
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]


async def test_blocks_with_draft_tokens_are_not_shared(worker, verifier):
    await verifier.verify(_verify(TOKENS[:14], TOKENS[14:20], session_id="a"))
    fresh = await verifier.verify(_verify(TOKENS[:20], session_id="b"))
    assert fresh.num_cached_tokens == 0


async def test_a_session_that_goes_another_way_leaves_shared_blocks_as_they_were(worker, verifier):
    await verifier.verify(_verify(TOKENS[:40], session_id="a", round_id=1))
    await verifier.verify(_verify(TOKENS[:40], session_id="b", round_id=1))
    other = [*TOKENS[:20], 23, 23]
    rolled_back = await verifier.verify(_verify(other, session_id="b", round_id=2, start=20))
    assert rolled_back.num_cached_tokens == 16
    assert _choices(rolled_back) == _expected(worker, other)
    kept = await verifier.verify(_verify([*TOKENS[:40], 9], session_id="a", round_id=2, start=40))
    assert kept.num_cached_tokens == 40
    assert _choices(kept) == _expected(worker, [*TOKENS[:40], 9])


async def test_the_same_call_again_gets_the_stored_answer(worker, verifier):
    request = _verify(TOKENS[:20], [5], round_id=3)
    first = await verifier.verify(request)
    assert await verifier.verify(request) is first
    assert len(worker.steps) == 1


@pytest.mark.parametrize("change", ["drafts", "start", "law", "logprobs"])
async def test_the_same_round_with_another_digest_runs_afresh(worker, verifier, change):
    first = await verifier.verify(_verify(TOKENS[:20], [5], round_id=3))
    request = _verify(TOKENS[:20], [5], round_id=3)
    if change == "drafts":
        request = _verify(TOKENS[:20], [6], round_id=3)
    elif change == "start":
        request = _verify(TOKENS[:20], [5], round_id=3, start=19)
    elif change == "law":
        filters = SamplingFilters(temperature=0.0, logit_bias={int(first.choice_token_ids[0]): -100.0})
        request = _verify(TOKENS[:20], [5], round_id=3, filters=filters)
    else:
        request = replace(request, num_logprobs=2)
    second = await verifier.verify(request)
    assert second is not first
    assert len(worker.steps) == 2
    assert (_choices(second) != _choices(first)) == (change in ("drafts", "law"))


async def test_a_miss_is_not_stored(worker, verifier):
    request = _verify(TOKENS[:40], start=30, round_id=1)
    with pytest.raises(KvMiss):
        await verifier.verify(request)
    await verifier.verify(_verify(TOKENS[:35], round_id=1))
    assert _choices(await verifier.verify(request)) == _expected(worker, TOKENS[:40])


@pytest.mark.parametrize(("epoch", "round_id"), [(4, 2), (3, 9)])
async def test_an_older_round_or_epoch_is_refused_and_never_runs(worker, verifier, epoch, round_id):
    await verifier.verify(_verify(TOKENS[:20], epoch=4, round_id=3))
    with pytest.raises(StaleEpoch):
        await verifier.verify(_verify(TOKENS[:20], epoch=epoch, round_id=round_id))
    assert len(worker.steps) == 1


async def test_a_newer_epoch_may_begin_at_any_round(worker, verifier):
    await verifier.verify(_verify(TOKENS[:20], epoch=4, round_id=30))
    answer = await verifier.verify(_verify(TOKENS[:21], epoch=5, round_id=0, start=20))
    assert answer.num_cached_tokens == 20


async def test_a_released_session_is_forgotten(worker, verifier):
    await verifier.verify(_verify(TOKENS[:20], epoch=4, round_id=3))
    assert verifier.info().num_sessions == 1
    await verifier.release(["s", "never seen"])
    assert verifier.info().num_sessions == 0
    assert verifier.stats().num_held_kv_blocks == 0
    await verifier.verify(_verify(TOKENS[:20], epoch=1, round_id=0))


async def test_a_proposal_says_how_much_kv_there_really_is(worker, proposer):
    first = await proposer.propose(ProposeRequest(make_round(TOKENS[:20], round_id=1), 4))
    drafts = first.draft_token_ids.tolist()
    assert drafts == worker.greedy_continuation(TOKENS[:20], 4)
    assert first.kv_len == 23  # the last draft token was not run
    tokens = [*TOKENS[:20], *drafts, 5]
    second = await proposer.propose(ProposeRequest(make_round(tokens, round_id=2, start=first.kv_len), 1))
    assert second.num_cached_tokens == 23
    assert second.draft_token_ids.tolist() == worker.greedy_continuation(tokens, 1)


async def test_a_draft_is_drawn_from_the_integers_that_are_sent(proposer):
    request = ProposeRequest(
        make_round(TOKENS[:20], filters=SamplingFilters(temperature=0.8, top_k=10), seed=99, output_start=18), 5
    )
    proposal = await proposer.propose(request)
    key = DrawKey(seed=99, turn=0, committed_len=20)
    assert len(proposal.supports) == len(proposal.lost_mass) == 5
    for index, (token_id, support) in enumerate(zip(proposal.draft_token_ids, proposal.supports, strict=True)):
        assert draw_from_support(support, key, index) == token_id


async def test_penalties_advance_with_the_drafted_tokens(proposer):
    """A repetition penalty so strong that no token comes twice."""
    filters = SamplingFilters(temperature=0.0, repetition_penalty=1.0, presence_penalty=1000.0)
    request = ProposeRequest(make_round(TOKENS[:20], filters=filters, output_start=20), 10)
    drafts = (await proposer.propose(request)).draft_token_ids.tolist()
    assert len(set(drafts)) == 10


async def test_drafting_ends_with_an_end_token(worker, proposer):
    drafts = worker.greedy_continuation(TOKENS[:20], 5)
    filters = SamplingFilters(temperature=0.0, end_token_ids=(drafts[2],))
    proposal = await proposer.propose(ProposeRequest(make_round(TOKENS[:20], filters=filters), 5))
    assert proposal.draft_token_ids.tolist() == drafts[: drafts.index(drafts[2]) + 1]


async def test_drafts_end_where_the_draft_models_context_ends():
    worker = TableWorker(context=24)
    proposer = Proposer(worker)
    some = await proposer.propose(ProposeRequest(make_round(TOKENS[:21], round_id=1), 8))
    assert len(some.draft_token_ids) == 3
    none = await proposer.propose(ProposeRequest(make_round(TOKENS[:30], round_id=2, start=23), 8))
    assert len(none.draft_token_ids) == 0
    assert none.kv_len == 23
    await proposer.close()


async def test_law_rounds_answer_rows_that_sum_to_their_total(verifier):
    supports = (np.array([2, 5, 9], dtype=np.uint32), np.array([5], dtype=np.uint32))
    request = VerifyRequest(
        make_round(TOKENS[:20], filters=SamplingFilters(temperature=1.0), seed=3),
        np.array([5, 5], dtype=np.uint32),
        supports,
        num_logprobs=4,
    )
    answer = await verifier.verify(request)
    assert len(answer.choice_token_ids) == 0
    assert [len(row.weights) for row in answer.rows] == [4, 2, 1]
    assert all(int(row.weights.sum(dtype=np.int64)) == WEIGHT_TOTAL for row in answer.rows)
    for row, support in zip(answer.rows, supports, strict=False):
        assert row.tail_token_id not in support
    assert [len(row.support_logits) for row in answer.logit_rows] == [3, 1, 0]
    assert all(len(row.top_token_ids) == 4 for row in answer.logit_rows)


async def test_coupled_rounds_answer_choices_with_their_probability(verifier):
    request = VerifyRequest(
        make_round(TOKENS[:20], filters=SamplingFilters(temperature=1.0), seed=3, draw_rule=DrawRule.COUPLED),
        np.array([5, 6], dtype=np.uint32),
        (),
    )
    answer = await verifier.verify(request)
    assert len(answer.choice_token_ids) == len(answer.choice_probabilities) == 3
    assert np.all((answer.choice_probabilities > 0) & (answer.choice_probabilities <= 1))


async def test_warming_up_leaves_no_session_behind(worker, proposer, verifier):
    await proposer.warm_up()
    assert worker.steps
    assert proposer.info().num_sessions == 0


async def test_warming_up_and_a_callers_session_of_that_name_do_not_meet(verifier):
    await verifier.verify(VerifyRequest(make_round([3, 4, 5], session_id="warm-up"), np.empty(0, np.uint32), ()))
    await verifier.warm_up()
    assert verifier.info().num_sessions == 1
