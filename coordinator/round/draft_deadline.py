"""The deadline of a draft call: a multiple of the time that the pool's answers have taken, prefill included.

It is arithmetic on observed times, without a clock of its own. `draft_calls` uses one `DraftDeadline` for each draft
pool; a replica that misses its deadline is handled by `ReplicaHealth`.
"""

from __future__ import annotations

import math

from coordinator.round.pool_stats import MAX_PREFILLED
from specdec.core.forward_time import KEEP, ForwardTime

#: A deadline is this multiple of the predicted times of drafting and of prefill. Prefill takes longer and varies less.
#: The deadline is never below the floor, because a process that shares its cores may pause for tens of milliseconds.
DEADLINE_MULTIPLE = 6.0
PREFILL_MULTIPLE = 3.0
LEAST_DEADLINE_S = 0.1

#: Assumed times of a pool before its first answer. A time that is too short costs a target-only round.
FIRST_WAIT_S = 0.05
FIRST_PREFILL_S = 0.001

#: Weight of the assumed time of a prefilled token, in observed tokens.
PRIOR_PREFILL_TOKENS = 64.0


class DraftDeadline:
    """The times of one pool's answers. Only answers in time count, so a hung replica changes nothing."""

    def __init__(self) -> None:
        self._square = ForwardTime(is_fixed=False)
        """Squared waits. Squares keep the rare long wait after a branch miss visible among many short ones after hits.
        While every round has requested the same number of tokens, four times as many are expected to take twice as
        long, which lies between one trip for all and one step for each."""
        self._is_cold = True
        self._prefill_s = FIRST_PREFILL_S * PRIOR_PREFILL_TOKENS
        self._prefill_tokens = PRIOR_PREFILL_TOKENS

    def observe(self, num_tokens: int, num_prefilled: int, wait_s: float) -> None:
        """Learn from an answer.

        Args:
            num_tokens: number of draft tokens requested, at least 1.
            num_prefilled: number of committed tokens that the replica had to run.
            wait_s: seconds from the call to the answer.
        """
        if self._is_cold:  # the first answer pays for cold caches, and there may be few others to outweigh it
            self._is_cold = False
            return
        if num_prefilled <= MAX_PREFILLED:
            self._square.observe(num_tokens, 0.0, wait_s**2)
            return
        # Totals instead of means, so that a long prompt counts more than a short one; the assumed time fades too.
        self._prefill_s = self._prefill_s * KEEP + max(0.0, wait_s - self._decode_s(num_tokens))
        self._prefill_tokens = self._prefill_tokens * KEEP + num_prefilled

    def deadline_s(self, num_tokens: int, num_prefilled: int) -> float:
        """Return the seconds that an answer may take.

        Args:
            num_tokens: number of draft tokens requested.
            num_prefilled: number of committed tokens that the replica has to run first, as far as is known.
        """
        deadline_s = DEADLINE_MULTIPLE * self._decode_s(num_tokens)
        if num_prefilled > MAX_PREFILLED:
            deadline_s += PREFILL_MULTIPLE * num_prefilled * self._prefill_s / self._prefill_tokens
        return max(LEAST_DEADLINE_S, deadline_s)

    def _decode_s(self, num_tokens: int) -> float:
        return math.sqrt(max(0.0, self._square.predict(num_tokens, 0.0))) if self._square.is_measured else FIRST_WAIT_S
