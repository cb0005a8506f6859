"""When KV is worth fetching instead of computing again: n·b/W + L < n/F, with W, L and F as measured.

n tokens of b bytes each come at W bytes a second, L seconds after they were asked for; a forward pass makes F tokens a
second. Arithmetic on what it is told, no clock and no I/O; the right side comes from the caller, who knows what a
prefill costs there (`specdec.engine.schedule.step_times`). Called by `specdec.state.kv_tier`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

#: What counts of the past: a store that others begin to use is noticed at the third fetch, a moment in which this
#: machine was busy otherwise is not believed.
NUM_REMEMBERED = 5


class _Recent:
    """The median of the newest observations; 0 before the first. Observed by one thread, read by any."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self.value = 0.0

    def observe(self, value: float) -> None:
        self._newest.append(value)
        self.value = median(self._newest)


class RestoreRule:
    """The measured left side of the rule, and the choice. Each kind of observation comes from one thread."""

    def __init__(self) -> None:
        self._latency_s = _Recent()
        self._transfer_s = _Recent()  # per byte
        self._copy_s = _Recent()  # per byte

    @property
    def latency_s(self) -> float:
        """L; 0 before it was measured."""
        return self._latency_s.value

    @property
    def bytes_per_s(self) -> float:
        """W, from the store into KV blocks; 0 before it was measured."""
        return 1 / self._byte_s if self._transfer_s.value else 0.0

    def observe_latency(self, seconds: float) -> None:
        """An answer without a payload took this long."""
        self._latency_s.observe(seconds)

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """A payload was fetched and checked."""
        self._transfer_s.observe(seconds / num_bytes)

    def observe_copy(self, num_bytes: int, seconds: float) -> None:
        """A payload was copied into KV blocks."""
        self._copy_s.observe(seconds / num_bytes)

    def restore_s(self, num_bytes: int) -> float:
        """n·b/W + L, in seconds; infinite before anything was measured."""
        if not self._transfer_s.value:
            return float("inf")
        return num_bytes * self._byte_s + self.latency_s

    def num_worth(self, replay_s: Sequence[float], payload_bytes: int, queued_bytes: int = 0) -> int:
        """How many payloads to fetch: as many as save the most time, 0 where none does.

        Args:
            replay_s: seconds that computing what the first 1, 2, ... payloads hold takes.
            payload_bytes: of each payload.
            queued_bytes: asked for by others before.
        """
        saved_s = [
            seconds - self.restore_s(queued_bytes + count * payload_bytes) for count, seconds in enumerate(replay_s, 1)
        ]
        best_s = max(saved_s, default=0.0)
        return saved_s.index(best_s) + 1 if best_s > 0 else 0

    @property
    def _byte_s(self) -> float:
        return self._transfer_s.value + self._copy_s.value
