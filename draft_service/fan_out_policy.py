"""How wide the branches of a round are, and whether branches pay at all: arithmetic on measured times.

Three times are measured: a step of branches at each fan-out (t_d' of docs/protocol.md section 6), the wait between an
answer and the session's next call (t_v), and a whole round, answer to answer, with branches and without. Fan-out is the
widest whose branches would be done within the wait; depth needs no choice, because branches grow until the call comes.
Where not even the narrowest would be done, a call waits for a step of branches more often than a branch saves it one.
That rounds are really shorter with branches is compared, not computed: where draft and target share processors,
branches cost the target time that no other figure shows.

Not here: branches (`predraft`), a clock. Called by `predraft` from the device thread.
"""

from __future__ import annotations

from enum import Enum

#: Tokens assumed after each accepted length, at most.
MAX_FAN_OUT = 4

#: Share of the newest observation in every running mean.
_NEWEST_SHARE = 0.1

#: Of so many rounds, a few are run the way that was found worse, to notice when it no longer is.
_PROBE_EVERY = 64
_PROBE_ROUNDS = 2

#: Branches must have been tried, and left out, this often before the two are compared.
_MIN_ROUNDS = 4


class Predraft(Enum):
    """When the next round is drafted before it is asked for; values are those of the `--predraft` flag."""

    OFF = "off"
    ON = "on"
    """Whenever no call is waiting."""
    AUTO = "auto"
    """As `ON`, as long as that makes rounds shorter."""


class _Mean:
    """A running mean that forgets."""

    def __init__(self) -> None:
        self.num = 0
        self.value = 0.0

    def observe(self, value: float) -> None:
        self.num += 1
        self.value += (value - self.value) * max(_NEWEST_SHARE, 1.0 / self.num)


class FanOutPolicy:
    """Chooses each round's fan-out from what earlier rounds took."""

    def __init__(self, policy: Predraft) -> None:
        self._policy = policy
        self._num_rounds = 0
        self._wait_s = _Mean()
        self._step_s = [_Mean() for _ in range(MAX_FAN_OUT + 1)]  # by fan-out
        self._round_s = {True: _Mean(), False: _Mean()}  # with branches, without

    def observe_step(self, fan_out: int, seconds: float) -> None:
        """A step of one round's branches was run; `fan_out` is 1 or more."""
        self._step_s[fan_out].observe(seconds)

    def observe_wait(self, seconds: float) -> None:
        """A session's next call came this long after the answer before it."""
        self._wait_s.observe(seconds)

    def observe_round(self, fan_out: int, seconds: float) -> None:
        """That call was answered this long after the answer before it; `fan_out` 0: nothing was branched meanwhile."""
        self._round_s[fan_out > 0].observe(seconds)

    def choose(self, gamma: int) -> int:
        """Fan-out for the round after one of `gamma` tokens, 0..MAX_FAN_OUT; 0: no branches."""
        self._num_rounds += 1
        widest = self._widest(gamma)
        if self._policy is Predraft.OFF or (self._policy is Predraft.AUTO and not self._tries_branches(widest > 0)):
            return 0
        return max(1, widest)

    def _tries_branches(self, is_in_time: bool) -> bool:
        """`is_in_time`: whether the narrowest branches should be done within the wait."""
        is_probe = self._num_rounds % _PROBE_EVERY < _PROBE_ROUNDS
        if not is_in_time:
            return is_probe
        with_branches, without = self._round_s[True], self._round_s[False]
        if min(with_branches.num, without.num) < _MIN_ROUNDS:
            return with_branches.num <= without.num or without.num >= _MIN_ROUNDS
        return (with_branches.value <= without.value) != is_probe

    def _widest(self, gamma: int) -> int:
        """The widest fan-out that should be done in time, 0 where none is; an untried one counts like a narrower."""
        num_steps = gamma + 1  # the last draft token must run before the first token after it is known
        step_s = 0.0
        for fan_out in range(1, MAX_FAN_OUT + 1):
            step_s = self._step_s[fan_out].value if self._step_s[fan_out].num else step_s
            if num_steps * step_s > self._wait_s.value:
                return fan_out - 1
        return MAX_FAN_OUT
