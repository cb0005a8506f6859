"""Pre-drafting through the proposer: every outcome of a round, hit or not, gives what a proposer without it gives."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from draft_service.fan_out_policy import MAX_FAN_OUT, Predraft
from draft_service.proposer import DraftOptions, Proposer
from specdec.contract.errors import Internal, KvMiss
from specdec.contract.types import DrawRule, Proposal, ProposeRequest, SamplingFilters, VerifyRequest
from specdec.observability.engine_metrics import EngineMetrics
from specdec.settings.draft import DraftSettings
from target_service.verifier import Verifier
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker
from tests.support.watched_worker import WatchedWorker

TOKENS = [3 + index * 7 % 20 for index in range(60)]
GAMMA = 4
PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2}
LAWS = {
    "greedy": (SamplingFilters(temperature=0.0), DrawRule.DISTRIBUTION),
    "greedy, penalised": (SamplingFilters(temperature=0.0, **PENALISED), DrawRule.DISTRIBUTION),
    "coupled": (SamplingFilters(temperature=0.9, **PENALISED), DrawRule.COUPLED),
    "law": (SamplingFilters(temperature=0.9, top_p=0.95, **PENALISED), DrawRule.DISTRIBUTION),
    "law, few new tokens": (SamplingFilters(min_new_tokens=6, end_token_ids=(1, 2, 5, 7)), DrawRule.DISTRIBUTION),
}


class _Replica:
    """A proposer that drafts ahead, one that does not, and the round both are asked for."""

    def __init__(self, filters: str = "greedy", **options) -> None:
        self.table = TableWorker(**options)
        self.worker = WatchedWorker(self.table)
        self.metrics = EngineMetrics("table", role="draft")
        # A clock that stands still: no step takes any time, so branches are as wide as they may be.
        self.ahead = Proposer(
            self.worker, drafting=DraftOptions(predraft=Predraft.ON), observer=self.metrics, clock=lambda: 0.0
        )
        self.plain = Proposer(TableWorker(**options))
        self.filters, self.draw_rule = LAWS[filters]

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.worker.let_go()
        self.ahead.check_integrity()
        await self.ahead.close()
        await self.plain.close()
        self.ahead.check_integrity()
        assert self.ahead.stats().num_held_kv_blocks == 0

    def request(self, tokens, *, gamma: int = GAMMA, **options) -> ProposeRequest:
        options = {"filters": self.filters, "draw_rule": self.draw_rule, "seed": 7, "output_start": 20} | options
        return ProposeRequest(make_round(tokens, **options), gamma)

    async def first(self, tokens=TOKENS[:21], **options) -> Proposal:
        """The first round, with every branch grown to its end."""
        request = self.request(tokens, round_id=1, **options)
        proposal = await self.ahead.propose(request)
        _assert_equal(proposal, await self.plain.propose(request))
        await self.worker.grown(len(proposal.draft_token_ids) + 1)
        return proposal

    async def both(self, request: ProposeRequest) -> Proposal:
        """The same from both."""
        proposal = await self.ahead.propose(request)
        _assert_equal(proposal, await self.plain.propose(request))
        return proposal

    def counts(self, name: str, **labels) -> float:
        labels = {"model_name": "table", "role": "draft", "pool": "default"} | labels
        return self.metrics.registry.get_sample_value(f"specdec:{name}_total", labels) or 0.0

    def outcomes(self) -> dict[str, float]:
        names = ("hit", "extended", "miss", "unasked")
        return {name: count for name in names if (count := self.counts("predraft_rounds", outcome=name))}


def _assert_equal(left: Proposal, right: Proposal) -> None:
    assert left.draft_token_ids.tolist() == right.draft_token_ids.tolist()
    assert left.kv_len == right.kv_len
    assert left.lost_mass == right.lost_mass
    for ours, theirs in zip(left.supports, right.supports, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.weights.tolist() == theirs.weights.tolist()


def test_it_is_off_unless_switched_on():
    assert DraftSettings(model="m").predraft == "off"


async def test_without_it_nothing_runs_between_calls():
    worker = WatchedWorker(TableWorker())
    proposer = Proposer(worker)
    await proposer.propose(ProposeRequest(make_round(TOKENS[:21], filters=LAWS["greedy"][0]), GAMMA))
    for _ in range(20):
        await asyncio.to_thread(proposer.check_integrity)  # a turn of the device thread each
    assert len(worker.plans) == GAMMA
    await proposer.close()


@pytest.mark.parametrize("filters", LAWS)
async def test_whatever_the_outcome_the_draft_is_the_one_drafted_late(filters):
    """Every accepted length with several tokens: some are hits, the rest are misses."""
    async with _Replica(filters, num_blocks=400) as replica:
        for num_accepted in range(GAMMA + 1):
            for token_id in range(num_accepted, 24, 4):
                session_id = f"{num_accepted}, {token_id}"
                proposal = await replica.first(session_id=session_id)
                if num_accepted > len(proposal.draft_token_ids):
                    continue
                before, steps = replica.outcomes(), replica.worker.num_own_steps
                tokens = [*TOKENS[:21], *proposal.draft_token_ids[:num_accepted].tolist(), token_id]
                second = await replica.both(replica.request(tokens, round_id=2, start=20, session_id=session_id))
                is_hit = replica.outcomes().get("hit") != before.get("hit")
                assert is_hit == (replica.outcomes().get("miss") == before.get("miss"))
                if (
                    not replica.filters.end_token_ids
                ):  # where all but one branch have ended, their steps look like a call's
                    assert is_hit == (replica.worker.num_own_steps == steps)
                assert second.num_cached_tokens == (len(tokens) if is_hit else 21 + min(num_accepted, GAMMA - 1))
                await replica.ahead.release([session_id])
                replica.worker.forget()
        assert replica.outcomes()["hit"] >= 3


@pytest.mark.parametrize("prompt_len", [15, 16, 17, 27, 28, 29, 32])
@pytest.mark.parametrize("num_accepted", range(GAMMA + 1))
async def test_branches_begin_and_end_anywhere_in_a_block(prompt_len, num_accepted):
    """Draft = target: the likeliest outcome is known, and a second hit follows the first."""
    async with _Replica() as replica:
        tokens = TOKENS[:prompt_len]
        drafts = (await replica.first(tokens)).draft_token_ids.tolist()
        tokens = [*tokens, *drafts[:num_accepted]]
        ranked = np.argsort(-replica.table.logits_after(tokens)).tolist()
        tokens.append(ranked[1] if num_accepted < GAMMA else ranked[0])
        second = await replica.both(replica.request(tokens, round_id=2, start=prompt_len - 3))
        await replica.worker.grown(GAMMA + 1)
        tokens += [
            *second.draft_token_ids.tolist(),
            *replica.table.greedy_continuation([*tokens, *second.draft_token_ids], 1),
        ]
        await replica.both(replica.request(tokens, round_id=3, start=prompt_len))
        assert replica.outcomes() == {"hit": 2.0}


async def test_full_acceptance_of_a_coupled_round_is_foreseen_from_its_noise():
    async with _Replica("coupled") as replica:
        verifier = Verifier(TableWorker())
        request = replica.request(TOKENS[:21], round_id=1)
        proposal = await replica.first()
        drafts = proposal.draft_token_ids
        choices = (await verifier.verify(VerifyRequest(request.position, drafts, ()))).choice_token_ids.tolist()
        assert choices[:GAMMA] == drafts.tolist()
        await replica.both(replica.request([*TOKENS[:21], *choices], round_id=2, start=21))
        assert replica.outcomes() == {"hit": 1.0}
        await verifier.close()


async def test_the_bonus_token_of_a_sampled_round_is_foreseen_from_its_uniform():
    async with _Replica("law") as replica:
        verifier = Verifier(TableWorker())
        request = replica.request(TOKENS[:21], round_id=1)
        proposal = await replica.first()
        supports = tuple(support.token_ids for support in proposal.supports)
        rows = (await verifier.verify(VerifyRequest(request.position, proposal.draft_token_ids, supports))).rows
        tokens = [*TOKENS[:21], *proposal.draft_token_ids.tolist(), rows[-1].tail_token_id]
        await replica.both(replica.request(tokens, round_id=2, start=21))
        assert replica.outcomes() == {"hit": 1.0}
        await verifier.close()


async def _bonus(replica: _Replica, proposal: Proposal, tokens=TOKENS[:21]) -> list[int]:
    """The tokens after full acceptance of a greedy round, the target being the draft."""
    drafted = [*tokens, *proposal.draft_token_ids.tolist()]
    return [*drafted, *replica.table.greedy_continuation(drafted, 1)]


@pytest.mark.parametrize("filters", ["greedy", "coupled", "law"])
@pytest.mark.parametrize("gamma", [1, 2, 7])
async def test_a_hit_is_cut_or_drafted_further_to_the_gamma_asked_for(filters, gamma):
    async with _Replica(filters) as replica:
        proposal = await replica.first()
        tokens = [*TOKENS[:21]]
        ranked = np.argsort(-replica.table.logits_after(tokens)).tolist()
        tokens.append(next(token_id for token_id in ranked if token_id != proposal.draft_token_ids[0]))
        second = await replica.ahead.propose(replica.request(tokens, gamma=gamma, round_id=2, start=21))
        _assert_equal(second, await replica.plain.propose(replica.request(tokens, gamma=gamma, round_id=2, start=21)))
        if filters == "greedy":
            assert replica.outcomes() == {"hit" if gamma <= GAMMA else "extended": 1.0}
        # And the KV is right: the next round, of another gamma, goes on from it.
        tokens += [*second.draft_token_ids.tolist(), 9]
        await replica.both(replica.request(tokens, round_id=3, start=second.kv_len))


@pytest.mark.parametrize("num_branch_steps", range(1, GAMMA + 2))
async def test_a_branch_cut_short_by_its_call_is_drafted_further(num_branch_steps):
    """Full acceptance, foreseen; after n steps its branch has n - 1 tokens, after one step none: a miss."""
    async with _Replica() as replica:
        replica.worker.allow(GAMMA + num_branch_steps - 1)
        proposal = await replica.ahead.propose(replica.request(TOKENS[:21], round_id=1))
        await replica.plain.propose(replica.request(TOKENS[:21], round_id=1))
        await replica.worker.held()  # in the last of those steps of branches
        request = replica.request(await _bonus(replica, proposal), round_id=2, start=21)
        asked = asyncio.create_task(replica.ahead.propose(request))
        await asyncio.sleep(0)  # lets it put itself into the inbox
        replica.worker.let_go()
        _assert_equal(await asked, await replica.plain.propose(request))
        expected = "miss" if num_branch_steps == 1 else "hit" if num_branch_steps == GAMMA + 1 else "extended"
        assert replica.outcomes() == {expected: 1.0}
        own = replica.worker.num_own_steps - GAMMA
        assert own == {"miss": GAMMA, "hit": 0, "extended": GAMMA + 1 - num_branch_steps}[expected]


async def test_a_call_of_another_session_waits_for_one_step_of_branches_at_most():
    async with _Replica() as replica:
        replica.worker.allow(GAMMA + 1)
        await replica.ahead.propose(replica.request(TOKENS[:21], round_id=1))
        await replica.worker.held()
        others = [
            asyncio.create_task(replica.ahead.propose(replica.request(TOKENS[: 9 + n], session_id=f"other{n}")))
            for n in range(3)
        ]
        await asyncio.sleep(0)
        num_before = len(replica.worker.plans)
        replica.worker.let_go()
        await asyncio.gather(*others)
        plans = replica.worker.plans[num_before : num_before + GAMMA]
        assert [len(plan.slices) for plan in plans] == [3] * GAMMA
        assert all(len(part.block_table) <= 1 for plan in plans for part in plan.slices)  # theirs, and no branch


async def test_what_many_sessions_drafted_together_is_not_branched():
    async with _Replica() as replica:
        replica.worker.allow(0)
        requests = [replica.request(TOKENS[: 5 + n], session_id=f"s{n}") for n in range(10)]
        calls = [asyncio.create_task(replica.ahead.propose(request)) for request in requests]
        await replica.worker.held()  # the first of them came too early for its first step
        replica.worker.let_go()
        await asyncio.gather(*calls)
        replica.ahead.check_integrity()
        assert all(not plan.block_copies for plan in replica.worker.plans)


async def test_a_miss_is_answered_by_the_hit_when_it_is_sent_again():
    async with _Replica() as replica:
        proposal = await replica.first()
        tokens = await _bonus(replica, proposal)
        with pytest.raises(KvMiss):
            await replica.ahead.propose(replica.request(tokens, round_id=2, start=25))
        await replica.both(replica.request(tokens, round_id=2, start=16))
        assert replica.outcomes() == {"hit": 1.0}


async def test_the_same_call_again_gets_the_stored_answer_and_leaves_the_branches_alone():
    async with _Replica() as replica:
        proposal = await replica.first()
        assert await replica.ahead.propose(replica.request(TOKENS[:21], round_id=1)) is proposal
        hit = replica.request(await _bonus(replica, proposal), round_id=2, start=21)
        answer = await replica.both(hit)
        assert await replica.ahead.propose(hit) is answer
        assert replica.outcomes() == {"hit": 1.0}


@pytest.mark.parametrize(
    "change",
    [{"seed": 8}, {"filters": SamplingFilters(temperature=0.5)}, {"output_start": 19}, {"draw_rule": DrawRule.COUPLED}],
)
async def test_another_seed_or_law_is_a_miss(change):
    async with _Replica() as replica:
        proposal = await replica.first()
        await replica.both(replica.request(await _bonus(replica, proposal), round_id=2, start=21, **change))
        assert replica.outcomes() == {"miss": 1.0}


async def test_another_text_at_the_same_positions_is_a_miss():
    async with _Replica() as replica:
        proposal = await replica.first()
        tokens = await _bonus(replica, proposal)
        tokens[3] += 1
        await replica.both(replica.request(tokens, epoch=2, round_id=1))
        assert replica.outcomes() == {"miss": 1.0}


@pytest.mark.parametrize("num_steps", range(GAMMA + 1))
async def test_a_session_released_while_its_branches_grow_leaves_nothing(num_steps):
    async with _Replica() as replica:
        replica.worker.allow(GAMMA + num_steps)
        await replica.ahead.propose(replica.request(TOKENS[:21], round_id=1))
        await replica.worker.held()
        release = asyncio.create_task(replica.ahead.release(["s"]))
        await asyncio.sleep(0)
        replica.worker.let_go()
        await release
        replica.ahead.check_integrity()
        assert replica.ahead.stats().num_held_kv_blocks == 0
        await replica.both(replica.request(TOKENS[:21], round_id=1))


async def test_a_crash_in_a_step_of_branches_costs_the_branches_alone():
    async with _Replica() as replica:
        replica.worker.allow(GAMMA + 1)
        proposal = await replica.ahead.propose(replica.request(TOKENS[:21], round_id=1))
        await replica.plain.propose(replica.request(TOKENS[:21], round_id=1))
        await replica.worker.held()
        replica.table.fail_next = RuntimeError("the device failed")
        replica.worker.let_go()
        request = replica.request(await _bonus(replica, proposal), round_id=2, start=21)
        assert (await replica.both(request)).num_cached_tokens == 24
        assert replica.outcomes() == {"miss": 1.0}


async def test_a_branch_without_a_law_costs_itself_alone():
    async with _Replica() as replica:
        ranked = np.argsort(-replica.table.logits_after(TOKENS[:21])).tolist()
        replica.table.non_finite = {ranked[1]: np.nan}
        proposal = await replica.first()
        bad = replica.request([*TOKENS[:21], ranked[1]], round_id=2, start=21)
        if ranked[1] not in proposal.draft_token_ids:
            with pytest.raises(Internal):
                await replica.ahead.propose(bad)
        assert replica.outcomes() == {"miss": 1.0}


async def test_blocks_that_a_call_needs_are_taken_from_branches_first():
    async with _Replica(num_blocks=40) as replica:
        await replica.first()
        assert replica.ahead.stats().num_held_kv_blocks > 10
        await replica.ahead.propose(replica.request([7] * 500, session_id="long", gamma=1))
        assert (
            await replica.ahead.propose(replica.request([*TOKENS[:21], 5], round_id=2, start=21))
        ).num_cached_tokens == 21


async def test_branches_leave_a_quarter_of_the_blocks_alone():
    async with _Replica(num_blocks=8) as replica:
        await replica.ahead.propose(replica.request(TOKENS[:40], round_id=1))
        replica.ahead.check_integrity()
        assert replica.ahead.stats().num_held_kv_blocks <= 6


async def test_no_branch_follows_an_end_token_or_the_end_of_the_context():
    async with _Replica(context=26) as replica:
        proposal = await replica.ahead.propose(replica.request(TOKENS[:21], round_id=1))
        drafts = proposal.draft_token_ids.tolist()
        await replica.worker.grown(GAMMA)
        longest = max(part.start + len(part.token_ids) for plan in replica.worker.plans for part in plan.slices)
        assert longest <= 26
        assert drafts


async def test_what_branches_cost_and_gain_is_counted():
    async with _Replica() as replica:
        proposal = await replica.first()
        await replica.both(replica.request(await _bonus(replica, proposal), round_id=2, start=21))
        num_branches = (GAMMA + 1) * MAX_FAN_OUT
        assert replica.counts("predraft_branches") == num_branches
        assert replica.counts("predraft_branches_wasted") == num_branches - 1
        assert replica.counts("predraft_tokens") == num_branches * GAMMA
