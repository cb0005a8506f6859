"""Slots of a simulated system: how many requests generate at once, who waits, and who is refused.

A coordinator raises its slots while more streams of a target make more tokens per second, and refuses a request whose
predicted wait is longer than `--max-wait-s`. The simulation takes the number of slots from the step times instead of
measuring it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from specdec.cli.planning.cards import CALLS
from specdec.cli.planning.deployment import BASE_STREAMS, SLOT_GAIN, Deployment, ExpectedLoad, base_tpot_s, slot_gain
from specdec.cli.planning.steady_state import SteadyState, steady_state

if TYPE_CHECKING:
    from k8s.simulation.pools import Stream

#: Steps in the load of the plan, and their largest number, in which the number of slots is sought.
_NUM_STEPS, _MAX_STEPS = 50, 1_000
_KEEP = 0.98


def slots_per_target(deployment: Deployment, load: ExpectedLoad, alpha: float) -> int:
    """Return the number of slots that a coordinator gives each target: those that gain, as far as its KV goes."""
    requests = load.requests(deployment.gamma, alpha)
    num_targets, num_drafts = deployment.num_targets, deployment.num_drafts

    def state_at(rate_per_s: float) -> SteadyState | None:
        return steady_state(
            replace(requests, rate_per_s=rate_per_s), CALLS, deployment.target, deployment.draft, num_targets,
            num_drafts, deployment.num_coordinators(load),
        )  # fmt: skip

    base_s = base_tpot_s(state_at, load.rate_per_s, num_targets)
    num_slots = float(BASE_STREAMS * num_targets)
    for step in range(1, _MAX_STEPS):
        state = state_at(load.rate_per_s * step / _NUM_STEPS)
        if state is None:
            break
        if state.num_streams > BASE_STREAMS * num_targets and slot_gain(base_s, state, num_targets) < SLOT_GAIN:
            break
        num_slots = max(num_slots, state.num_streams)
    in_kv = deployment.target.kv_bytes / deployment.target.session_bytes(load.prompt_tokens + load.output_tokens)
    return max(1, int(min(num_slots / num_targets, in_kv)))


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
