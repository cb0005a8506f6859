"""How many draft tokens the next round asks for: the number that makes the most tokens a second of the whole batch.

The number goes to `draft_calls` by way of `runner`, which tells afterwards what the round showed.

A round's own rate is its expected tokens over its predicted time. The rows it adds to the target's steps also delay
others, so they are charged at what those lose: with nobody there they cost their own time only, on a full target no
draft token may be worth its row. Decided from the past by arithmetic on what it is told: the same observations give the
same choice. docs/protocol.md section 7. Not here: the clock (`draft_calls`, `target_calls`), the counting of other
sessions' rounds (the target, `specdec.engine.sessions.concurrent_rounds`), how times are fitted
(`specdec.core.forward_time`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from coordinator.round.acceptance import Acceptance
from specdec.core.forward_time import KEEP, ForwardTime, RunningMean

#: Asked for until both links have been measured.
FIRST_GAMMA = 4

#: While target-only is best, one draft token is asked for now and then, to notice when it no longer is: as often as
#: costs this share of the time, within these limits of tokens between two probes.
PROBE_SHARE = 0.03
LEAST_TOKENS_PER_PROBE = 50
MOST_TOKENS_PER_PROBE = 100

#: Rounds in a row that a probe asks in, at most. A draft that has not seen the last tokens must run them first, so that
#: only the second round shows what drafting takes; more follow while they show less than half of what is remembered.
ROUNDS_PER_PROBE = 6

#: Draft tokens that a request still has room for when it begins a probe for all: its first round says nothing of times,
#: and a round of a probe makes up to two tokens.
LEAST_LIMIT_TO_PROBE = 3

#: A step is never believed to have been larger: what a target says of itself is arithmetic here, and never checked.
MOST_STEP_TOKENS = 1 << 16

#: Nor to have answered more rounds of others between two of one session.
MOST_OTHERS = 1 << 12

#: Rounds that ran more committed tokens than this on a replica say little about decoding there.
MAX_PREFILLED = 32

#: Share of a session's record of acceptance that is left one round later, and of a pool's.
SESSION_KEEP = 0.95
POOL_KEEP = 0.99


class RoundTimes(NamedTuple):
    """What a finished round tells."""

    num_draft_tokens: int
    num_accepted: int
    draft_s: float
    """Wait for the draft, 0 when it was not asked: short where the answer had been drafted before it was asked for."""
    verify_s: float
    verify_forward_s: float
    """Of `verify_s`, what the target says its step took."""
    num_prefilled: int
    """Committed tokens the target had to run in this round."""
    num_draft_prefilled: int
    """Committed tokens the draft had to run in this round."""
    committed_len: int
    """When the round started."""
    num_requested: int
    """Draft tokens asked for; the draft may have given fewer, or none."""
    step_tokens: int
    """What the target says were the tokens of its step, other sessions' included."""
    num_concurrent: int = 0
    """Rounds of other sessions, any coordinator's, that the replica says it answered since it last answered this
    one."""
    num_other_rows: int = 0
    """Positions in those."""

    @property
    def num_rows(self) -> int:
        """Positions asked for in this round."""
        return self.num_draft_tokens + 1


