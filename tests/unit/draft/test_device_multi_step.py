"""Multi-step drafts drawn on the device equal drafts of single steps, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from draft_service.fan_out_policy import Predraft
from draft_service.predraft import Predrafter
from draft_service.proposer import DraftOptions, Proposer
from specdec.contract.errors import Internal
from specdec.contract.types import DrawRule, Proposal, ProposeRequest, SamplingFilters
from specdec.core.random import DrawKey
from specdec.core.sparse import draw_from_support, support_of_top
from specdec.engine.drafting import multi_step, multi_step_policy
from specdec.engine.drafting.multi_step import dense_coupled_scores, support_draws
from specdec.engine.logits import filters, rows
from specdec.engine.logits.filters import stable_topk
from specdec.engine.logits.rows import coupled_scores, noise_keys
from specdec.engine.loop.job import Job
from tests.support.multi_step_worker import MultiStepWorker
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

TOKENS = [3 + index * 7 % 20 for index in range(60)]
GREEDY = SamplingFilters(temperature=0.0)
PLAIN: dict[str, tuple[SamplingFilters, DrawRule]] = {
    "greedy": (GREEDY, DrawRule.DISTRIBUTION),
    "coupled": (SamplingFilters(temperature=0.9, min_p=0.02), DrawRule.COUPLED),
    "coupled, top-k": (SamplingFilters(temperature=1.3, top_k=9), DrawRule.COUPLED),
    "sampled": (SamplingFilters(temperature=0.8), DrawRule.DISTRIBUTION),
    "sampled, both cuts": (SamplingFilters(temperature=1.0, top_k=12, top_p=0.9), DrawRule.DISTRIBUTION),
    "ends": (SamplingFilters(temperature=0.9, end_token_ids=(3, 4, 5, 6, 7, 8)), DrawRule.DISTRIBUTION),
}
#: What depends on tokens that the host has not seen yet.
OF_A_HISTORY: dict[str, tuple[SamplingFilters, DrawRule]] = {
    "by frequency": (SamplingFilters(temperature=0.0, frequency_penalty=0.7), DrawRule.DISTRIBUTION),
    "by presence": (SamplingFilters(temperature=1.2, presence_penalty=1.1), DrawRule.COUPLED),
    "repeated": (SamplingFilters(temperature=0.0, repetition_penalty=1.7), DrawRule.DISTRIBUTION),
    "repeated, sampled": (SamplingFilters(temperature=1.1, repetition_penalty=0.6, top_k=9), DrawRule.DISTRIBUTION),
    "all of it": (
        SamplingFilters(
            temperature=0.9, repetition_penalty=1.3, presence_penalty=-0.4, frequency_penalty=0.3,
            logit_bias={5: 2.0, 9: -1.5}, min_new_tokens=4, end_token_ids=(3, 4, 5, 6, 7, 8),
        ),
        DrawRule.DISTRIBUTION,
    ),
    "biased": (SamplingFilters(temperature=0.0, logit_bias={5: 2.0}), DrawRule.DISTRIBUTION),
    "not to end yet": (SamplingFilters(min_new_tokens=4, end_token_ids=tuple(range(3, 20))), DrawRule.DISTRIBUTION),
    "never to end": (SamplingFilters(min_new_tokens=4, end_token_ids=tuple(range(24))), DrawRule.COUPLED),
}  # fmt: skip
#: Rules whose result depends on the number of candidates.
TOP_P_ALONE: dict[str, tuple[SamplingFilters, DrawRule]] = {
    "top-p": (SamplingFilters(top_p=0.9), DrawRule.DISTRIBUTION),
    "top-p, coupled": (SamplingFilters(temperature=1.5, top_p=0.8, repetition_penalty=1.2), DrawRule.COUPLED),
    "top-p, hot": (SamplingFilters(temperature=2.0, top_p=0.95, min_p=0.01), DrawRule.DISTRIBUTION),
}
RULES = PLAIN | OF_A_HISTORY | TOP_P_ALONE


def ask(
    rule: tuple[SamplingFilters, DrawRule],
    *,
    num_tokens: int = 21,
    gamma: int = 5,
    session: str = "s",
    seed: int = 7,
    round_id: int = 0,
) -> ProposeRequest:
    sampled_by, draw_rule = rule
    position = make_round(
        TOKENS[:num_tokens], filters=sampled_by, draw_rule=draw_rule, seed=seed, output_start=20, session_id=session,
        round_id=round_id,
    )  # fmt: skip
    return ProposeRequest(position, gamma)


async def proposals(
    worker: TableWorker, requests: Sequence[ProposeRequest], max_support: int = 24
) -> list[Proposal | BaseException]:
    """Propose all requests together: none runs before the last one has arrived."""
    proposer = Proposer(worker, drafting=DraftOptions(max_support=max_support))
    worker.gate.clear()
    first = asyncio.ensure_future(proposer.propose(ask(RULES["greedy"], session="first", gamma=1)))
    await asyncio.to_thread(worker.entered.acquire)
    calls = [asyncio.ensure_future(proposer.propose(request)) for request in requests]
    await asyncio.sleep(0.05)
    worker.gate.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await first
    proposer.check_integrity()
    await proposer.close()
    return answers


def same(actual: Proposal | BaseException, expected: Proposal | BaseException) -> None:
    assert isinstance(actual, Proposal)
    assert isinstance(expected, Proposal)
    assert actual.draft_token_ids.tolist() == expected.draft_token_ids.tolist()
    assert (actual.lost_mass, actual.kv_len) == (expected.lost_mass, expected.kv_len)
    for one, other in zip(actual.supports, expected.supports, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.weights.tolist() == other.weights.tolist()


@pytest.mark.parametrize("name", RULES)
async def test_a_multi_step_draft_equals_a_draft_of_single_steps(name: str) -> None:
    for seed in range(4):
        request, worker = ask(RULES[name], seed=seed), MultiStepWorker()
        (actual,), (expected,) = await proposals(worker, [request]), await proposals(TableWorker(), [request])
        same(actual, expected)
        assert worker.runs == [5]


async def test_a_support_of_maximum_size_does_not_end_a_multi_step_draft() -> None:
    request, worker = ask(RULES["sampled"]), MultiStepWorker()
    (actual,), (expected,) = await proposals(worker, [request], 3), await proposals(TableWorker(), [request], 3)
    same(actual, expected)
    assert isinstance(actual, Proposal)
    assert max(actual.lost_mass) > 0.01  # the support covers less than `coverage`
    assert (worker.runs, len(worker.steps)) == ([5], 1 + 5)


@pytest.mark.parametrize("num_looked_at", [1, 4, 9])
async def test_a_draft_that_needs_more_candidates_continues_with_single_steps(
    num_looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at(num_looked_at, monkeypatch)
    rules = [*TOP_P_ALONE.values(), *PLAIN.values()]
    num_alone = []
    for seed in range(4):
        requests = [ask(rule, num_tokens=21 + index, session=f"s{index}", seed=seed)
                    for index, rule in enumerate(rules)]  # fmt: skip
        worker = MultiStepWorker()
        actual, expected = await proposals(worker, requests), await proposals(TableWorker(), requests)
        for one, other in zip(actual, expected, strict=True):
            same(one, other)
        num_alone.append(len(worker.steps) - 1 - sum(worker.runs))
    assert max(num_alone) > 0  # some were drawn in single steps, with the same tokens
    assert worker.runs


@pytest.mark.parametrize(("name", "num_runs"), [("greedy", (40, 30)), ("sampled", (5, 30)), ("top-p, coupled", (5, 8))])
async def test_wasted_multi_step_drafts_pause_longer_and_longer(
    name: str, num_runs: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at(1, monkeypatch)
    worker = MultiStepWorker()
    proposer = Proposer(worker, drafting=DraftOptions(max_support=24))
    for round_id in range(40):
        await proposer.propose(ask(RULES[name], gamma=2, num_tokens=21 + round_id % 30, round_id=round_id))
    # One opportunity each: the pauses after wasted drafts are 1, 3, 7, 15 and then 31, which has not ended.
    assert len(worker.runs) == num_runs[0]
    worker.runs.clear()
    look_at(24, monkeypatch)  # all tokens, so neither a support nor top-p needs more
    for round_id in range(40, 70):
        await proposer.propose(ask(RULES[name], gamma=2, num_tokens=21 + round_id % 30, round_id=round_id))
    assert len(worker.runs) == num_runs[1]
    await proposer.close()


async def test_drafts_with_a_small_top_k_neither_cause_a_pause_nor_wait_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_at(2, monkeypatch)
    worker = MultiStepWorker()
    proposer = Proposer(worker, drafting=DraftOptions(max_support=24))
    short = (SamplingFilters(top_k=2, top_p=0.9), DrawRule.DISTRIBUTION)
    has_run = []
    for round_id, rule in enumerate((RULES["sampled"], short, short, RULES["sampled"], RULES["sampled"])):
        worker.runs.clear()
        await proposer.propose(ask(rule, gamma=2, num_tokens=21 + round_id, round_id=round_id))
        has_run.append(bool(worker.runs))
    assert has_run == [True, True, True, False, True]
    await proposer.close()


def look_at(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the number of candidates that are considered first."""
    monkeypatch.setattr(filters, "_FIRST_CANDIDATES", num_tokens)
    for module in (rows, multi_step, multi_step_policy):
        monkeypatch.setattr(module, "FIRST_CANDIDATES", num_tokens)


