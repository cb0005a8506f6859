"""How long a round waits for its draft: a multiple of what the pool's answers have taken, reading the prompt included.

Arithmetic on what it is told, no clock of its own. Not here: how many tokens to ask for (`gamma`), what becomes of a
replica that misses its deadline (`replica_health`). One for each draft pool; called by
`draft_calls`.
"""

from __future__ import annotations

import math

from coordinator.round.gamma import MAX_PREFILLED
from specdec.core.forward_time import KEEP, ForwardTime

#: A deadline is this multiple of the predicted time, of drafting and of reading the prompt, which lasts longer and
#: varies less. It is never below the floor: a process that shares its cores pauses for tens of milliseconds at times.
DEADLINE_MULTIPLE = 6.0
PREFILL_MULTIPLE = 3.0
LEAST_DEADLINE_S = 0.1

#: Believed of a pool before its first answer. A guess that is too short costs a target-only round.
FIRST_WAIT_S = 0.05
FIRST_PREFILL_S = 0.001

#: The guess of a prefilled token's time counts as this many observed tokens.
PRIOR_PREFILL_TOKENS = 64.0


class DraftDeadline:
    """Times of one pool's answers. Only answers that came in time count, so a hung replica adds nothing to it."""

    def __init__(self) -> None:
        self._square = ForwardTime(is_fixed=False)
        """Of waits. Squares, because the wait after a branch miss must not be lost among the many short ones after
        hits; and while every round asked for the same, four times as many tokens are expected to take twice as long,
        between a trip and a step for each."""
        self._is_cold = True
        self._prefill_s = FIRST_PREFILL_S * PRIOR_PREFILL_TOKENS
        self._prefill_tokens = PRIOR_PREFILL_TOKENS

    def observe(self, num_tokens: int, num_prefilled: int, wait_s: float) -> None:
        """Learns from an answer.

        Args:
            num_tokens: draft tokens asked for, at least 1.
            num_prefilled: committed tokens that the replica had to run.
            wait_s: from asking to the answer.
        """
        if self._is_cold:  # the pool's first answer pays for whatever is, and there may be few to outweigh it
            self._is_cold = False
            return
        if num_prefilled <= MAX_PREFILLED:
            self._square.observe(num_tokens, 0.0, wait_s**2)
            return
        # The guess fades with the past: totals, so that a long prompt says more than a short one.
        self._prefill_s = self._prefill_s * KEEP + max(0.0, wait_s - self._decode_s(num_tokens))
        self._prefill_tokens = self._prefill_tokens * KEEP + num_prefilled

    def deadline_s(self, num_tokens: int, num_prefilled: int) -> float:
        """Seconds that an answer may take.

        Args:
            num_tokens: draft tokens asked for.
            num_prefilled: committed tokens that the replica has to run first, as far as is known.
        """
        deadline_s = DEADLINE_MULTIPLE * self._decode_s(num_tokens)
        if num_prefilled > MAX_PREFILLED:
            deadline_s += PREFILL_MULTIPLE * num_prefilled * self._prefill_s / self._prefill_tokens
        return max(LEAST_DEADLINE_S, deadline_s)

    def _decode_s(self, num_tokens: int) -> float:
        return math.sqrt(max(0.0, self._square.predict(num_tokens, 0.0))) if self._square.is_measured else FIRST_WAIT_S
