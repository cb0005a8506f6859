"""The calls that wait for KV blocks: in which order they get some, and which of them are refused.

Calls of turns that have begun come first, the oldest turn before the others, and are never refused. Then come the first
calls of new turns: those of tenants for which fewer blocks are reserved before the others, then in the order of their
arrival. While the replica has sessions of several tenants, none of them may reserve the last part of the pool beside
what it has already. So a tenant that floods the replica does not make the others wait for the end of its turns.

The number of first calls and their wait are bounded: a call beyond the bounds is refused with KV_EXHAUSTED before its
turn has any output, and is told when to try again.

The wait is predicted from the rate at which ended turns have lately given blocks back. `calls` uses the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from specdec.contract.errors import ResourceExhausted
from specdec.engine.sessions.block_manager import blocks_for
from specdec.engine.sessions.reservations import shortage

#: Number of ended turns from which the rate is computed.
_NUM_TURNS = 32

#: Part of the pool that a tenant with reservations leaves to the other tenants.
_SHARED_PART = 8

#: Bounds of the time after which a refused call is to be repeated.
_LEAST_RETRY_S, _MOST_RETRY_S = 0.5, 30.0

JobT = TypeVar("JobT", bound=Any)


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Bounds on the first calls of turns that wait for KV blocks."""

    max_waiting: int = 64
    """Number of them; 0: each is refused that does not get its blocks at once."""
    max_wait_s: float = 5.0
    """Longest wait, predicted or past, in seconds."""


class ReleaseRate:
    """Blocks a second that ended turns give back."""

    def __init__(self) -> None:
        self._released: deque[tuple[float, int]] = deque(maxlen=_NUM_TURNS)

    def note(self, num_blocks: int, now_s: float) -> None:
        """Note that a turn gave back blocks."""
        self._released.append((now_s, num_blocks))

    def seconds_for(self, num_blocks: int, now_s: float) -> float:
        """Return the time until this number of blocks is given back; 0 while nothing is known."""
        if len(self._released) < 2:
            return 0.0
        total = sum(released for _, released in self._released)
        return num_blocks * (now_s - self._released[0][0]) / max(1, total)


@dataclass(slots=True)
class _Wait:
    since_s: float
    is_tried: bool = False


class KvQueue(Generic[JobT]):
    """The waiting calls. Times are those of the session table's clock."""

    def __init__(self, limits: WaitLimits) -> None:
        self._limits = limits
        self._rate = ReleaseRate()
        self._waits: dict[JobT, _Wait] = {}
        self._num_ahead = self._num_blocks_ahead = 0

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, job: JobT) -> bool:
        return job in self._waits

    def add(self, job: JobT, now_s: float) -> None:
        """Add a call that has just arrived."""
        self._waits[job] = _Wait(now_s)

    def remove(self, job: JobT) -> None:
        """Remove a call that has its blocks or has ended."""
        del self._waits[job]

    def note_released(self, num_blocks: int, now_s: float) -> None:
        """Note that an ended turn gave back blocks."""
        self._rate.note(num_blocks, now_s)

    def in_order(self, reserved: Mapping[str, int]) -> list[JobT]:
        """Return the calls in the order in which they get blocks, and begin to count those that go on waiting.

        Args:
            reserved: number of reserved blocks by tenant.
        """
        self._num_ahead = self._num_blocks_ahead = 0

        def place(job: JobT) -> tuple[bool, int, int]:
            is_new = job.call.may_refuse
            return is_new, reserved.get(job.sequence.tenant, 0) if is_new else 0, job.sequence.turn_order

        return sorted(self._waits, key=place)

    def must_leave_blocks(self, job: JobT, num_reserved: int, num_blocks: int) -> bool:
        """Return whether a new turn waits although blocks may be free, because its tenant has reserved its part.

        Args:
            job: a waiting call, on a replica with sessions of several tenants.
            num_reserved: blocks that are reserved for its tenant.
            num_blocks: blocks of the pool.
        """
        most = num_blocks - num_blocks // _SHARED_PART
        return job.call.may_refuse and num_reserved > 0 and num_reserved + blocks_for(job.call.needed_len) > most

    def refusal(self, job: JobT, now_s: float) -> ResourceExhausted | None:
        """Return the error for a call that got no blocks, or None if it goes on waiting.

        Called for the waiting calls in their order.
        """
        if not job.call.may_refuse:
            return None
        wait = self._waits[job]
        num_blocks = blocks_for(job.call.needed_len) - len(job.sequence.block_table)
        wait_s = self._rate.seconds_for(self._num_blocks_ahead + num_blocks, now_s)
        is_too_late = now_s - wait.since_s >= self._limits.max_wait_s
        is_too_long = not wait.is_tried and wait_s > self._limits.max_wait_s
        if self._num_ahead >= self._limits.max_waiting or is_too_late or is_too_long:
            what, how_many = shortage(job.sequence, job.call.needed_len)
            return ResourceExhausted(
                f"the {what} of this replica are reserved for running requests, and {self._num_ahead} requests wait "
                f"for them; the request needs {how_many}",
                reason="KV_EXHAUSTED",
                retry_after_s=min(max(_LEAST_RETRY_S, wait_s), _MOST_RETRY_S),
            )
        wait.is_tried = True
        self._num_ahead += 1
        self._num_blocks_ahead += num_blocks
        return None

    def next_refusal_s(self) -> float | None:
        """Return the time at which the first of the calls has waited for too long; None if none can."""
        return min(
            (wait.since_s + self._limits.max_wait_s for job, wait in self._waits.items() if job.call.may_refuse),
            default=None,
        )