@pytest.mark.parametrize(
    "rules",
    [[*PLAIN.values()] * 2, [*OF_A_HISTORY.values(), *TOP_P_ALONE.values(), *PLAIN.values()][:12]],
    ids=["plain", "of-a-history"],
)
async def test_drafts_of_all_kinds_and_lengths_share_steps(
    rules: list[tuple[SamplingFilters, DrawRule]],
) -> None:
    requests = [
        ask(rule, num_tokens=21 + index, gamma=5 if index else 3, session=f"s{index}", seed=index)
        for index, rule in enumerate(rules)
    ]
    worker = MultiStepWorker()
    actual, expected = await proposals(worker, requests), await proposals(TableWorker(), requests)
    for one, other in zip(actual, expected, strict=True):
        same(one, other)
    assert worker.runs == [3, 2]  # as many as all of them need, then as the others need


async def test_steps_are_single_while_more_sessions_are_awaited_than_draft() -> None:
    """A call that arrives during a multi-step draft would wait for its end."""
    worker = MultiStepWorker()
    proposer = Proposer(worker)
    for num_answered in range(3):
        assert len(worker.runs) == min(num_answered, 2)
        await proposer.propose(ask(RULES["greedy"], session=f"s{num_answered}"))
    assert len(worker.runs) == 2
    await proposer.close()


