"""The decisions of a round under every possible draw: the emitted tokens have exactly the target distribution.

The product's `verify_rejection` and `verify_block` run with their own loops; only the draws are enumerated. Each draw's
range is cut into cells, a round is decided once for every combination of cells, at the lowest and at the highest draw
of the last one, and its output counts with the width of its cells, in fractions. For rejection the tables' numbers are
such that equal cells hold every bound; for block verification the cells are cut at the levels of the paper, calculated
here in fractions. Nothing is sampled, so the false-alarm rate is 0.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from specdec.contract.types import WEIGHT_TOTAL, DistributionRow, Support
from specdec.core.block import verify_block
from specdec.core.random import DrawStream
from specdec.core.rejection import Decision, verify_rejection

Path = tuple[int, ...]

VOCABULARY = range(4)
SUPPORT = (0, 1, 3)
OUTSIDE = 2  # the only token outside, so the tail token is determined
GAMMA = 2
PARTS = 8
GRAIN = WEIGHT_TOTAL // PARTS
BONUS = 0


@cache
def p_of(path: Path) -> tuple[int, ...]:
    """The target's distribution after a path, in eighths; some of it 0."""
    cuts = sorted(np.random.default_rng([7, *path]).integers(0, PARTS + 1, 3).tolist())
    return tuple(high - low for low, high in itertools.pairwise([0, *cuts, PARTS]))


@cache
def q_of(path: Path) -> tuple[int, ...]:
    """The draft's weights on the support: powers of two, and so is their sum."""
    return ((1, 1, 2), (4, 2, 2), (2, 4, 2))[sum(path) % 3]


def support_of(path: Path) -> Support:
    return Support(np.array(SUPPORT, np.uint32), np.array(q_of(path), np.uint16))


def row_of(path: Path) -> DistributionRow:
    weights = [p_of(path)[token_id] * GRAIN for token_id in (*SUPPORT, OUTSIDE)]
    if weights[-1] == 0:
        return DistributionRow(np.array(weights, np.uint32), -1, 0.0)
    return DistributionRow(np.array(weights, np.uint32), OUTSIDE, p_of(path)[OUTSIDE] / PARTS)


def bonus_row(path: Path) -> DistributionRow:
    return DistributionRow(np.array([WEIGHT_TOTAL], np.uint32), BONUS, p_of(path)[BONUS] / PARTS)


class Cell(NamedTuple):
    """A range of draws: its share of all of them, its lowest and its highest draw."""

    share: Fraction
    low: float
    high: float


@dataclass
class Dealer:
    """A `DrawKey` whose draws are enumerated, one combination of cells at a time."""

    cells: Callable[[int, int, DrawStream], Sequence[Cell]]
    """A draw's cells: its range, its index and its stream."""
    is_high: bool = False
    dealt: list[int] = field(default_factory=list)
    """Index of each draw's cell in the current combination."""
    _num_cells: list[int] = field(default_factory=list)
    _num_drawn: int = 0
    share: Fraction = Fraction(1)

    def again(self, *, is_high: bool) -> None:
        """Return the same cells at their lower or upper end."""
        self.is_high, self._num_drawn, self.share = is_high, 0, Fraction(1)
        self._num_cells = []

    def advance(self) -> bool:
        """Advance to the next combination; return whether one is left."""
        while self.dealt and self.dealt[-1] + 1 == self._num_cells[len(self.dealt) - 1]:
            self.dealt.pop()
        if self.dealt:
            self.dealt[-1] += 1
        return bool(self.dealt)

    def _deal(self, size: int, index: int, stream: DrawStream) -> Any:
        cells = self.cells(size, index, stream)
        if self._num_drawn == len(self.dealt):
            self.dealt.append(0)
        self._num_cells.append(len(cells))
        cell = cells[self.dealt[self._num_drawn]]
        self._num_drawn += 1
        self.share *= cell.share
        return cell.high if self.is_high else cell.low

    def uint31s(self, num_draws: int, stream: DrawStream) -> list[int]:
        return [self._deal(WEIGHT_TOTAL, index, stream) for index in range(num_draws)]

    def below(self, n: int, index: int, stream: DrawStream) -> int:
        return int(self._deal(n, index, stream))

    def uniform(self, index: int, stream: DrawStream) -> float:
        return float(self._deal(0, index, stream))


