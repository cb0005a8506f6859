"""The expected rounds of a draft against enumeration; weights and classes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from coordinator.round.routing_table import Hedge
from coordinator.routing.classes import class_of, kind_of
from coordinator.routing.expected_rounds import ExpectedRounds, acceptance_of, expected_rounds, rounds_of
from specdec.contract.types import Mode, SamplingFilters, Score

V, GAMMA, LENGTH = 3, 2, 4
Model = Callable[[tuple[int, ...]], np.ndarray]
OfIndex = Callable[[np.ndarray, int], np.ndarray]


def table_model(seed: int) -> Model:
    """Return a distribution for every prefix."""

    def after(prefix: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([seed, len(prefix), *prefix]).dirichlet(np.ones(V))

    return after


def enumerated_rounds(p: Model, q: Model, of_index: OfIndex = lambda row, index: row) -> np.ndarray:
    """Return the expected tested and accepted draft tokens over all runs of token-wise rejection: [2, GAMMA].

    Drafts are drawn from q and accepted with min(1, p/q), corrections from the residual, bonus tokens from p. Positions
    beyond LENGTH are not counted. `of_index` changes q by the index in the round.
    """
    counts = np.zeros((2, GAMMA))

    def begin(prefix: tuple[int, ...], weight: float) -> None:
        if weight > 0.0:
            go_on(prefix, 0, weight)

    def go_on(prefix: tuple[int, ...], index: int, weight: float) -> None:
        if len(prefix) >= LENGTH:
            return
        of_target = p(prefix)
        if index == GAMMA:
            for token_id in range(V):
                begin((*prefix, token_id), weight * of_target[token_id])
            return
        of_draft = of_index(q(prefix), index)
        kept = np.minimum(of_target, of_draft)
        counts[0, index] += weight
        counts[1, index] += weight * kept.sum()
        residual = np.maximum(of_target - of_draft, 0.0)
        for token_id in range(V):
            if kept[token_id]:
                go_on((*prefix, token_id), index + 1, weight * kept[token_id])
            if residual[token_id]:
                begin((*prefix, token_id), weight * (1.0 - kept.sum()) * residual[token_id] / residual.sum())

    begin((), 1.0)
    return counts


def scored_rounds(p: Model, q: Model, *, shift: int = 0, swapped: bool = False) -> np.ndarray:
    """Return the same numbers from tokens committed without that draft: draws from p, and their scores."""
    counts = np.zeros((2, GAMMA))
    for tokens in itertools.product(range(V), repeat=LENGTH):
        prefixes = [tokens[:index] for index in range(LENGTH)]
        of_target = [float(p(prefix)[token_id]) for prefix, token_id in zip(prefixes, tokens, strict=True)]
        of_draft = [float(q(prefix)[token_id]) for prefix, token_id in zip(prefixes, tokens, strict=True)]
        of_draft = of_draft[shift:] + of_draft[:shift]
        asked = (of_target, of_draft) if swapped else (of_draft, of_target)
        acceptance = acceptance_of(*asked)
        rounds = expected_rounds([acceptance[start : start + GAMMA] for start in range(LENGTH)])
        counts += np.prod(of_target) * np.array([rounds.tested, rounds.accepted])
    return counts


@pytest.mark.parametrize("seed", range(5))
def test_scores_of_committed_tokens_give_exactly_the_drafts_own_expected_rounds(seed: int) -> None:
    p, q = table_model(seed), table_model(100 + seed)
    assert scored_rounds(p, q) == pytest.approx(enumerated_rounds(p, q), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_that_depends_on_where_its_round_began_is_scored_round_by_round(seed: int) -> None:
    """Such a draft is a head, which knows less at each further index of a round."""
    p, q = table_model(seed), table_model(100 + seed)

    def fading(row: np.ndarray, index: int) -> np.ndarray:
        return row / (1 + index) + index / (1 + index) / V

    counts = np.zeros((2, GAMMA))
    for tokens in itertools.product(range(V), repeat=LENGTH):
        of_target = [float(p(tokens[:index])[token_id]) for index, token_id in enumerate(tokens)]
        rows = [
            [
                float(fading(q(tokens[: start + index]), index)[token_id])
                for index, token_id in enumerate(tokens[start : start + GAMMA])
            ]
            for start in range(LENGTH)
        ]
        score = Score(tuple(itertools.chain(*rows)), 0.0, 0.0, tuple(map(len, rows)))
        rounds = expected_rounds(rounds_of(score, of_target))
        counts += np.prod(of_target) * np.array([rounds.tested, rounds.accepted])
    assert counts == pytest.approx(enumerated_rounds(p, q, fading), abs=1e-12)
    assert np.abs(counts - enumerated_rounds(p, q)).max() > 0.01


def test_a_position_without_a_draft_is_a_round_of_one_token() -> None:
    # The first round has no draft; the second names one token of two, and is right; then a bonus token.
    rounds = expected_rounds([[], [1.0], [0.0, 1.0], [0.5]])
    assert rounds == ExpectedRounds((2.0, 0.0), (1.5, 0.0))
    assert expected_rounds([[], []]) == ExpectedRounds((), ())


@pytest.mark.parametrize("fault", [{"swapped": True}, {"shift": 1}], ids=["p and q swapped", "one position off"])
def test_wrong_scores_give_other_expected_rounds(fault: dict[str, int]) -> None:
    """Negative controls."""
    p, q = table_model(1), table_model(101)
    assert np.abs(scored_rounds(p, q, **fault) - enumerated_rounds(p, q)).max() > 0.01  # type: ignore[arg-type]


def test_the_weights_of_a_class_find_the_pool_with_the_best_goodput_and_follow_changes() -> None:
    hedge = Hedge()
    assert hedge.choose(["a", "b", "c"]) == "a"
    for _ in range(20):
        hedge.observe({"a": 80.0, "b": 100.0, "c": 90.0})
    assert hedge.choose(["a", "b", "c"]) == "b"
    assert sum(map(hedge.weight, "abc")) == pytest.approx(1.0)
    for _ in range(40):
        hedge.observe({"a": 100.0, "b": 70.0, "c": 60.0})
    assert hedge.choose(["a", "b", "c"]) == "a"
    assert hedge.choose(["b", "c"]) == "b"  # the best one is gone


def test_a_pool_that_is_not_scored_keeps_its_weight() -> None:
    hedge = Hedge()
    hedge.choose(["a", "b", "c"])
    for _ in range(10):
        hedge.observe({"a": 50.0, "b": 100.0})
    assert hedge.weight("c") == pytest.approx(1 / 3)
    assert hedge.weight("b") > 0.6


def test_the_kind_of_a_prompt_follows_from_its_tokens_and_text() -> None:
    once, again = np.arange(60, dtype=np.uint32), np.arange(120, dtype=np.uint32) % 60
    assert kind_of(once, "def f(x):\n    return x[0] + g(x, key=lambda y: -y)\n") == "code"
    assert kind_of(once, "It was late, and nobody had come to see the lighthouse (or so it seemed).") == "prose"
    assert kind_of(again, "It was late.") == "repeating"
    assert kind_of(once[:0], "") == "prose"


def test_a_class_consists_of_label_mode_and_temperature() -> None:
    def of(temperature: float, task: str = "") -> str:
        return class_of(task, "prose", Mode.BLOCK, SamplingFilters(temperature=temperature))

    assert [of(0.0), of(0.3), of(1.0), of(1.5)] == [
        "prose/block/greedy",
        "prose/block/cool",
        "prose/block/warm",
        "prose/block/hot",
    ]
    assert of(0.0, "sql") == "sql/block/greedy"
    assert of(0.0, "\x1b[2Jsql\n") == "?[2Jsql?/block/greedy"
