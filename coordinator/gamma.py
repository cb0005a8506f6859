"""How many draft tokens the next round asks for: the number with the most expected tokens per predicted second.

Decided from the session's past alone, by arithmetic on what it is told: the same observations give the same choice.
docs/protocol.md section 7. Not here: the clock (`round` measures), load across sessions. Called by `round`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Asked for until both links have been measured.
FIRST_GAMMA = 4

#: A session's own record outweighs its pool's after about this many tested draft tokens.
PRIOR_TOKENS = 16.0

#: Share of the newest observation in every running mean.
NEWEST_SHARE = 0.1

#: While target-only is best, every so many rounds one draft token is asked for, to notice when it no longer is.
PROBE_EVERY = 32

#: Rounds that ran more committed tokens than this say little about decoding.
MAX_PREFILLED = 32


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """What a finished round tells."""

    num_draft_tokens: int
    num_accepted: int
    draft_s: float
    """Wait for the draft; 0 when it was not asked."""
    verify_s: float
    num_prefilled: int
    """Committed tokens the target had to run in this round."""


class LinearTime:
    """Fits seconds = fixed + per_unit * units to a stream of observations, forgetting old ones."""

    def __init__(self, *, is_fixed: bool) -> None:
        """`is_fixed`: whether time counts as fixed, not as per unit, while all observations had equal units."""
        self._is_fixed = is_fixed
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_measured(self) -> bool:
        return self._weight > 0

    def observe(self, units: float, seconds: float) -> None:
        keep = 1.0 - NEWEST_SHARE
        self._weight = self._weight * keep + 1.0
        self._x = self._x * keep + units
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + units * units
        self._xy = self._xy * keep + units * seconds

    def predict(self, units: float) -> float:
        """Seconds for `units`; never below zero, never falling with more units."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        # The line goes through the mean and through no point below zero, however old the point that tilts it.
        steepest = mean_y / mean_x if mean_x else 0.0
        if variance > 1e-6:
            slope = min(max((self._xy / self._weight - mean_x * mean_y) / variance, 0.0), steepest)
        else:
            slope = 0.0 if self._is_fixed else steepest
        return mean_y + slope * (units - mean_x)


class PoolRecord:
    """What all sessions of one draft pool have shown: acceptance and times."""

    def __init__(self) -> None:
        self.accepted = 0.0
        self.tested = 0.0
        self.draft_time = LinearTime(is_fixed=False)
        self.verify_time = LinearTime(is_fixed=True)

    @property
    def alpha(self) -> float:
        """Accepted share of tested draft tokens; a middling guess before the first."""
        return (self.accepted + 1.4) / (self.tested + 2.0)

    def observe(self, times: RoundTimes, num_tested: int) -> None:
        keep = 1.0 - NEWEST_SHARE / 10 if num_tested else 1.0
        self.accepted = self.accepted * keep + times.num_accepted
        self.tested = self.tested * keep + num_tested
        if times.num_prefilled > MAX_PREFILLED:
            return
        if times.num_draft_tokens:
            self.draft_time.observe(times.num_draft_tokens, times.draft_s)
        self.verify_time.observe(times.num_draft_tokens + 1, times.verify_s)


class GammaChooser:
    """Chooses gamma for the rounds of one request."""

    def __init__(self, pool: PoolRecord, *, fixed: int | None, max_gamma: int) -> None:
        """`fixed`: the request's own gamma; None: chosen each round, at most `max_gamma`."""
        self._pool = pool
        self._fixed = fixed
        self._max_gamma = max_gamma
        self._accepted = 0
        self._tested = 0
        self._rounds_at_zero = 0

    def choose(self, limit: int) -> int:
        """Draft tokens to ask for in the next round, 0..limit."""
        if self._fixed is not None:
            return min(self._fixed, limit)
        limit = min(self._max_gamma, limit)
        if limit <= 0:
            return 0
        if not (self._pool.draft_time.is_measured and self._pool.verify_time.is_measured):
            return min(FIRST_GAMMA, limit)
        best = max(range(limit + 1), key=self._goodput)
        self._rounds_at_zero = 0 if best else self._rounds_at_zero + 1
        if self._rounds_at_zero >= PROBE_EVERY:
            self._rounds_at_zero = 0
            return 1
        return best

    def observe(self, times: RoundTimes) -> None:
        """Learns from a finished round."""
        num_tested = min(times.num_accepted + 1, times.num_draft_tokens)
        self._accepted += times.num_accepted
        self._tested += num_tested
        self._pool.observe(times, num_tested)

    def _goodput(self, gamma: int) -> float:
        """Expected tokens per predicted second of a round with `gamma` draft tokens."""
        prior = self._pool.alpha * PRIOR_TOKENS
        alpha = (self._accepted + prior) / (self._tested + PRIOR_TOKENS)
        expected_tokens = sum(alpha**accepted for accepted in range(gamma + 1))
        draft_s = self._pool.draft_time.predict(gamma) if gamma else 0.0
        return expected_tokens / (draft_s + self._pool.verify_time.predict(gamma + 1) + 1e-9)