async def test_a_device_that_draws_another_token_costs_time_and_changes_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def off_at_times(masses: torch.Tensor, ids: torch.Tensor, coverage: float, words: torch.Tensor) -> torch.Tensor:
        token_ids = support_draws(masses, ids, coverage, words)
        return torch.where(words[:, 1] % 3 == 0, (token_ids + 1) % 24, token_ids)

    monkeypatch.setattr(multi_step, "support_draws", off_at_times)
    requests = [ask(RULES["sampled"], session=f"s{index}", seed=index) for index in range(6)]
    worker = MultiStepWorker()
    actual, expected = await proposals(worker, requests), await proposals(TableWorker(), requests)
    for one, other in zip(actual, expected, strict=True):
        same(one, other)
    assert len(worker.steps) > 1 + 5  # some continued in single steps


async def test_logits_that_are_not_finite_fail_only_their_own_call() -> None:
    worker = MultiStepWorker()
    requests = [ask(RULES["greedy"], num_tokens=21 + index, session=f"s{index}") for index in range(3)]
    third = worker.greedy_continuation(TOKENS[:22], 3)[2]
    worker.non_finite[third] = float("nan")
    actual, expected = await proposals(worker, requests), await proposals(TableWorker(), requests)
    assert isinstance(actual[1], Internal)
    for index in (0, 2):
        drafted = expected[index]
        assert isinstance(drafted, Proposal)
        if third not in drafted.draft_token_ids[:-1].tolist():
            same(actual[index], drafted)


