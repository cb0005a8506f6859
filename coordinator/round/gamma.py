"""The choice of gamma, the number of draft tokens per round: the one with the highest throughput of the whole batch.

A draft source chooses gamma here and passes it to `draft_calls`; the `runner` reports each finished round back.

A round's own rate is its expected tokens divided by its predicted time. Its rows also make the target's steps longer,
which delays the rounds of other sessions. So each row is charged the tokens that others lose by it: on an idle target
that is nothing, on a full one no draft token may be worth its row. The choice is arithmetic on past observations
without a clock of its own, so that the same observations give the same choice (docs/protocol.md section 7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from coordinator.round.acceptance import Acceptance
from coordinator.round.pool_stats import MAX_PREFILLED, DraftPoolStats, RoundTimes, RunStepTimes

#: Gamma until the times of draft and target have been measured.
FIRST_GAMMA = 4

#: While target-only rounds are fastest, a probe requests one draft token now and then, to notice when drafting is worth
#: it again. Probes may cost this share of the time, within these limits of tokens between two of them.
PROBE_SHARE = 0.03
LEAST_TOKENS_PER_PROBE = 50
MOST_TOKENS_PER_PROBE = 100

#: Largest number of streams that share the probes of one.
MOST_PROBING_STREAMS = 64

#: Largest number of consecutive rounds of a probe. A draft that has not seen the last tokens runs them first, so only
#: the second round shows the time of drafting. More follow while they take less than half of the remembered time.
ROUNDS_PER_PROBE = 6

#: Smallest number of draft tokens that a request must still have room for to begin a probe for its pool: the first
#: round of a probe shows no times, and each of its rounds makes up to two tokens.
LEAST_LIMIT_TO_PROBE = 3

#: Weight of a session's acceptance counts that is left one round later.
SESSION_KEEP = 0.95


class BestGamma(NamedTuple):
    gamma: int
    rate: float
    """Tokens per second of rounds with this gamma, minus those that other sessions lose."""


def best_gamma(
    pool: DraftPoolStats,
    acceptance: Acceptance,
    alpha: float,
    context: float,
    limit: int,
    draft_s: Callable[[float, float], float],
) -> BestGamma:
    """Return the gamma with the best rate, its cost to other sessions subtracted; the smallest of equal ones.

    Args:
        pool: statistics that give the target's times and the price of a row.
        acceptance: acceptance by position.
        alpha: prior for positions with few observations.
        context: number of committed tokens.
        limit: largest gamma.
        draft_s: returns the seconds that a number of draft tokens take after a number of committed tokens.
    """
    other_tokens, row_price = pool.other_step_tokens.value, pool.row_price
    best = BestGamma(0, float("-inf"))
    expected_tokens, reach = 1.0, 1.0
    for gamma in range(limit + 1):
        if gamma:
            reach *= acceptance.at(gamma - 1, alpha)
            expected_tokens += reach
        round_s = pool.verify_time.predict(gamma + 1 + other_tokens, context)
        if gamma:
            round_s += pool.link_s.value + draft_s(gamma, context)
        else:  # a run, unless none was measured
            round_s += pool.run_link_s.value if pool.run_link_s.is_measured else pool.link_s.value
        rate = expected_tokens / max(round_s, 1e-9) - row_price * gamma
        if rate > best.rate:
            best = BestGamma(gamma, rate)
    return best


class GammaChooser:
    """Chooses gamma for the rounds of one request."""

    def __init__(self, pool: DraftPoolStats, *, fixed: int | None, max_gamma: int) -> None:
        """`fixed` is the request's own gamma; None: chosen in each round, at most `max_gamma`."""
        self._pool = pool
        self._fixed = fixed
        self._max_gamma = max_gamma
        self._acceptance = Acceptance(SESSION_KEEP)
        self._rounds_since_draft = 0
        self._probes_left = 0
        self._is_probing = False
        """True while the present probe is one for the whole pool."""
        self._committed_len = 0
        self._is_first = True
        self._choice: int | None = None
        """Choice for the next round, once it is made."""

    def choose(self, limit: int) -> int:
        """Return the number of draft tokens to request in the next round, from 0 to `limit`."""
        if self._fixed is not None:
            return min(self._fixed, limit)
        if self._choice is None:
            self._choice = self._choose(min(self._max_gamma, limit))
        return min(self._choice, limit)

    def _choose(self, limit: int) -> int:
        if limit <= 0:
            return 0
        if not (self._pool.draft_wait.is_measured and self._pool.verify_time.is_measured):
            return min(FIRST_GAMMA, limit)
        best = self._best(limit).gamma
        return best or int(self._begins_or_continues_probe(limit))

    def most(self, limit: int) -> int:
        """Return the largest number of draft tokens that a round may have, whatever they cost."""
        return min(self._max_gamma if self._fixed is None else self._fixed, limit)

    def best_rate(self, limit: int) -> float | None:
        """Return the best rate of rounds with up to `limit` draft tokens; None while times are unknown."""
        if not (self._pool.draft_wait.is_measured and self._pool.verify_time.is_measured):
            return None
        return self._best(self.most(limit)).rate

    def observe(self, times: RoundTimes) -> None:
        """Learn from a finished round."""
        self._choice = None
        if self._fixed is None or times.num_requested:  # requests that never draft need no probe
            self._pool.count(times)
        if self._fixed is None:
            self._pool.count_choice(times.num_requested)
        self._rounds_since_draft += 1
        self._committed_len = times.committed_len + times.num_accepted + 1
        if times.num_draft_tokens:
            self._acceptance.observe(times.num_draft_tokens, times.num_accepted, self._rounds_since_draft)
        if times.num_requested:
            self._rounds_since_draft = 0
        if self._is_first:
            # The first round of a session pays for cold caches and buffers; its times are not typical.
            self._is_first = False
            return
        is_probe = bool(times.num_requested) and self._is_probing
        if is_probe and not self._is_news(times):
            self._end_probe()
        self._pool.observe(times, is_probe=is_probe)

    def observe_run_step(self, times: RunStepTimes) -> None:
        """Learn from a step of a run."""
        self._choice = None
        self._pool.observe_run_step(times)
        if self._fixed is None:
            self._pool.count_choice(0)
        self._rounds_since_draft += 1
        self._committed_len = times.committed_len + 1

    def _is_news(self, times: RoundTimes) -> bool:
        """Return whether another round of the probe would show something new."""
        if times.num_draft_prefilled > MAX_PREFILLED:
            return True
        return times.draft_s < 0.5 * self._pool.draft_wait.predict(times.num_requested, times.committed_len)

    def _begins_or_continues_probe(self, limit: int) -> bool:
        """Return whether this round requests a draft token to learn rather than to gain.

        The session's own count of rounds starts a probe of its own acceptance, which any draft token shows. The pool's
        count of tokens starts a probe of the draft's times; the first session that reaches it probes for all.
        """
        if not self._probes_left:
            self._end_probe()
            tokens = self._tokens_per_probe()
            if self._pool.tokens_since_draft >= tokens and limit >= LEAST_LIMIT_TO_PROBE:
                self._pool.tokens_since_draft = 0
                self._is_probing = True
                self._probes_left = ROUNDS_PER_PROBE
            elif self._rounds_since_draft >= tokens:
                self._probes_left = 1
        if not self._probes_left:
            return False
        self._probes_left -= 1
        return True

    def _end_probe(self) -> None:
        self._probes_left = 0
        self._is_probing = False

    def _tokens_per_probe(self) -> float:
        """Return the number of tokens between probes: a probe is mostly two rounds, a target-only round one token.

        It grows with the streams of a step, which learn from each other's probes.
        """
        pool, context = self._pool, self._committed_len
        num_tokens = 1 + pool.other_step_tokens.value
        round_s = pool.link_s.value + pool.verify_time.predict(num_tokens, context)
        tokens = 2 * pool.draft_wait.predict(1, context) / max(PROBE_SHARE * round_s, 1e-9)
        return min(max(tokens, LEAST_TOKENS_PER_PROBE), MOST_TOKENS_PER_PROBE) * min(num_tokens, MOST_PROBING_STREAMS)

    def _best(self, limit: int) -> BestGamma:
        return best_gamma(self._pool, self._acceptance, self._acceptance.overall(self._pool.alpha), self._committed_len,
                          limit, self._pool.draft_wait.predict)  # fmt: skip