def every_decision(
    verify: Callable[..., Decision], deal: Callable[[Path], Dealer]
) -> Iterator[tuple[Decision, Fraction]]:
    """Return every possible decision of a round with its probability."""
    for draft in itertools.product(SUPPORT, repeat=GAMMA):
        share = Fraction(1)
        for index, token_id in enumerate(draft):
            weights = q_of(draft[:index])
            share *= Fraction(weights[SUPPORT.index(token_id)], sum(weights))
        supports = [support_of(draft[:index]) for index in range(GAMMA)]
        rows = [*(row_of(draft[:index]) for index in range(GAMMA)), bonus_row(draft)]
        dealer, is_left = deal(draft), True
        while is_left:
            dealer.again(is_high=False)
            decision = verify(draft, supports, rows, dealer)
            dealer.again(is_high=True)
            assert verify(draft, supports, rows, dealer) == decision
            yield decision, share * dealer.share
            is_left = dealer.advance()


def joint_distribution(emitted: dict[Path, Fraction]) -> dict[Path, Fraction]:
    """Distribution of GAMMA + 1 tokens of which the target writes those that a round did not emit."""
    joint: dict[Path, Fraction] = defaultdict(Fraction)
    for path, share in emitted.items():
        for rest in itertools.product(VOCABULARY, repeat=GAMMA + 1 - len(path)):
            joint[path + rest] += share * target_share(path, rest)
    return {path: share for path, share in joint.items() if share}


def target_share(path: Path, rest: Path) -> Fraction:
    """Return the probability that the target continues a path with these tokens."""
    share = Fraction(1)
    for token_id in rest:
        share *= Fraction(p_of(path)[token_id], PARTS)
        path = (*path, token_id)
    return share


def emitted_distribution(verify: Callable[..., Decision], deal: Callable[[Path], Dealer]) -> dict[Path, Fraction]:
    emitted: dict[Path, Fraction] = defaultdict(Fraction)
    for decision, share in every_decision(verify, deal):
        path = decision.token_ids
        if len(path) > GAMMA:  # the bonus token is a draw of p itself, made by the target
            assert path[-1] == BONUS
            path = path[:GAMMA]
        emitted[path] += share
    return emitted


# ---- rejection: equal cells --------------------------------------------------------------------------------------


def equal_cells(size: int, index: int, stream: DrawStream) -> Sequence[Cell]:
    """Return the cells of eighths of 2^31, and of a residual, whose weights are multiples of four eighths."""
    width = GRAIN if stream is DrawStream.ACCEPT else 4 * GRAIN
    assert size % width == 0
    return [Cell(Fraction(width, size), low, low + width - 1) for low in range(0, size, width)]


def deal_equally(draft: Path) -> Dealer:
    return Dealer(equal_cells)


def test_rejection_over_every_draw_emits_exactly_the_target_distribution() -> None:
    emitted = emitted_distribution(verify_rejection, deal_equally)
    assert sum(emitted.values()) == 1
    assert joint_distribution(emitted) == joint_distribution({(): Fraction(1)})


def accept_always(draft: Path, supports: Sequence[Support], rows: Sequence[DistributionRow], key: Dealer) -> Decision:
    return verify_rejection(draft, supports, rows, Dealer(lambda *_: [Cell(Fraction(1), 0, 0)]))  # type: ignore[arg-type]


def reject_at_once(draft: Path, supports: Sequence[Support], rows: Sequence[DistributionRow], key: Dealer) -> Decision:
    """Draw from the target's row instead of the residual if the draft token is not accepted."""
    decision = verify_rejection(draft, supports, rows, key)  # type: ignore[arg-type]
    if decision.num_accepted == GAMMA:
        return decision
    path = draft[: decision.num_accepted]
    likeliest = max(VOCABULARY, key=lambda token_id: p_of(path)[token_id])
    return decision._replace(token_ids=(*path, likeliest))


