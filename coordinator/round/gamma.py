"""The choice of gamma, the number of draft tokens per round: the one with the highest throughput of the whole batch.

A draft source chooses gamma here and passes it to `draft_calls`; the `runner` reports each finished round back.

A round's own rate is its expected tokens divided by its predicted time. Its rows also make the target's steps longer,
which delays the rounds of other sessions. So each row is charged the tokens that others lose by it: on an idle target
that is nothing, on a full one no draft token may be worth its row. The choice is arithmetic on past observations
without a clock of its own, so that the same observations give the same choice (docs/protocol.md section 7). The target
counts the rounds of other sessions (`specdec.engine.sessions.concurrent_rounds`); `specdec.core.forward_time` fits the
times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from coordinator.round.acceptance import Acceptance
from specdec.core.forward_time import KEEP, ForwardTime, RunningMean

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

#: Upper bound on the size of a step that a target reports; reports are not checked otherwise.
MOST_STEP_TOKENS = 1 << 16

#: Upper bound on the rounds of other sessions that a target reports between two rounds of one session.
MOST_OTHERS = 1 << 12

#: Rounds that ran more committed tokens than this on a replica say little about decoding there.
MAX_PREFILLED = 32

#: Weight of a session's acceptance counts that is left one round later, and of a pool's.
SESSION_KEEP = 0.95
POOL_KEEP = 0.99


class RoundTimes(NamedTuple):
    """The counts and times of a finished round."""

    num_draft_tokens: int
    num_accepted: int
    draft_s: float
    """Wait for the draft; 0 when none was requested. Short if the draft was made ahead of the request."""
    verify_s: float
    verify_forward_s: float
    """Part of `verify_s` that the target reports for its step."""
    num_prefilled: int
    """Number of committed tokens that the target ran in this round."""
    num_draft_prefilled: int
    """Number of committed tokens that the draft ran in this round."""
    committed_len: int
    """Number of committed tokens when the round started."""
    num_requested: int
    """Number of draft tokens requested; the draft may have returned fewer, or none."""
    step_tokens: int
    """Number of tokens in the target's step as it reports them, other sessions' included."""
    num_concurrent: int = 0
    """Number of rounds of other sessions, of any coordinator, that the replica reports since this session's last."""
    num_other_rows: int = 0
    """Number of positions in those rounds."""

    @property
    def num_rows(self) -> int:
        """Number of positions that the target verifies in this round."""
        return self.num_draft_tokens + 1


class RunStepTimes(NamedTuple):
    """The times of a step of a run."""

    step_s: float
    """Time since the run's previous step."""
    forward_s: float
    """Part of it that the target reports for its step."""
    step_tokens: int
    """Number of tokens in the target's step as it reports them, other sessions' included."""
    committed_len: int
    """Number of tokens of the session before the step."""


