"""Statistics of a draft pool, from which gamma is chosen: acceptance, forward times, and the price of a row.

Drafts know nothing of the target's adapters, so each adapter has separate statistics. If drafts seldom hit its text,
they choose fewer draft tokens, or none, and requests without the adapter keep theirs.

`gamma` reports rounds and steps of runs, and reads what was learned; `specdec.core.forward_time` fits the times. The
target counts the rounds of other sessions (`specdec.engine.sessions.concurrent_rounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from coordinator.round.acceptance import Acceptance
from specdec.core.forward_time import KEEP, ForwardTime, RunningMean

#: Upper bound on the size of a step that a target reports; reports are not checked otherwise.
MOST_STEP_TOKENS = 1 << 16

#: Upper bound on the rounds of other sessions that a target reports between two rounds of one session.
MOST_OTHERS = 1 << 12

#: Rounds that ran more committed tokens than this on a replica say little about decoding there.
MAX_PREFILLED = 32

#: Weight of a pool's acceptance counts that is left one round later.
POOL_KEEP = 0.99

#: Rounds over which the remembered times of a draft fade while a probe measures them anew.
PROBE_FADING_ROUNDS = 100


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
            fading_rounds = PROBE_FADING_ROUNDS if is_probe else elapsed
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


class PoolStatsTable:
    """The statistics of all draft pools, apart for each adapter of the target."""

    def __init__(self, serves: Callable[[str], bool] = lambda adapter: True) -> None:
        """`serves` tells whether a target serves an adapter; statistics of other adapters may be forgotten."""
        self._serves = serves
        self._of_adapters: dict[str, dict[str, DraftPoolStats]] = {"": {}}

    def of(self, pool: str, adapter: str = "") -> DraftPoolStats:
        """Return the statistics of a pool for an adapter by its fingerprint, "" for the base model; new ones at
        first."""
        of_pools = self._of_adapters.get(adapter)
        if of_pools is None:
            for known in [known for known in self._of_adapters if known and not self._serves(known)]:
                del self._of_adapters[known]
            of_pools = self._of_adapters[adapter] = {}
        return of_pools.setdefault(pool, DraftPoolStats())

    def get(self, pool: str, adapter: str = "") -> DraftPoolStats | None:
        """Return the statistics of a pool for an adapter; None before the first round."""
        return self.of_adapter(adapter).get(pool)

    def of_adapter(self, adapter: str) -> Mapping[str, DraftPoolStats]:
        """Return the statistics for an adapter by pool; empty before the first round."""
        return self._of_adapters.get(adapter, {})


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