class DraftPoolStats:
    """What all sessions of one draft pool have shown: acceptance, forward times, and how fast rounds are."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self.tokens_since_draft = 0
        """Emitted since any session last asked the draft, or began a probe: a request may be too short to count so
        far by itself."""
        self.draft_wait = ForwardTime(is_fixed=False)
        self.verify_time = ForwardTime(is_fixed=True)
        self.link_s = RunningMean()
        """Wait for the target beyond its step: both ways, and for the step before."""
        self.round_s = RunningMean()
        self.round_tokens = RunningMean()
        self.other_step_tokens = RunningMean()
        """Tokens of a step that are not the round's own."""
        self.num_delayed = RunningMean()
        """Rounds of others that one row more in a round makes later."""
        self._num_requested = RunningMean()
        self._has_chosen = False
        self._acceptance = Acceptance(POOL_KEEP)
        self._last_draft_round = 0

    @property
    def alpha(self) -> float:
        """Accepted share of tested draft tokens; a middling guess before the first."""
        return self._acceptance.overall(0.7)

    @property
    def measured_alpha(self) -> float | None:
        """As `alpha`, without a guess: for people."""
        return self._acceptance.measured

    @property
    def mean_gamma(self) -> float | None:
        """Draft tokens asked for a round lately, by requests whose gamma is chosen; None before the first round."""
        return self._num_requested.value if self._has_chosen else None

    def count_choice(self, num_requested: int) -> None:
        """A round of a request whose gamma is chosen has asked for so many draft tokens."""
        self._has_chosen = True
        self._num_requested.observe(num_requested)

    def count(self, times: RoundTimes) -> None:
        """Counts a round's tokens, also of a round that is too cold to learn from."""
        self.tokens_since_draft = 0 if times.num_requested else self.tokens_since_draft + times.num_accepted + 1

    def observe(self, times: RoundTimes, *, is_probe: bool = False) -> None:
        """`is_probe`: what is remembered of the draft's times is from before a spell without it."""
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
        # Believed as far as the wait bears it out, and not a number is none: the pool would never forget it.
        forward_s = min(max(0.0, times.verify_forward_s), times.verify_s)
        step_tokens = min(max(times.num_rows, times.step_tokens), MOST_STEP_TOKENS)
        if times.num_concurrent > MOST_OTHERS or times.num_other_rows > MOST_STEP_TOKENS:
            rows = min(times.num_other_rows, MOST_STEP_TOKENS)
            times = times._replace(num_concurrent=min(times.num_concurrent, MOST_OTHERS), num_other_rows=rows)
        round_s = times.draft_s + times.verify_s
        self.verify_time.observe(step_tokens, times.committed_len, forward_s)
        # What forgot within one round of everybody would send them all after the last few, to correct it all at once.
        keep = KEEP ** (1 / (1 + times.num_concurrent))
        self.link_s.observe(times.verify_s - forward_s, keep)
        self.round_s.observe(round_s, keep)
        self.round_tokens.observe(times.num_accepted + 1, keep)
        self.other_step_tokens.observe(step_tokens - times.num_rows, keep)
        self.num_delayed.observe(_num_delayed(times, step_tokens, forward_s / max(round_s, 1e-9)), keep)

    @property
    def row_price(self) -> float:
        """Tokens a second that others lose by one more row: it delays some of their rounds by its own time."""
        others_rate = self.num_delayed.value * self.round_tokens.value
        return others_rate * self.verify_time.per_token_s / max(self.round_s.value, 1e-9) ** 2


def _num_delayed(times: RoundTimes, step_tokens: int, step_share: float) -> float:
    """Rounds of others that one row more in this one makes later.

    Those of the same step for certain. The others ran in steps of their own before and after it: where the target is
    never idle they wait for one another, and what lengthens one step makes every later one begin later.

    Args:
        times: of the round.
        step_tokens: of its step.
        step_share: the step's share of the round's time.
    """
    num_steps = max(1.0, (times.num_rows + times.num_other_rows) / step_tokens)
    in_same_step = max(0.0, (times.num_concurrent + 1) / num_steps - 1)
    busy_share = min(1.0, num_steps * step_share)
    return in_same_step + busy_share * (times.num_concurrent - in_same_step)


class BestGamma(NamedTuple):
    gamma: int
    rate: float
    """Tokens a second of its rounds, less what they cost others."""


