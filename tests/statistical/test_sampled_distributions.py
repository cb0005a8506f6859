"""Draws through the shipped keys follow their distributions, alone and over the rounds of a session.

Chi-square against exact distributions; a test fails below a p-value of 1e-6, so with about a dozen tests a fresh choice
of seeds would raise a false alarm once in some 80,000 runs. The seeds are fixed: a given build always answers alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from specdec.contract.types import SamplingFilters
from specdec.core.block import verify_block
from specdec.core.coupling import verify_choices
from specdec.core.random import DrawKey, DrawStream
from specdec.core.reference import coupled_choice, cut_support, distribution_row
from specdec.core.rejection import Decision, verify_rejection
from specdec.core.sparse import draw_from_support
from specdec.engine.logits.rows import coupled_choices, distribution_rows
from tests.statistical.table_model import NO_IDS, Path, RoundTables
from tests.support.expectation import chi_square_p_value, coupled_acceptance_probability

FALSE_ALARM_RATE = 1e-6


def p_value(counts: np.ndarray, distribution: np.ndarray) -> float:
    """Return the p-value of a chi-square test: 0 for an excluded outcome; the rarest outcomes are pooled."""
    counts, distribution = np.ravel(counts), np.ravel(distribution)
    if counts[distribution == 0].any():
        return 0.0
    order = np.argsort(distribution)
    observed, expected = counts[order], distribution[order] * counts.sum()
    num_rare = int(np.searchsorted(np.cumsum(expected), 10.0)) + 1
    observed = np.append(observed[:num_rare].sum(), observed[num_rare:])
    expected = np.append(expected[:num_rare].sum(), expected[num_rare:])
    return chi_square_p_value(observed, expected) if len(expected) > 1 else 1.0


def test_draft_tokens_are_drawn_from_the_weights_that_travel() -> None:
    support, _ = cut_support(np.array([0.5, 0.01, 0.2, 0.29]), 3)
    draws = [draw_from_support(support, DrawKey(seed, 0, 0), 0) for seed in range(10_000)]
    distribution = np.zeros(4)
    distribution[support.token_ids] = support.weights / support.weights.sum(dtype=np.int64)
    assert p_value(np.bincount(draws, minlength=4), distribution) > FALSE_ALARM_RATE


@pytest.mark.parametrize("size", [12, 1300])
def test_each_tail_token_has_its_share_of_the_unit_interval(size: int) -> None:
    """The share is measured by bisection, because the tail token rises with the uniform."""
    distribution = np.random.default_rng(1).dirichlet(np.ones(size))
    distribution[::4] = 0.0
    distribution /= distribution.sum()
    ids = np.array([1, 2, 6], dtype=np.uint32)
    outside = distribution.copy()
    outside[ids] = 0.0
    reach = np.cumsum(outside) / outside.sum()
    for token_id in np.flatnonzero(outside)[:: max(1, size // 20)]:
        for draw in (
            lambda uniform: distribution_row(distribution, ids, uniform).tail_token_id,
            lambda uniform: distribution_rows(torch.tensor(distribution[None]), [ids], [uniform])[0].tail_token_id,
        ):
            low, high = 0.0, 1.0
            for _ in range(40):
                middle = (low + high) / 2
                low, high = (low, middle) if draw(middle) > token_id else (middle, high)
            assert abs(high - reach[token_id]) < 1e-9


def test_coupled_choices_follow_the_distribution_and_positions_are_independent() -> None:
    distribution = np.array([0.4, 0.0, 0.3, 0.2, 0.1])
    num = 20_000
    distributions = torch.tensor(distribution).expand(2 * num, -1)
    choices, _ = coupled_choices(distributions, [5] * (2 * num), [0] * (2 * num), range(2 * num))
    pairs = np.zeros((5, 5))
    np.add.at(pairs, (choices[::2], choices[1::2]), 1)
    assert p_value(pairs, np.outer(distribution, distribution)) > FALSE_ALARM_RATE


def test_coupled_choices_without_noise_per_token_are_detected() -> None:
    distribution = np.array([0.4, 0.3, 0.2, 0.1])
    num = 5000
    noise = np.array([DrawKey(0, 0, position).uniform(0, DrawStream.COUPLED) for position in range(num)])
    choices = np.argmax(np.log(distribution)[None] - np.log(-np.log(noise))[:, None], axis=-1)
    assert p_value(np.bincount(choices, minlength=4), distribution) < FALSE_ALARM_RATE


@dataclass(frozen=True)
class PositionKey(DrawKey):
    """The fault that section 4 warns of: acceptance is keyed by the position alone instead of by the round."""

    def uniform(self, index: int, stream: DrawStream) -> float:
        if stream is not DrawStream.ACCEPT:
            return DrawKey(self.seed, self.turn, self.committed_len).uniform(index, stream)
        return DrawKey(self.seed, self.turn, 0).uniform(self.committed_len + index, stream)


NUM_TOKENS = 3
NUM_SESSIONS = 8000


def run_session(
    tables: RoundTables, verify: Callable[..., Decision], seed: int, make_key: type[DrawKey] = DrawKey
) -> Path:
    """Run rounds of one request on table models with the product's draws until NUM_TOKENS are emitted."""
    path: Path = ()
    while len(path) < NUM_TOKENS:
        key = make_key(seed, 0, len(path))
        draft: Path = ()
        for index in range(NUM_TOKENS - len(path) - 1):
            draft += (draw_from_support(tables.supports[path + draft], key, index),)
        prefixes = [path + draft[:index] for index in range(len(draft) + 1)]
        supports = [tables.supports[prefix] for prefix in prefixes[:-1]]
        ids = [*(support.token_ids for support in supports), NO_IDS]
        rows = [
            distribution_row(tables.p[prefix], support_ids, uniform)
            for prefix, support_ids, uniform in zip(prefixes, ids, key.tail_uniforms(len(draft)), strict=True)
        ]
        path += verify(draft, supports, rows, key).token_ids
    return path


