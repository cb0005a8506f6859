"""The distribution of one round, enumerated, is the target's; and every fault of the field's usual list shows.

No sampling: the false-alarm rate is 0. The bound is docs/protocol.md's 1e-7 total variation, against some 1e-9 that
the integers of the wire really cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import pytest
import torch

from specdec.contract.types import WEIGHT_TOTAL, DistributionRow, SamplingFilters, Support
from tests.statistical.table_model import (
    HISTORY,
    EmittedDistribution,
    Path,
    RoundTables,
    block_distribution,
    choices_distribution,
    rejection_distribution,
)

TOLERANCE = 1e-7

FILTERS = {
    "no filter": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "top_k and top_p": {"top_k": 4, "top_p": 0.75},
    "min_p": {"min_p": 0.15},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.6},
    "logit bias": {"logit_bias": {0: 2.0, 3: -1.5}},
    "min_new_tokens": {"min_new_tokens": 3, "end_token_ids": (2, 4)},
}
LAWS = {
    f"T={temperature}, {name}": SamplingFilters(temperature=temperature, **values)
    for temperature in (0.7, 1.0)
    for name, values in FILTERS.items()
} | {"greedy": SamplingFilters(temperature=0.0)}

MODES: dict[str, Callable[[RoundTables], EmittedDistribution]] = {
    "rejection": rejection_distribution,
    "block": block_distribution,
    "choices": choices_distribution,
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_a_round_of_every_mode_follows_the_target_distribution(name: str, gamma: int) -> None:
    tables = RoundTables(LAWS[name], gamma)
    for round_distribution in MODES.values():
        emitted = round_distribution(tables)
        assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-12)
        assert tables.distance(emitted) < TOLERANCE


@pytest.mark.parametrize(("s_max", "coverage"), [(1, 0.99), (2, 0.5), (6, 1.0)])
def test_any_cut_of_the_draft_is_exact(s_max: int, coverage: float) -> None:
    tables = RoundTables(SamplingFilters(), 2, s_max=s_max, coverage=coverage)
    for round_distribution in MODES.values():
        assert tables.distance(round_distribution(tables)) < TOLERANCE


class PointMasses(RoundTables):
    """A draft that names a single token, at every position another one, whether it is the target's top token or not."""

    @cached_property
    def supports(self) -> dict[Path, Support]:
        return {
            path: Support(np.array([sum(path) % self.vocabulary_size], np.uint32), np.ones(1, np.uint16))
            for path in self.paths
        }


@pytest.mark.parametrize("name", LAWS)
def test_a_draft_that_only_names_a_token_is_exact(name: str) -> None:
    tables = PointMasses(LAWS[name], 3)
    for round_distribution in MODES.values():
        assert tables.distance(round_distribution(tables)) < TOLERANCE


def test_always_accepting_a_named_token_is_detected() -> None:
    tables = PointMasses(SamplingFilters(), 3)
    assert tables.distance(rejection_distribution(tables, always_accept)) > 0.01


@pytest.mark.full
@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("seed", range(1, 13))
def test_rounds_on_other_tables_follow_the_target_distribution(name: str, seed: int) -> None:
    for gamma, vocabulary_size, s_max in ((1, 12, 8), (2, 9, 5), (3, 6, 3)):
        tables = RoundTables(LAWS[name], gamma, vocabulary_size, seed, s_max)
        for round_distribution in MODES.values():
            assert tables.distance(round_distribution(tables)) < TOLERANCE


def test_block_verification_accepts_more_than_token_by_token() -> None:
    tables = RoundTables(SamplingFilters(), 3, s_max=6, coverage=1.0)
    token_wise, block_wise = (
        sum(len(path) * mass for path, mass in round_distribution(tables).items())
        for round_distribution in (rejection_distribution, block_distribution)
    )
    assert block_wise > token_wise + 0.01


def always_accept(entry: int, support: Support, row: DistributionRow) -> int:
    return WEIGHT_TOTAL


def swap_p_and_q(entry: int, support: Support, row: DistributionRow) -> int:
    total = int(support.weights.sum(dtype=np.int64))
    weight, target = int(support.weights[entry]) * WEIGHT_TOTAL, int(row.weights[entry]) * total
    return min(WEIGHT_TOTAL, weight * WEIGHT_TOTAL // target)


def no_residual(support: Support, row: DistributionRow) -> np.ndarray:
    return row.weights


@pytest.mark.parametrize(
    "faults", [{"bound": always_accept}, {"bound": swap_p_and_q}, {"residual": no_residual}], ids=lambda f: str(list(f))
)
def test_faults_of_the_decision_are_detected(faults: dict) -> None:
    tables = RoundTables(SamplingFilters(temperature=0.7), 2)
    assert tables.distance(rejection_distribution(tables)) < TOLERANCE
    assert tables.distance(rejection_distribution(tables, **faults)) > 0.01


class TruncatedAfterSampling(RoundTables):
    """Draw from the whole q but state the cut one; a draw outside it becomes the top token."""

    def drafting_distribution(self, path: Path) -> dict[int, float]:
        full = self.full_q[path]
        support = self.supports[path]
        drawn = dict(zip(support.token_ids.tolist(), full[support.token_ids].tolist(), strict=True))
        drawn[int(support.token_ids[np.argmax(support.weights)])] += 1.0 - sum(drawn.values())
        return drawn


@pytest.mark.parametrize("round_distribution", [rejection_distribution, block_distribution])
def test_truncating_after_sampling_is_detected(
    round_distribution: Callable[[RoundTables], EmittedDistribution],
) -> None:
    honest = RoundTables(SamplingFilters(), 2, s_max=2)
    assert honest.distance(round_distribution(honest)) < TOLERANCE
    tables = TruncatedAfterSampling(SamplingFilters(), 2, s_max=2)
    assert tables.distance(round_distribution(tables)) > 0.01


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_target_distribution_rounded_to_half_precision_is_detected(mode: str, dtype: torch.dtype) -> None:
    def rounded(distributions: torch.Tensor) -> torch.Tensor:
        distributions = distributions.to(dtype).to(torch.float64)
        return distributions / distributions.sum(dim=-1, keepdim=True)

    tables = RoundTables(SamplingFilters(), 2, change_p=rounded)
    assert tables.distance(MODES[mode](tables)) > 100 * TOLERANCE


class HistoryWithoutDrafts(RoundTables):
    def history(self, path: Path) -> Path:
        return HISTORY


def test_penalties_that_ignore_the_draft_tokens_are_detected() -> None:
    tables = HistoryWithoutDrafts(LAWS["T=1.0, penalties"], 2)
    assert tables.distance(rejection_distribution(tables)) > 0.01
