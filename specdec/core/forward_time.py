"""Forward times fitted online, with fading weights: seconds = fixed + per token + per context token.

The module computes on observations alone and reads no clock. It fits means, because a rate divides by the expected
time: a wait that is short after a branch hit and long after a miss enters as the mean of both. Called by
`coordinator.round.gamma` in every round, and by `specdec.engine.schedule.step_times` in every step.
"""

from __future__ import annotations

#: Weight that a past observation keeps when another one is added.
KEEP = 0.97

#: Lower bound of that weight, however many rounds passed without an observation.
LEAST_KEPT = 0.25

#: A slope follows the observations once the sum of their squared distances from their mean, in tokens, is several times
#: this value. The number of tokens changes from round to round, the context slowly.
PRIOR_SPREAD = 4.0
PRIOR_CONTEXT_SPREAD = 256.0**2

#: Lower bound, in context tokens, of the cost of one token apart from attention. In a model of width H a token takes at
#: least 12 H^2 multiplications a layer, and 2 H for each attended token: the cost of 6 H context tokens, with H in the
#: hundreds. The bound is far lower because attention is computed less efficiently.
LEAST_CONTEXT_PER_TOKEN = 64.0


def keep_after(keep: float, elapsed: int) -> float:
    """Return the weight that past observations keep after `elapsed` rounds."""
    return max(LEAST_KEPT, keep**elapsed) if elapsed > 1 else keep


class RunningMean:
    """A mean in which past observations fade; 0 before the first observation."""

    def __init__(self) -> None:
        self._weight = 0.0
        self.value = 0.0

    @property
    def is_measured(self) -> bool:
        return self._weight > 0

    def observe(self, value: float, keep: float = KEEP) -> None:
        """Add an observation; `keep`: the weight that past observations keep."""
        self._weight = self._weight * keep + 1.0
        self.value += (value - self.value) / self._weight


class ForwardTime:
    """Least squares on (tokens, context) with fading weights. Predictions never fall with more tokens, nor below 0."""

    def __init__(self, *, is_fixed: bool) -> None:
        """`is_fixed`: while all observations have equal tokens, whether time counts as fixed instead of per token."""
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
        """Add an observation, made `elapsed` rounds after the previous one.

        Source: West 1979, "Updating mean and variance estimates", with fading weights.
        """
        kept = self._weight * keep_after(KEEP, elapsed)
        fade = kept / self._weight if self._weight else 0.0
        self._weight = kept + 1.0
        share, past_share = 1.0 / self._weight, kept / self._weight
        dx, dc, dy = tokens - self._x, context - self._c, seconds - self._y
        self._xx = self._xx * fade + past_share * dx * dx
        self._cc = self._cc * fade + past_share * dc * dc
        self._xc = self._xc * fade + past_share * dx * dc
        self._xy = self._xy * fade + past_share * dx * dy
        self._cy = self._cy * fade + past_share * dc * dy
        self._x += share * dx
        self._c += share * dc
        self._y += share * dy
        self._fit = None

    def predict(self, tokens: float, context: float) -> float:
        """Return the predicted time in seconds."""
        fixed, per_token, per_context = self._fitted()
        return fixed + per_token * tokens + per_context * context

    def scaled(self, tokens: float, context: float) -> float:
        """Return an upper bound of the time in seconds: the mean observation scaled up in proportion, never down.

        It holds if no time grows faster than in proportion. `predict` may take a slope of 0 for a quantity that has not
        varied much yet. Context beyond that of the observations is charged at most at the rate of their tokens
        (`LEAST_CONTEXT_PER_TOKEN`).
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
        """Return the times fixed, per token and per context token: none below 0; the fit passes through the mean."""
        usual = 0.0 if self._is_fixed or not self._x else self._y / self._x
        # The prior holds the slope at its usual value until the observations differ enough in tokens.
        xx, xy = self._xx + PRIOR_SPREAD, self._xy + PRIOR_SPREAD * usual
        unexplained = self._cc - self._xc * self._xc / xx  # spread of context that is not explained by tokens
        per_context = 0.0
        if unexplained > 1e-9 * self._cc:
            per_context = max(0.0, (self._cy - self._xc * xy / xx) / (unexplained + PRIOR_CONTEXT_SPREAD))
        per_token = max(0.0, (xy - self._xc * per_context) / xx)
        # The slopes cannot explain more of the mean than the mean itself.
        explained = per_token * self._x + per_context * self._c
        scale = min(1.0, self._y / explained) if explained > 0 else 0.0
        return self._y - scale * explained, scale * per_token, scale * per_context