async def test_a_crash_of_a_multi_step_draft_fails_its_calls_and_the_replica_continues() -> None:
    worker = MultiStepWorker()
    proposer = Proposer(worker)
    worker.fail_next = RuntimeError("a kernel failed")
    with pytest.raises(Internal):
        await proposer.propose(ask(RULES["greedy"]))
    request = ask(RULES["greedy"], session="next")
    same(await proposer.propose(request), (await proposals(TableWorker(), [request]))[0])
    await proposer.close()


@pytest.mark.parametrize("name", ["greedy", "coupled", "sampled"])
async def test_the_same_top_tokens_are_noted_as_in_single_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pre-drafting starts from them."""
    noted: list[list[list[int]]] = []

    def note(_: Predrafter, job: Job) -> None:
        noted.append(job.progress.top_token_ids)

    monkeypatch.setattr(Predrafter, "note_answered", note)
    for worker in (MultiStepWorker(), TableWorker()):
        options = DraftOptions(predraft=Predraft.ON, max_support=24)
        proposer = Proposer(worker, drafting=options, clock=lambda: 0.0)
        await proposer.propose(ask(RULES[name]))
        await proposer.close()
    assert noted[0] == noted[1]
    assert [len(tokens) for tokens in noted[0]] == [len(noted[0][0])] * 5


def random_distributions(num_rows: int, num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(num_rows, num_tokens, generator=generator, dtype=torch.float64).mul_(3.0).exp_()
    weights[weights < 0.05] = 0.0
    return weights / weights.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("num_tokens", [1, 7, 24, 5000])
def test_dense_noise_equals_the_noise_of_tokens_with_mass(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.engine.drafting.multi_step._CHUNK", 1 << 10)
    distributions = random_distributions(3, num_tokens, seed=num_tokens) + 1e-12
    seeds, turns, positions = [3, 1 << 63, 12], [0, 1, 5], [9, 100, 2]
    keys = noise_keys(seeds, turns, positions, distributions.device)
    expected = coupled_scores(distributions.clone(), seeds, turns, positions)
    torch.testing.assert_close(dense_coupled_scores(distributions, keys), expected, rtol=0, atol=1e-12)
    impossible = torch.zeros(1, 4, dtype=torch.float64)
    impossible[0, 2] = 1.0
    assert dense_coupled_scores(impossible, keys[:1]).argmax() == 2


def test_the_device_draws_from_a_support_as_the_host_does() -> None:
    distributions = random_distributions(200, 64, seed=1)
    for size, coverage in ((64, 0.99), (16, 0.99), (64, 0.5), (1, 0.99)):
        masses, ids = stable_topk(distributions, size, floor=0.0)
        words, expected = [], []
        for row in range(200):
            key = DrawKey(seed=row * 77, turn=row % 3, committed_len=row)
            bits = key.below(1 << 62, row % 5, multi_step.DrawStream.PROPOSE) << 2
            words.append((bits >> 32, bits & 0xFFFFFFFC))
            support, _ = support_of_top(ids[row].numpy(), masses[row].numpy(), coverage)
            expected.append(draw_from_support(support, key, row % 5))
        drawn = support_draws(masses, ids, coverage, torch.tensor(words)).tolist()
        assert drawn == expected


def test_each_token_is_drawn_for_as_many_points_as_its_weight() -> None:
    masses, ids = torch.tensor([[0.5, 0.5]] * 2, dtype=torch.float64), torch.tensor([[9, 4]] * 2)
    words = torch.tensor([[0x7FFFFFFF, 0xFFFFFFFF], [0x80000000, 0]])  # the last point of the first half, the next
    assert support_draws(masses, ids, 0.99, words).tolist() == [4, 9]


def test_a_row_without_a_distribution_still_gives_a_token_id() -> None:
    masses, ids = torch.full((2, 4), torch.nan, dtype=torch.float64), torch.arange(8).view(2, 4)
    words = torch.tensor([[0xFFFFFFFF, 0xFFFFFFFF]] * 2)
    drawn = support_draws(masses, ids, 0.99, words)
    assert ((drawn >= 0) & (drawn < 8)).all()
