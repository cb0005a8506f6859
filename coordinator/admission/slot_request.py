"""Requests to the queue before generation, their refusals, and its state (`slots`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from coordinator.admission.speeds import OutputLength
from specdec.contract.errors import ResourceExhausted
from specdec.contract.tenant import SessionKey

_MIN_RETRY_S = 0.5
_MAX_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Fields of a request that decide its place in the queue."""

    key: SessionKey
    max_new_tokens: int
    min_new_tokens: int = 0
    """Number of output tokens that the request has at least, unless its client ends it."""
    priority: int = 0
    """Requests of lower values go first."""
    is_next_turn: bool = False
    """True if replicas probably hold the session's KV."""
    is_resumption: bool = False
    """True if the caller holds a part of the output. It is not refused for lack of a slot, and waits only if the
    coordinator runs `MAX_RESUMED` times its limit."""
    deadline_s: float | None = None
    """Time by which the output must be complete, by `time.monotonic`."""

    @property
    def length(self) -> OutputLength:
        return OutputLength(self.min_new_tokens, self.max_new_tokens)


class QueueState(NamedTuple):
    """State of the queue, for metrics."""

    num_waiting: int
    num_slots: int
    wait_s: float
    """Predicted wait of a request that arrives now."""


def refusal(message: str, wait_s: float) -> ResourceExhausted:
    """Return the refusal of a request, which its caller may try again after a predicted wait."""
    return ResourceExhausted(message, retry_after_s=min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S))