def best_gamma(
    pool: DraftPoolStats,
    acceptance: Acceptance,
    alpha: float,
    context: float,
    limit: int,
    draft_s: Callable[[float, float], float],
) -> BestGamma:
    """The gamma of the best rate after what its rows cost the others; the smallest of equals.

    Args:
        pool: whose record says what the target takes, and others lose.
        acceptance: by position.
        alpha: of positions that it says little of.
        context: committed tokens.
        limit: most draft tokens.
        draft_s: seconds that so many draft tokens take after so many committed ones.
    """
    other_tokens, row_price = pool.other_step_tokens.value, pool.row_price
    best = BestGamma(0, float("-inf"))
    expected_tokens, reach = 1.0, 1.0
    for gamma in range(limit + 1):
        if gamma:
            reach *= acceptance.at(gamma - 1, alpha)
            expected_tokens += reach
        round_s = pool.link_s.value + pool.verify_time.predict(gamma + 1 + other_tokens, context)
        if gamma:
            round_s += draft_s(gamma, context)
        rate = expected_tokens / max(round_s, 1e-9) - row_price * gamma
        if rate > best.rate:
            best = BestGamma(gamma, rate)
    return best


class GammaChooser:
    """Chooses gamma for the rounds of one request."""

    def __init__(self, pool: DraftPoolStats, *, fixed: int | None, max_gamma: int) -> None:
        """`fixed`: the request's own gamma; None: chosen each round, at most `max_gamma`."""
        self._pool = pool
        self._fixed = fixed
        self._max_gamma = max_gamma
        self._acceptance = Acceptance(SESSION_KEEP)
        self._rounds_since_draft = 0
        self._probes_left = 0
        self._is_probing = False
        """Whether the rounds that ask are a probe for the whole pool."""
        self._committed_len = 0
        self._is_first = True

    def choose(self, limit: int) -> int:
        """Draft tokens to ask for in the next round, 0..limit."""
        if self._fixed is not None:
            return min(self._fixed, limit)
        limit = min(self._max_gamma, limit)
        if limit <= 0:
            return 0
        if not (self._pool.draft_wait.is_measured and self._pool.verify_time.is_measured):
            return min(FIRST_GAMMA, limit)
        best = self._best(limit).gamma
        return best or int(self._begins_or_continues_probe(limit))

    def most(self, limit: int) -> int:
        """Draft tokens that a round may have at most, whether they pay or not."""
        return min(self._max_gamma if self._fixed is None else self._fixed, limit)

    def best_rate(self, limit: int) -> float | None:
        """Tokens a second of rounds of up to `limit` draft tokens, less what they cost others; None: not known yet."""
        if not (self._pool.draft_wait.is_measured and self._pool.verify_time.is_measured):
            return None
        return self._best(self.most(limit)).rate

    def observe(self, times: RoundTimes) -> None:
        """Learns from a finished round."""
        if self._fixed is None or times.num_requested:  # requests that never draft need nobody to probe for them
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
            # Whatever is cold is paid for in a session's first round, and never again.
            self._is_first = False
            return
        is_probe = bool(times.num_requested) and self._is_probing
        if is_probe and not self._is_news(times):
            self._end_probe()
        self._pool.observe(times, is_probe=is_probe)

    def _is_news(self, times: RoundTimes) -> bool:
        """Whether a probe's round leaves something to find out."""
        if times.num_draft_prefilled > MAX_PREFILLED:
            return True
        return times.draft_s < 0.5 * self._pool.draft_wait.predict(times.num_requested, times.committed_len)

    def _begins_or_continues_probe(self, limit: int) -> bool:
        """Whether this round asks the draft to learn, not to gain.

        The session's own count of tokens is for its own acceptance, which any draft shows; the pool's for the draft's
        times, and whoever notices first asks for all.
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
        """A probe is two rounds mostly; a target-only round is one token."""
        pool, context = self._pool, self._committed_len
        round_s = pool.link_s.value + pool.verify_time.predict(1 + pool.other_step_tokens.value, context)
        tokens = 2 * pool.draft_wait.predict(1, context) / max(PROBE_SHARE * round_s, 1e-9)
        return min(max(tokens, LEAST_TOKENS_PER_PROBE), MOST_TOKENS_PER_PROBE)

    def _best(self, limit: int) -> BestGamma:
        return best_gamma(self._pool, self._acceptance, self._acceptance.overall(self._pool.alpha), self._committed_len,
                          limit, self._pool.draft_wait.predict)  # fmt: skip
