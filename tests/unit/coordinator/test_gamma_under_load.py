"""The choice of gamma by many sessions that share one target comes near the best common goodput.

An event simulation without a clock: sessions draft independently, each step of the target takes all waiting sessions,
and groups form as in a real pool. Times come from formulas; acceptance is drawn.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from coordinator.round.gamma import GammaChooser
from coordinator.round.pool_stats import DraftPoolStats, RoundTimes

MAX_GAMMA = 16
NUM_TOKENS = 8_000
TRIP_S, JITTER_S = 0.0015, 0.0005


@dataclass(frozen=True)
class Pair:
    """A step of the target takes `fixed_s` + `row_s` per position, and a draft token `draft_step_s`."""

    fixed_s: float
    row_s: float
    draft_step_s: float
    alpha: float


@dataclass
class Session:
    """One stream of rounds."""

    chooser: GammaChooser
    coordinator: int = 0
    length: int = 100
    gamma: int = 0
    began_s: float = 0.0
    seen: tuple[int, int] | None = None
    """Rounds and positions the target had answered when it last answered this session."""

    def drafting_s(self, pair: Pair) -> float:
        return self.gamma * pair.draft_step_s + (TRIP_S if self.gamma else 0.0)


@dataclass
class SharedTarget:
    """One target and the sessions on it."""

    pair: Pair
    sessions: list[Session]
    knows_others: bool = True
    """False: no session is told that others share the target."""
    knows_coordinators: bool = True
    """False: a coordinator counts the answers that it gets itself."""
    now_s: float = 0.0
    num_tokens: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _waiting: list[Session] = field(default_factory=list)
    _is_busy: bool = False
    _answered: dict[int, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))
    """Rounds and positions, by who counts them."""
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def goodput(self) -> float:
        """Return the tokens per second of all sessions, without the first quarter of the time."""
        for session in self.sessions:
            self._begin_round(session)
        warm: tuple[int, float] | None = None
        while self.num_tokens < NUM_TOKENS:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()
            if warm is None and self.num_tokens >= NUM_TOKENS / 4:
                warm = self.num_tokens, self.now_s
        assert warm is not None
        return (self.num_tokens - warm[0]) / (self.now_s - warm[1])

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), happens))

    def _one_way_s(self) -> float:
        return TRIP_S / 2 + float(self._random.exponential(JITTER_S))

    def _begin_round(self, session: Session) -> None:
        session.began_s, session.gamma = self.now_s, session.chooser.choose(MAX_GAMMA)
        self._after(session.drafting_s(self.pair) + self._one_way_s(), lambda: self._arrive(session))

    def _arrive(self, session: Session) -> None:
        self._waiting.append(session)
        if not self._is_busy:
            self._step()

    def _step(self) -> None:
        batch, self._waiting = self._waiting, []
        self._is_busy = bool(batch)
        if not batch:
            return
        num_rows = sum(session.gamma + 1 for session in batch)
        step_s = self.pair.fixed_s + self.pair.row_s * num_rows

        def end() -> None:
            for session in batch:
                self._after(self._one_way_s(), lambda session=session: self._answer(session, num_rows, step_s))
            self._step()

        self._after(step_s, end)

    def _answer(self, session: Session, step_tokens: int, step_s: float) -> None:
        num_accepted, num_rows = 0, session.gamma + 1
        while num_accepted < session.gamma and self._random.random() < self.pair.alpha:
            num_accepted += 1
        counter = 0 if self.knows_coordinators else session.coordinator
        answered = self._answered[counter] = self._answered[counter][0] + 1, self._answered[counter][1] + num_rows
        others = (0, 0)
        if session.seen is not None and self.knows_others:
            others = answered[0] - session.seen[0] - 1, answered[1] - session.seen[1] - num_rows
        session.seen = answered
        draft_s = session.drafting_s(self.pair)
        session.chooser.observe(
            RoundTimes(
                num_draft_tokens=session.gamma,
                num_accepted=num_accepted,
                draft_s=draft_s,
                verify_s=self.now_s - session.began_s - draft_s,
                verify_forward_s=step_s,
                num_prefilled=1,
                num_draft_prefilled=1,
                committed_len=session.length,
                num_requested=session.gamma,
                step_tokens=step_tokens if self.knows_others else num_rows,
                num_concurrent=others[0],
                num_other_rows=others[1],
            )
        )
        session.length += num_accepted + 1
        self.num_tokens += num_accepted + 1
        self._begin_round(session)


def goodput(
    pair: Pair,
    num_sessions: int,
    *,
    fixed: int | None = None,
    num_coordinators: int = 1,
    knows_others: bool = True,
    knows_coordinators: bool = True,
) -> float:
    """Return the goodput; each of `num_coordinators` has its share of the sessions and statistics of its own."""
    pools = [DraftPoolStats() for _ in range(num_coordinators)]
    sessions = [
        Session(
            GammaChooser(pools[index % num_coordinators], fixed=fixed, max_gamma=MAX_GAMMA), index % num_coordinators
        )
        for index in range(num_sessions)
    ]
    return SharedTarget(pair, sessions, knows_others, knows_coordinators).goodput()


def best_fixed(pair: Pair, num_sessions: int) -> float:
    return max(goodput(pair, num_sessions, fixed=gamma) for gamma in (1, 2, 3, 4, 6, 8, 12))


@pytest.mark.parametrize("alpha", [0.5, 0.75, 0.9])
@pytest.mark.parametrize(("num_sessions", "share"), [(4, 0.8), (16, 0.9), (64, 0.9)])
def test_sessions_that_share_a_target_come_near_the_best_common_gamma(
    num_sessions: int, share: float, alpha: float
) -> None:
    pair = Pair(fixed_s=0.018, row_s=0.000375, draft_step_s=0.0025, alpha=alpha)
    assert goodput(pair, num_sessions) >= share * best_fixed(pair, num_sessions)


def test_sessions_that_ignore_each_other_overfill_the_target() -> None:
    """The negative control of the test above."""
    pair = Pair(fixed_s=0.018, row_s=0.000375, draft_step_s=0.0025, alpha=0.9)
    assert goodput(pair, 64, knows_others=False) < 0.9 * best_fixed(pair, 64)


@pytest.mark.parametrize("num_coordinators", [2, 4])
def test_coordinators_that_share_a_target_come_as_near_as_a_single_one(num_coordinators: int) -> None:
    pair = Pair(fixed_s=0.018, row_s=0.000375, draft_step_s=0.0025, alpha=0.9)
    assert goodput(pair, 64, num_coordinators=num_coordinators) >= 0.95 * goodput(pair, 64)


def test_coordinators_that_count_only_their_own_rounds_overfill_the_target() -> None:
    """The negative control of the test above."""
    pair = Pair(fixed_s=0.018, row_s=0.000375, draft_step_s=0.0025, alpha=0.9)
    assert goodput(pair, 64, num_coordinators=4, knows_coordinators=False) < 0.95 * goodput(pair, 64)
