"""The choice of gamma on computed times: it finds the best goodput and follows changes.

Times come from formulas, so that no test depends on a clock; tokens are counted by their expectation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from coordinator.round.gamma import FIRST_GAMMA, LEAST_TOKENS_PER_PROBE, MOST_TOKENS_PER_PROBE, GammaChooser
from coordinator.round.pool_stats import DraftPoolStats, PoolStatsTable, RoundTimes
from tests.support.expectation import expected_tokens_per_round

MAX_GAMMA = 8
PROMPT_TOKENS = 100


@dataclass
class World:
    """Draft and target after the formulas of docs/protocol.md sections 6 and 7; times in seconds."""

    draft_step_s: float = 0.0025
    verify_s: float = 0.020
    row_s: float = 0.0
    link_s: float = 0.0005
    hit_rate: float = 0.0
    """Share of rounds whose draft was there before it was asked for."""

    def round_s(self, gamma: int, num_sessions: int = 1) -> float:
        """Return the expected time of a round in which every session drafts `gamma` tokens."""
        draft_s = (1.0 - self.hit_rate) * gamma * self.draft_step_s
        return draft_s + self.verify_s + num_sessions * (gamma + 1) * self.row_s + self.link_s

    def goodput(self, gamma: int, alpha: float, num_sessions: int = 1) -> float:
        """Return the expected tokens per second of one session among `num_sessions` equal ones."""
        return expected_tokens_per_round([alpha] * gamma) / self.round_s(gamma, num_sessions)

    def best_gamma(self, alpha: float, num_sessions: int = 1) -> int:
        return max(range(MAX_GAMMA + 1), key=lambda gamma: self.goodput(gamma, alpha, num_sessions))


def draw(generator: np.random.Generator, alpha: float, gamma: int) -> int:
    accepted = 0
    while accepted < gamma and generator.random() < alpha:
        accepted += 1
    return accepted


def play(
    choosers: list[GammaChooser],
    world: World,
    alphas: Iterable[float],
    *,
    num_tokens: int = 10_000,
    seed: int = 1,
) -> Iterator[tuple[float, list[int]]]:
    """Run rounds of all sessions as one batch, one for each alpha; yield alpha and the chosen gammas.

    They end once all sessions have `num_tokens` new tokens. A draft runs first what it has not seen of its session, 64
    tokens a step.
    """
    generator = np.random.default_rng(seed)
    lengths, drafted_lengths = [PROMPT_TOKENS] * len(choosers), [0] * len(choosers)
    for alpha in alphas:
        left = [PROMPT_TOKENS + num_tokens - length for length in lengths]
        if max(left) <= 0:
            return
        gammas = [chooser.choose(max(0, num_left - 1)) for chooser, num_left in zip(choosers, left, strict=True)]
        rows = sum(gammas) + len(gammas)
        for index, (chooser, gamma) in enumerate(zip(choosers, gammas, strict=True)):
            forward_s = world.verify_s + rows * world.row_s
            is_hit = generator.random() < world.hit_rate
            num_accepted = draw(generator, alpha, gamma)
            num_unseen = lengths[index] - drafted_lengths[index] if gamma else 0
            prefill_s = num_unseen / 64 * world.draft_step_s
            chooser.observe(
                RoundTimes(
                    num_draft_tokens=gamma,
                    num_accepted=num_accepted,
                    draft_s=0.0 if is_hit else gamma * world.draft_step_s + prefill_s,
                    verify_s=forward_s + world.link_s,
                    verify_forward_s=forward_s,
                    num_prefilled=1,
                    num_draft_prefilled=num_unseen,
                    committed_len=lengths[index],
                    num_requested=gamma,
                    step_tokens=rows,
                    num_concurrent=len(gammas) - 1,
                    num_other_rows=rows - gamma - 1,
                )
            )
            if gamma:
                drafted_lengths[index] = lengths[index] + num_accepted
            lengths[index] += num_accepted + 1
        yield alpha, gammas


def one(pool: DraftPoolStats | None = None, *, fixed: int | None = None) -> GammaChooser:
    return GammaChooser(pool or DraftPoolStats(), fixed=fixed, max_gamma=MAX_GAMMA)


def chosen(chooser: GammaChooser, world: World, alpha: float, rounds: int, *, seed: int = 1) -> list[int]:
    return [gammas[0] for _, gammas in play([chooser], world, [alpha] * rounds, seed=seed)]


def test_a_fixed_gamma_is_lowered_only_by_the_limit() -> None:
    fixed = one(fixed=5)
    assert [fixed.choose(limit) for limit in (9, 5, 3, 0)] == [5, 5, 3, 0]


def test_drafts_stop_for_an_adapter_that_they_seldom_hit_and_go_on_for_the_base_model() -> None:
    world, table = World(draft_step_s=0.01), PoolStatsTable()
    base, sql = one(table.of("draft")), one(table.of("draft", "sql"))
    for _ in range(10):
        of_base, of_sql = chosen(base, world, 0.9, 60), chosen(sql, world, 0.05, 60)
    assert min(of_base) >= 2
    assert np.mean(of_sql) < 0.2


def test_statistics_of_adapters_that_are_no_longer_served_make_room_for_new_ones() -> None:
    served = {"a", "b"}
    table = PoolStatsTable(served.__contains__)
    kept = {adapter: table.of("draft", adapter) for adapter in ("", "a", "b")}
    served.remove("a")
    table.of("draft", "c")
    assert [table.get("draft", adapter) for adapter in kept] == [kept[""], None, kept["b"]]


def test_the_first_round_requests_a_few_tokens() -> None:
    assert one().choose(100) == FIRST_GAMMA
    assert one().choose(2) == 2


@pytest.mark.parametrize("alpha", [0.2, 0.4, 0.6, 0.76, 0.9, 0.98])
@pytest.mark.parametrize("draft_step_s", [0.0005, 0.0025, 0.01, 0.03])
def test_constant_acceptance_gets_nearly_the_best_goodput(alpha: float, draft_step_s: float) -> None:
    world = World(draft_step_s=draft_step_s)
    # Three runs: which acceptances one happens to draw moves it by a hundredth.
    gammas = [gamma for seed in (1, 2, 3) for gamma in chosen(one(), world, alpha, 600, seed=seed)[100:]]
    tokens = sum(expected_tokens_per_round([alpha] * gamma) for gamma in gammas)
    seconds = sum(world.round_s(gamma) for gamma in gammas)
    assert tokens / seconds >= 0.97 * world.goodput(world.best_gamma(alpha), alpha)


@pytest.mark.parametrize("num_sessions", [1, 4, 16, 64])
@pytest.mark.parametrize("alpha", [0.4, 0.7, 0.9])
def test_under_load_each_row_is_charged_at_its_cost_to_all_sessions(num_sessions: int, alpha: float) -> None:
    world = World(row_s=0.0004)
    pool = DraftPoolStats()
    rounds = list(play([one(pool) for _ in range(num_sessions)], world, [alpha] * 400))[150:]
    tokens = sum(expected_tokens_per_round([alpha] * gamma) for _, gammas in rounds for gamma in gammas)
    seconds = sum(
        world.verify_s + world.link_s + (sum(gammas) + len(gammas)) * world.row_s + max(gammas) * world.draft_step_s
        for _, gammas in rounds
    )
    best = world.goodput(world.best_gamma(alpha, num_sessions), alpha, num_sessions)
    assert tokens / seconds / num_sessions >= 0.93 * best


def test_without_a_price_on_rows_a_full_target_would_be_overfilled() -> None:
    """Negative control of the test above: the best gamma of one session alone is far from the best for 64."""
    world = World(row_s=0.0004)
    alone = world.best_gamma(0.7, 1)
    assert world.goodput(alone, 0.7, 64) < 0.93 * world.goodput(world.best_gamma(0.7, 64), 0.7, 64)


def drifting(rounds: int) -> list[float]:
    return [0.9] * rounds + [0.4] * rounds + [0.9] * rounds


@pytest.mark.parametrize("draft_step_s", [0.0025, 0.008])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_drifting_acceptance_costs_little_against_the_best_fixed_gamma(draft_step_s: float, seed: int) -> None:
    world, alphas = World(draft_step_s=draft_step_s), drifting(400)

    def goodput(rounds: Callable[[], Iterator[tuple[float, int]]]) -> float:
        played = list(rounds())
        tokens = sum(expected_tokens_per_round([alpha] * gamma) for alpha, gamma in played)
        return tokens / sum(world.round_s(gamma) for _, gamma in played)

    auto = goodput(lambda: ((alpha, gammas[0]) for alpha, gammas in play([one()], world, alphas, seed=seed)))
    best = max(goodput(lambda gamma=gamma: ((alpha, gamma) for alpha in alphas)) for gamma in range(MAX_GAMMA + 1))
    assert auto >= 0.95 * best


def test_target_only_rounds_are_entered_with_few_probes_and_left_again() -> None:
    world, chooser = World(draft_step_s=0.015), one()
    late = chosen(chooser, world, 0.1, 1200)[200:]
    assert set(late) <= {0, 1}
    # One round that runs what the draft has not seen, and one that shows what drafting takes.
    assert 0 < sum(late) <= 2 * (len(late) / LEAST_TOKENS_PER_PROBE + 1)
    later = chosen(chooser, World(draft_step_s=0.0025), 0.95, 12 * MOST_TOKENS_PER_PROBE)
    assert min(later[-100:]) >= 3


def test_a_new_session_starts_from_the_statistics_of_its_pool() -> None:
    good, bad = DraftPoolStats(), DraftPoolStats()
    chosen(one(good), World(draft_step_s=0.004), 0.95, 80)
    chosen(one(bad), World(draft_step_s=0.004), 0.2, 80)
    assert one(good).choose(8) > one(bad).choose(8)


def test_drafts_that_are_made_ahead_make_a_larger_gamma_worth_it() -> None:
    without, hits = World(draft_step_s=0.008), World(draft_step_s=0.008, hit_rate=0.9)
    late = [chosen(one(), world, 0.8, 400)[-100:] for world in (without, hits)]
    assert np.mean(late[1]) > np.mean(late[0]) + 1


def test_the_same_observations_give_the_same_choices() -> None:
    runs = [chosen(one(), World(), 0.7, 50) for _ in range(2)]
    assert runs[0] == runs[1]


def slow_round(*, num_prefilled: int, seconds: float) -> RoundTimes:
    return RoundTimes(
        num_draft_tokens=4,
        num_accepted=4,
        draft_s=seconds,
        verify_s=seconds,
        verify_forward_s=seconds,
        num_prefilled=num_prefilled,
        num_draft_prefilled=num_prefilled,
        committed_len=4000,
        num_requested=4,
        step_tokens=5,
    )


def test_a_prefill_does_not_count_as_a_slow_round() -> None:
    pool = DraftPoolStats()
    chooser = one(pool)
    for _ in range(3):
        chooser.observe(slow_round(num_prefilled=4000, seconds=9.0))
    assert not pool.verify_time.is_measured
    assert not pool.draft_wait.is_measured


def test_a_slow_first_round_does_not_lead_to_target_only_rounds() -> None:
    chooser = one()
    chooser.observe(slow_round(num_prefilled=5, seconds=9.0))
    assert chosen(chooser, World(), 0.9, 20)[-1] >= 4


def test_a_slow_draft_that_recovers_is_used_again_within_a_few_probes() -> None:
    pool = DraftPoolStats()
    chooser = one(pool)
    for _ in range(5):
        chooser.observe(slow_round(num_prefilled=1, seconds=2.0))
    assert chooser.choose(100) in range(MAX_GAMMA + 1)
    assert min(chosen(chooser, World(), 0.9, 3 * MOST_TOKENS_PER_PROBE)[-50:]) >= 3


@pytest.mark.parametrize("num_tokens", [4, 5, 6, 12, 40, 150])
def test_after_a_slow_period_requests_of_any_length_draft_again_within_a_few_hundred_tokens(num_tokens: int) -> None:
    def request(pool: DraftPoolStats, seed: int) -> list[int]:
        rounds = play([one(pool)], World(), itertools.repeat(0.9), num_tokens=num_tokens, seed=seed)
        return [gammas[0] for _, gammas in rounds]

    pool = DraftPoolStats()
    chosen(one(pool), World(), 0.9, 100)
    chosen(one(pool), World(draft_step_s=0.2), 0.9, 200)
    assert one(pool).choose(100) == 0
    for seed in range(-(-3 * MOST_TOKENS_PER_PROBE // num_tokens)):
        request(pool, seed)
    assert request(pool, 0)[0] == min(MAX_GAMMA, num_tokens - 1)


def test_sessions_without_a_draft_probe_for_one_another() -> None:
    pool = DraftPoolStats()
    choosers = [one(pool) for _ in range(16)]
    rounds = list(play(choosers, World(draft_step_s=0.03), [0.3] * 400))[-200:]
    num_asks = sum(sum(gammas) for _, gammas in rounds)
    # Each by itself would ask in four rounds, 64 in all, and those that the pool's count begins are few beside them.
    assert 0 < num_asks <= 2 * (16 * 200 / LEAST_TOKENS_PER_PROBE + 16)


@pytest.mark.parametrize("claimed_s", [float("nan"), float("inf"), 3e38, -1e9])
def test_nonsense_in_a_targets_reported_time_does_not_end_speculation(claimed_s: float) -> None:
    world = World()
    pool, other_pool = DraftPoolStats(), DraftPoolStats()
    for record in (pool, other_pool):
        chosen(one(record), world, 0.8, 50)
    liar = RoundTimes(
        num_draft_tokens=2,
        num_accepted=2,
        draft_s=2 * world.draft_step_s,
        verify_s=world.verify_s + world.link_s,
        verify_forward_s=claimed_s,
        num_prefilled=1,
        num_draft_prefilled=1,
        committed_len=150,
        num_requested=2,
        step_tokens=3,
    )
    for _ in range(2):
        pool.observe(liar)
    afterwards, expected = (chosen(one(record), world, 0.8, 200, seed=2) for record in (pool, other_pool))
    assert np.mean(afterwards) == pytest.approx(np.mean(expected), abs=1.0)


@pytest.mark.parametrize("claimed", [1 << 20, (1 << 32) - 1])
def test_nonsense_in_a_targets_report_of_other_sessions_does_not_end_speculation(claimed: int) -> None:
    world = World(row_s=0.0003)
    pool, other_pool = DraftPoolStats(), DraftPoolStats()
    for record in (pool, other_pool):
        chosen(one(record), world, 0.8, 50)
    for _ in range(2):
        liar = slow_round(num_prefilled=1, seconds=world.round_s(4))
        pool.observe(liar._replace(num_concurrent=claimed, num_other_rows=claimed))
    afterwards, expected = (chosen(one(record), world, 0.8, 400, seed=2)[-100:] for record in (pool, other_pool))
    assert np.mean(afterwards) == pytest.approx(np.mean(expected), abs=1.0)
