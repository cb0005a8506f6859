"""Forward times fitted online: seconds = fixed + per token + per context, the past fading.

Arithmetic on observations alone, no clock; only means are fitted, because expected time is what a rate divides by: a
wait that is short after a branch hit and long after a miss enters as their mean. Called by `coordinator.round.gamma`,
per round, and by `specdec.engine.schedule.step_times`, per step.
"""

from __future__ import annotations

#: Share of a record that is left one observation later.
KEEP = 0.97

#: However long nothing was observed, this much of the record is left beside the next observation.
LEAST_KEPT = 0.25

#: A slope is taken from the observations once their squared distances from their mean, in tokens, add up to several
#: times this: the number of tokens changes from round to round, the context slowly.
PRIOR_SPREAD = 4.0
PRIOR_CONTEXT_SPREAD = 256.0**2

#: A token's own way through a model takes at least as long as its attention to so many others. Of a model of width H it
#: has 12 H^2 multiplications a layer or more, and 2 H for each token attended to: as many as for 6 H of them, and H is
#: hundreds; the rest is for attention that is less well computed.
LEAST_CONTEXT_PER_TOKEN = 64.0


def keep_after(keep: float, elapsed: int) -> float:
    """Share of a record that is left `elapsed` rounds later."""
    return max(LEAST_KEPT, keep**elapsed) if elapsed > 1 else keep


class RunningMean:
    """A mean whose past fades; 0 before the first observation."""

    def __init__(self) -> None:
        self._weight = 0.0
        self.value = 0.0

    def observe(self, value: float, keep: float = KEEP) -> None:
        """`keep`: share of the record that is left beside it."""
        self._weight = self._weight * keep + 1.0
        self.value += (value - self.value) / self._weight


class ForwardTime:
    """Least squares on (tokens, context) with fading weights. Never predicts less for more, nor less than 0."""

    def __init__(self, *, is_fixed: bool) -> None:
        """`is_fixed`: whether time counts as fixed, not as per token, while all observations had equal tokens."""
        self._is_fixed = is_fixed
        self._weight = 0.0
        # Weighted means and centred second moments: tokens (x), context (c), seconds (y).
        self._x = self._c = self._y = 0.0
        self._xx = self._cc = self._xc = self._xy = self._cy = 0.0
        self._fit: tuple[float, float, float] | None = None

    @property
    def is_measured(self) -> bool:
        return self._weight > 0

    @property
    def per_token_s(self) -> float:
        return self._fitted()[1]

    def observe(self, tokens: float, context: float, seconds: float, elapsed: int = 1) -> None:
        """Adds an observation, made `elapsed` rounds after the one before it.

        Source: West 1979, "Updating mean and variance estimates", with fading weights.
        """
        kept = self._weight * keep_after(KEEP, elapsed)
        fade = kept / self._weight if self._weight else 0.0
        self._weight = kept + 1.0
        share, rest = 1.0 / self._weight, kept / self._weight
        dx, dc, dy = tokens - self._x, context - self._c, seconds - self._y
        self._xx = self._xx * fade + rest * dx * dx
        self._cc = self._cc * fade + rest * dc * dc
        self._xc = self._xc * fade + rest * dx * dc
        self._xy = self._xy * fade + rest * dx * dy
        self._cy = self._cy * fade + rest * dc * dy
        self._x += share * dx
        self._c += share * dc
        self._y += share * dy
        self._fit = None

    def predict(self, tokens: float, context: float) -> float:
        """Seconds."""
        fixed, per_token, per_context = self._fitted()
        return fixed + per_token * tokens + per_context * context

    def scaled(self, tokens: float, context: float) -> float:
        """Seconds at most, where no time grows faster than in proportion: the mean observation scaled up, never down.

        What `predict` takes for the slope of something that hardly changed so far may be 0. Context beyond what the
        observations had for as many tokens is charged at most as their tokens were (`LEAST_CONTEXT_PER_TOKEN`).
        """
        seen_tokens = max(1.0, self._x)
        growth = max(1.0, tokens / seen_tokens)
        more_context = max(0.0, context - growth * self._c)
        return self._y * (growth + more_context / (self._c + LEAST_CONTEXT_PER_TOKEN * seen_tokens))

    def _fitted(self) -> tuple[float, float, float]:
        if self._fit is None:
            self._fit = self._solve()
        return self._fit

    def _solve(self) -> tuple[float, float, float]:
        """fixed, per token, per context: none below 0, and through the mean."""
        usual = 0.0 if self._is_fixed or not self._x else self._y / self._x
        # The prior holds the slope at its usual value until tokens have really differed.
        xx, xy = self._xx + PRIOR_SPREAD, self._xy + PRIOR_SPREAD * usual
        left = self._cc - self._xc * self._xc / xx  # spread of context that tokens do not explain
        per_context = 0.0
        if left > 1e-9 * self._cc:
            per_context = max(0.0, (self._cy - self._xc * xy / xx) / (left + PRIOR_CONTEXT_SPREAD))
        per_token = max(0.0, (xy - self._xc * per_context) / xx)
        # What the slopes explain at the mean cannot be more than the mean itself.
        explained = per_token * self._x + per_context * self._c
        scale = min(1.0, self._y / explained) if explained > 0 else 0.0
        return self._y - scale * explained, scale * per_token, scale * per_context
