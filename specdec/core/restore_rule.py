"""The choice between fetching KV and computing it again: fetch if n·b/W + L < n/F, with W, L and F as measured.

n tokens of b bytes each arrive at W bytes a second, L seconds after the request; a forward pass computes F tokens a
second. The module computes on observations alone, without clock and I/O. The right side comes from the caller, which
knows the cost of a prefill (`specdec.engine.schedule.step_times`). Called by `specdec.state.kv_tier`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

#: Number of observations in a median. A store that becomes slower is noticed at the third fetch; a single delay by
#: other work on this machine is ignored.
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
        """L; 0 before it is measured."""
        return self._latency_s.value

    @property
    def bytes_per_s(self) -> float:
        """W, from the store into KV blocks; 0 before it is measured."""
        return 1 / self._byte_s if self._transfer_s.value else 0.0

    def observe_latency(self, seconds: float) -> None:
        """Record how long an answer without a payload took."""
        self._latency_s.observe(seconds)

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """Record that a payload was fetched and checked."""
        self._transfer_s.observe(seconds / num_bytes)

    def observe_copy(self, num_bytes: int, seconds: float) -> None:
        """Record that a payload was copied into KV blocks."""
        self._copy_s.observe(seconds / num_bytes)

    def restore_s(self, num_bytes: int) -> float:
        """Return n·b/W + L, in seconds; infinite before the first measurement."""
        if not self._transfer_s.value:
            return float("inf")
        return num_bytes * self._byte_s + self.latency_s

    def num_worth(self, replay_s: Sequence[float], payload_bytes: int, queued_bytes: int = 0) -> int:
        """Return the number of payloads to fetch that saves the most time; 0 if no fetch saves any.

        Args:
            replay_s: seconds to compute the contents of the first 1, 2, ... payloads again.
            payload_bytes: size of each payload.
            queued_bytes: bytes that other requests wait for.
        """
        saved_s = [
            seconds - self.restore_s(queued_bytes + count * payload_bytes) for count, seconds in enumerate(replay_s, 1)
        ]
        best_s = max(saved_s, default=0.0)
        return saved_s.index(best_s) + 1 if best_s > 0 else 0

    @property
    def _byte_s(self) -> float:
        return self._transfer_s.value + self._copy_s.value
