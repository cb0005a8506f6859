"""Slots of a simulated system: how many requests generate at once, who waits, and who is refused.

A coordinator raises its slots while a token takes at most 1.25 times as long as with 16 streams of a target, and
refuses a request whose predicted wait is longer than `--max-wait-s`. The simulation takes the number of slots from the
step times instead of measuring it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from coordinator.admission.speeds import BASE_STREAMS, RAISE_BELOW
from specdec.planning.deployment import Deployment, Load, steady_round

if TYPE_CHECKING:
    from bench.autoscaling.pools import Stream

_MAX_STREAMS = 512
_KEEP = 0.98


def slots_per_target(deployment: Deployment, load: Load, streams_per_draft: int) -> int:
    """Return the number of slots that a coordinator gives each target."""
    draft, gamma, num_tokens = deployment.draft, deployment.gamma, deployment.tokens_per_round
    prompt_s = deployment.target.prefill_s(load.prompt_tokens)

    def token_s(num_streams: int) -> float:
        alone = steady_round(load, deployment.target, draft, gamma, num_streams, streams_per_draft).round_s / num_tokens
        # As in a plan: the prompts of the streams take time of the same target.
        return alone * (1.0 + num_streams * prompt_s / (load.output_tokens * alone + prompt_s))

    most_s = RAISE_BELOW * token_s(BASE_STREAMS)
    return next((number - 1 for number in range(BASE_STREAMS + 1, _MAX_STREAMS) if token_s(number) > most_s), 1)


class Slots:
    """Requests that generate, and those that wait for a slot in order of arrival."""

    def __init__(self, max_wait_s: float, first_duration_s: float) -> None:
        """
        Args:
            max_wait_s: predicted wait beyond which a request is refused.
            first_duration_s: expected time of a request before one has ended.
        """
        self.waiting: deque[Stream] = deque()
        self.num_running = 0
        self._max_wait_s = max_wait_s
        self._duration_s = first_duration_s

    def refuses(self, num_slots: int) -> bool:
        """Return whether a request that arrives now would wait too long; never while fewer wait than there are slots.

        Args:
            num_slots: slots of the targets that serve.
        """
        num_waiting = len(self.waiting)
        return num_waiting >= num_slots and num_waiting * self._duration_s / num_slots > self._max_wait_s

    def take(self, num_slots: int) -> Stream | None:
        """Return the next request that may begin; None: none waits, or all slots are taken."""
        if not self.waiting or self.num_running >= num_slots:
            return None
        self.num_running += 1
        return self.waiting.popleft()

    def end(self, duration_s: float) -> None:
        """Give a slot back after a request that has generated for a time."""
        self.num_running -= 1
        self._duration_s = _KEEP * self._duration_s + (1.0 - _KEEP) * duration_s