class DraftPoolStats:
    """The statistics of one draft pool over all sessions: acceptance, forward times, and rates of rounds."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self.tokens_since_draft = 0
        """Number of tokens emitted since any session last requested a draft or began a probe. It is counted for the
        pool because a single request may be too short to reach the limit."""
        self.draft_wait = ForwardTime(is_fixed=False)
        self.verify_time = ForwardTime(is_fixed=True)
        self.link_s = RunningMean()
        """Wait for the target beyond its step: the wire in both directions, and the previous step."""
        self.round_s = RunningMean()
        self.run_link_s = RunningMean()
        """Time between two steps of a run beyond the later one's forward pass."""
        self._stream_tokens = RunningMean()
        self._stream_s = RunningMean()
        """Tokens and time of a round, or of a step of a run."""
        self.other_step_tokens = RunningMean()
        """Number of tokens of a step that belong to other sessions."""
        self.num_delayed = RunningMean()
        """Number of other sessions' rounds that one more row in a round delays."""
        self._num_requested = RunningMean()
        self._has_chosen = False
        self._acceptance = Acceptance(POOL_KEEP)
        self._last_draft_round = 0

    @property
    def alpha(self) -> float:
        """Accepted share of tested draft tokens, shrunk towards a prior of 0.7."""
        return self._acceptance.overall(0.7)

    @property
    def measured_alpha(self) -> float | None:
        """Accepted share of tested draft tokens without a prior, for display; None before the first."""
        return self._acceptance.measured

    @property
    def mean_gamma(self) -> float | None:
        """Recent mean of draft tokens per round, of requests whose gamma is chosen; None before the first round."""
        return self._num_requested.value if self._has_chosen else None

    def count_choice(self, num_requested: int) -> None:
        """Count the draft tokens of a round whose gamma was chosen rather than fixed by the request."""
        self._has_chosen = True
        self._num_requested.observe(num_requested)

    def count(self, times: RoundTimes) -> None:
        """Count a round's tokens, also those of a first round, from which no times are learned."""
        self.tokens_since_draft = 0 if times.num_requested else self.tokens_since_draft + times.num_accepted + 1

    def observe(self, times: RoundTimes, *, is_probe: bool = False) -> None:
        """Learn from a round; `is_probe`: the remembered times of the draft are old, and fade faster."""
        self.num_rounds += 1
        elapsed = self.num_rounds - self._last_draft_round
        if times.num_draft_tokens:
            self._acceptance.observe(times.num_draft_tokens, times.num_accepted, elapsed)
        if times.num_requested and times.num_draft_prefilled <= MAX_PREFILLED:
            fading_rounds = MOST_TOKENS_PER_PROBE if is_probe else elapsed
            self.draft_wait.observe(times.num_requested, times.committed_len, times.draft_s, fading_rounds)
        if times.num_requested:
            self._last_draft_round = self.num_rounds
        if times.num_prefilled > MAX_PREFILLED:
            return
        # The target's report is bounded by the measured wait, and NaN becomes 0: the pool would never forget a NaN.
        forward_s = min(max(0.0, times.verify_forward_s), times.verify_s)
        step_tokens = min(max(times.num_rows, times.step_tokens), MOST_STEP_TOKENS)
        if times.num_concurrent > MOST_OTHERS or times.num_other_rows > MOST_STEP_TOKENS:
            rows = min(times.num_other_rows, MOST_STEP_TOKENS)
            times = times._replace(num_concurrent=min(times.num_concurrent, MOST_OTHERS), num_other_rows=rows)
        round_s = times.draft_s + times.verify_s
        self.verify_time.observe(step_tokens, times.committed_len, forward_s)
        # The statistics are shared. If they faded within one round of all sessions, all of them would follow the last
        # few observations, and all would correct at the same time.
        keep = KEEP ** (1 / (1 + times.num_concurrent))
        self.link_s.observe(times.verify_s - forward_s, keep)
        self.round_s.observe(round_s, keep)
        self._stream_tokens.observe(times.num_accepted + 1, keep)
        self._stream_s.observe(round_s, keep)
        self.other_step_tokens.observe(step_tokens - times.num_rows, keep)
        self.num_delayed.observe(_num_delayed(times, step_tokens, forward_s / max(round_s, 1e-9)), keep)

    def observe_run_step(self, times: RunStepTimes) -> None:
        """Learn from a step of a run."""
        step_s = max(0.0, times.step_s)
        forward_s = min(max(0.0, times.forward_s), step_s)
        step_tokens = min(max(1, times.step_tokens), MOST_STEP_TOKENS)
        keep = KEEP ** (1 / step_tokens)
        self.verify_time.observe(step_tokens, times.committed_len, forward_s)
        self.run_link_s.observe(step_s - forward_s, keep)
        self.other_step_tokens.observe(step_tokens - 1, keep)
        self._stream_tokens.observe(1.0, keep)
        self._stream_s.observe(step_s, keep)
        self.tokens_since_draft += 1

    @property
    def row_price(self) -> float:
        """Tokens per second that other sessions lose by one more row, which delays some of their rounds."""
        others_rate = self.num_delayed.value * self._stream_tokens.value / max(self._stream_s.value, 1e-9)
        return others_rate * self.verify_time.per_token_s / max(self.round_s.value, 1e-9)


def _num_delayed(times: RoundTimes, step_tokens: int, step_share: float) -> float:
    """Return the number of other sessions' rounds that one more row in this round delays.

    It delays all rounds of the same step. The other rounds ran in earlier or later steps. Where the target is never
    idle, steps wait for one another, so that a longer step delays every later one.

    Args:
        times: counts and times of the round.
        step_tokens: number of tokens of its step.
        step_share: share of the round's time that the step took.
    """
    num_steps = max(1.0, (times.num_rows + times.num_other_rows) / step_tokens)
    in_same_step = max(0.0, (times.num_concurrent + 1) / num_steps - 1)
    busy_share = min(1.0, num_steps * step_share)
    return in_same_step + busy_share * (times.num_concurrent - in_same_step)


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