@pytest.mark.parametrize("fault", [accept_always, reject_at_once])
def test_faults_of_the_loop_are_detected(fault: Callable[..., Decision]) -> None:
    """Negative control."""
    assert joint_distribution(emitted_distribution(fault, deal_equally)) != joint_distribution({(): Fraction(1)})


# ---- block: cells between the levels of the paper ----------------------------------------------------------------

_EPSILON = 1e-12


def cells_between(bounds: Sequence[Fraction]) -> list[Cell]:
    """Return the intervals of (0, 1) between the bounds, without empty ones."""
    ends = [Fraction(0), *bounds, Fraction(1)]
    return [
        Cell(high - low, float(low) + _EPSILON, float(high) - _EPSILON)
        for low, high in itertools.pairwise(ends)
        if high > low
    ]


def shares_of(draft: Path) -> list[Fraction]:
    """c_0..c_L of the paper."""
    shares = [Fraction(1)]
    for index, token_id in enumerate(draft):
        p, q = Fraction(p_of(draft[:index])[token_id], PARTS), q_of(draft[:index])
        shares.append(min(Fraction(1), shares[-1] * p * sum(q) / q[SUPPORT.index(token_id)]))
    return shares


def excess_of(path: Path, share: Fraction) -> list[Fraction]:
    """max(0, c P - Q) on the support, then outside, where Q is 0."""
    q = [*q_of(path), 0]
    return [
        max(Fraction(0), share * Fraction(p_of(path)[token_id], PARTS) - Fraction(weight, sum(q)))
        for token_id, weight in zip((*SUPPORT, OUTSIDE), q, strict=True)
    ]


def deal_by_levels(draft: Path) -> Dealer:
    shares = shares_of(draft)

    def cells(size: int, index: int, stream: DrawStream) -> Sequence[Cell]:
        if stream is DrawStream.ACCEPT:
            share, num_prefix = shares[index + 1], index + 1
            if num_prefix == GAMMA or share == 1:
                return cells_between([share])
            excess = sum(excess_of(draft[:num_prefix], share))
            return cells_between([excess / (excess + 1 - share)])
        excess = excess_of(draft[:index], shares[index])
        return cells_between([reach / sum(excess) for reach in itertools.accumulate(excess[:-1])])

    return Dealer(cells)


def test_block_verification_over_every_draw_emits_exactly_the_target_distribution() -> None:
    emitted = emitted_distribution(verify_block, deal_by_levels)
    assert sum(emitted.values()) == 1
    assert joint_distribution(emitted) == joint_distribution({(): Fraction(1)})


def test_block_verification_over_every_draw_accepts_more_than_rejection() -> None:
    block, rejection = (
        sum(share * decision.num_accepted for decision, share in every_decision(verify, deal))
        for verify, deal in ((verify_block, deal_by_levels), (verify_rejection, deal_equally))
    )
    assert block > rejection


@pytest.mark.parametrize(("verify", "deal"), [(verify_rejection, deal_equally), (verify_block, deal_by_levels)])
def test_a_decision_states_the_probabilities_of_its_tokens(
    verify: Callable[..., Decision], deal: Callable[[Path], Dealer]
) -> None:
    for decision, share in every_decision(verify, deal):
        paths = [decision.token_ids[:index] for index in range(len(decision.token_ids))]
        assert len(decision.token_ids) == decision.num_accepted + 1
        assert decision.p == tuple(p_of(path)[decision.token_ids[len(path)]] / PARTS for path in paths)
        assert decision.q[-1] == 0.0
        assert decision.q[:-1] == tuple(
            q_of(path)[SUPPORT.index(decision.token_ids[len(path)])] / sum(q_of(path)) for path in paths[:-1]
        )
        assert share > 0