def session_p_value(tables: RoundTables, verify: Callable[..., Decision], make_key: type[DrawKey] = DrawKey) -> float:
    counts = np.zeros((tables.vocabulary_size,) * NUM_TOKENS)
    for seed in range(NUM_SESSIONS):
        counts[run_session(tables, verify, seed, make_key)] += 1
    return p_value(counts, tables.target_distribution())


def session_tables(s_max: int) -> RoundTables:
    return RoundTables(SamplingFilters(), gamma=NUM_TOKENS - 1, vocabulary_size=4, s_max=s_max)


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_the_first_tokens_of_sessions_follow_the_targets_joint_distribution(verify: Callable[..., Decision]) -> None:
    assert session_p_value(session_tables(s_max=3), verify) > FALSE_ALARM_RATE


def test_block_rounds_keyed_by_position_alone_are_detected() -> None:
    assert session_p_value(session_tables(s_max=3), verify_block, PositionKey) < FALSE_ALARM_RATE


@pytest.mark.full
@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
@pytest.mark.parametrize("seed", range(1, 9))
def test_sessions_on_other_tables_follow_the_targets_joint_distribution(
    verify: Callable[..., Decision], seed: int
) -> None:
    tables = RoundTables(SamplingFilters(min_p=0.02), NUM_TOKENS - 1, 5, seed, s_max=3)
    assert session_p_value(tables, verify) > FALSE_ALARM_RATE


@pytest.mark.parametrize("gamma", [1, 2])
def test_coupled_sessions_emit_the_same_text_with_any_gamma_and_draft(gamma: int) -> None:
    tables = session_tables(s_max=4)
    num_accepted = 0
    for seed in range(300):

        def choice(distributions: dict[Path, np.ndarray], path: Path, seed: int = seed) -> int:
            return coupled_choice(distributions[path], seed, 0, len(path))

        alone: Path = ()
        while len(alone) < NUM_TOKENS:
            alone += (choice(tables.p, alone),)
        path: Path = ()
        while len(path) < NUM_TOKENS:
            draft: Path = ()
            while len(draft) < min(gamma, NUM_TOKENS - len(path) - 1):
                draft += (choice(tables.full_q, path + draft),)
            choices = [choice(tables.p, path + draft[:index]) for index in range(len(draft) + 1)]
            decision = verify_choices(draft, choices, [1.0] * len(choices))
            num_accepted += decision.num_accepted
            path += decision.token_ids
        assert path == alone
    assert num_accepted > 100


def test_coupled_drafts_are_accepted_as_often_as_the_formula_says() -> None:
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.4, 0.2, 0.3])
    num = 20_000
    distributions = torch.tensor(np.concatenate((np.tile(p, (num, 1)), np.tile(q, (num, 1)))))
    choices = np.array(coupled_choices(distributions, [3] * (2 * num), [0] * (2 * num), [*range(num), *range(num)])[0])
    num_equal = int((choices[:num] == choices[num:]).sum())
    rate = coupled_acceptance_probability(p, q)
    assert p_value(np.array([num_equal, num - num_equal]), np.array([rate, 1.0 - rate])) > FALSE_ALARM_RATE
