"""Choose the fan-out of pre-drafting branches from measured times.

Three times are measured: a step of branches at each fan-out (t_d' of docs/protocol.md section 6), the wait between an
answer and the session's next call (t_v), and a whole round from answer to answer, with branches and without. The chosen
fan-out is the widest whose branches finish within the wait. Depth is not chosen, because branches grow until the call
arrives. If not even the narrowest branches finish, calls wait for steps of branches more often than branches save
steps. Whether rounds are shorter with branches is measured and not computed: if draft and target share processors,
branches cost the target time that no other figure shows.

Called by `predraft` from the device thread; reads no clock.
"""

from __future__ import annotations

from enum import Enum

#: Limit on the tokens that are assumed after each accepted length.
MAX_FAN_OUT = 4

#: Share of the newest observation in every running mean.
_NEWEST_SHARE = 0.1

#: Period, in rounds, in which a few rounds run the slower way, to detect when it becomes the faster one.
_PROBE_EVERY = 64
_PROBE_ROUNDS = 2

#: Number of rounds with branches, and without, before the two are compared.
_MIN_ROUNDS = 4


class Predraft(Enum):
    """Mode of pre-drafting; the values of the `--predraft` flag."""

    OFF = "off"
    ON = "on"
    """Draft whenever no call is waiting."""
    AUTO = "auto"
    """Draft like `ON` while it makes rounds shorter."""


class _Mean:
    """Exponential running mean."""

    def __init__(self) -> None:
        self.num = 0
        self.value = 0.0

    def observe(self, value: float) -> None:
        self.num += 1
        self.value += (value - self.value) * max(_NEWEST_SHARE, 1.0 / self.num)


class FanOutPolicy:
    """Choice of each round's fan-out from the times of earlier rounds."""

    def __init__(self, policy: Predraft) -> None:
        self._policy = policy
        self._num_rounds = 0
        self._wait_s = _Mean()
        self._step_s = [_Mean() for _ in range(MAX_FAN_OUT + 1)]  # by fan-out
        self._round_s = {True: _Mean(), False: _Mean()}  # with branches, without

    def observe_step(self, fan_out: int, seconds: float) -> None:
        """Record the time of a step of one round's branches; `fan_out` is at least 1."""
        self._step_s[fan_out].observe(seconds)

    def observe_wait(self, seconds: float) -> None:
        """Record the time from an answer to the session's next call."""
        self._wait_s.observe(seconds)

    def observe_round(self, fan_out: int, seconds: float) -> None:
        """Record the time from an answer to the session's next answer; `fan_out` 0 means without branches."""
        self._round_s[fan_out > 0].observe(seconds)

    def choose(self, gamma: int) -> int:
        """Return the fan-out after a round of `gamma` tokens, 0..MAX_FAN_OUT; 0 means no branches."""
        self._num_rounds += 1
        widest = self._widest(gamma)
        if self._policy is Predraft.OFF or (self._policy is Predraft.AUTO and not self._tries_branches(widest > 0)):
            return 0
        return max(1, widest)

    def _tries_branches(self, is_in_time: bool) -> bool:
        """Return whether to branch; `is_in_time` says that the narrowest branches should finish within the wait."""
        is_probe = self._num_rounds % _PROBE_EVERY < _PROBE_ROUNDS
        if not is_in_time:
            return is_probe
        with_branches, without = self._round_s[True], self._round_s[False]
        if min(with_branches.num, without.num) < _MIN_ROUNDS:
            return with_branches.num <= without.num or without.num >= _MIN_ROUNDS
        return (with_branches.value <= without.value) != is_probe

    def _widest(self, gamma: int) -> int:
        """Return the widest fan-out that should finish in time, else 0; an untried one counts like a narrower one."""
        num_steps = gamma + 1  # the last draft token must run before its successor is known
        step_s = 0.0
        for fan_out in range(1, MAX_FAN_OUT + 1):
            step_s = self._step_s[fan_out].value if self._step_s[fan_out].num else step_s
            if num_steps * step_s > self._wait_s.value:
                return fan_out - 1
        return MAX_FAN_OUT
