"""The calls of one stream by id: those that wait for an answer, and cancelled ones whose answer is still to come.

Each `specdec.rpc.replica_stream.ReplicaStream` holds one `OpenCalls`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.contract.errors import Unavailable

_CALL_ID_MODULUS = 1 << 32

#: Limit of outstanding answers to calls that were cancelled after they were sent; a peer beyond it answers nothing.
MAX_OWED = 4096


@dataclass(slots=True)
class WireStats:
    """Bytes and times of calls on the wire, however the calls ended."""

    num_bytes: int = 0
    """Serialised request items sent and reply items received."""
    sent_s: float = 0.0
    """Time at which the frame of the last sent call was given to its stream, by `time.monotonic`; 0: none was sent."""
    heard_s: float = 0.0
    """Time at which the frame of the last answer had been read; 0: none was received."""


@dataclass(slots=True)
class CallTimeout:
    """Time limits of a call's answer."""

    silence_s: float
    """Longest time since the call began or the replica last answered any call of the stream, whichever is later."""
    total_s: float
    """Longest time since the call began, also if the replica answers other calls meanwhile."""


@dataclass(slots=True)
class PendingCall:
    """A call whose caller waits."""

    request: Any
    item: bytes
    """The encoded request."""
    wire: WireStats
    answer: asyncio.Future[Any]
    started_at: float
    """Time at which the call began, by the event loop's clock."""
    timer: asyncio.TimerHandle | None = None
    """Timer of the call's `CallTimeout`."""
    is_given_more: bool = False
    """Set once the timeout was extended because the event loop stalled while the call waited."""
    is_sent: bool = False
    on_step: Callable[[Any], None] | None = None
    """Takes the answers of a run's steps before the last one; None for other calls."""
    num_steps: int = 0
    """Number of steps that a run has been answered."""
    waits_for: object = field(default_factory=object)
    """Stands for the answer that comes next; another object after each step of a run."""


class UnexpectedReply(Exception):
    """The peer answered a call that was never made, or answered a call twice."""


class OpenCalls:
    """The bookkeeping of one stream's call ids. Use from one event loop."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingCall] = {}
        self._owed: set[int] = set()
        """Ids of cancelled calls that were sent and not answered yet."""
        self._next_id = 0

    @property
    def owes_too_many(self) -> bool:
        """Return whether the peer leaves more calls unanswered than is allowed."""
        return len(self._owed) > MAX_OWED

    @property
    def oldest(self) -> PendingCall | None:
        """The call that has waited longest, or None."""
        return next(iter(self._pending.values()), None)

    @property
    def are_all_runs(self) -> bool:
        """Return whether no call waits for an answer but runs, whose steps do not end."""
        return all(call.on_step is not None for call in self._pending.values())

    def next_id(self) -> int:
        """Return an id for which no answer can still arrive."""
        while True:
            self._next_id = (self._next_id + 1) % _CALL_ID_MODULUS
            if self._next_id not in self._pending and self._next_id not in self._owed:
                return self._next_id

    def add(self, call_id: int, call: PendingCall) -> None:
        self._pending[call_id] = call

    def forget(self, call_id: int) -> None:
        """Note that the caller no longer waits: an unsent call is never sent, a late answer is dropped. Idempotent."""
        call = self._pending.pop(call_id, None)
        if call is not None and call.is_sent:
            self._owed.add(call_id)

    def take(self, call_id: int) -> PendingCall | None:
        """Return the call that an answer belongs to, or None if the call was cancelled.

        Raises:
            UnexpectedReply: the call does not exist, or it has been answered before.
        """
        # From now on nothing waits for the replica, also if the caller of a run takes its last answer much later.
        call = self._pending.pop(call_id, None)
        if call is None:
            if call_id not in self._owed:
                raise UnexpectedReply(f"answered call {call_id}, which is not waiting for an answer")
            self._owed.discard(call_id)
            return None
        return None if call.answer.done() else call

    def stepping(self, call_id: int, now: float) -> PendingCall | None:
        """Note a step of a run at `now`, by the event loop's clock; return the run, or None if it was cancelled.

        Raises:
            UnexpectedReply: the run does not exist, or has ended.
        """
        call = self._pending.get(call_id)
        if call is not None and call.on_step is not None:
            call.num_steps += 1
            call.waits_for = object()
            call.started_at = now
            self._pending[call_id] = self._pending.pop(call_id)  # in order of the wait
            return None if call.answer.done() else call
        if call_id not in self._owed:
            raise UnexpectedReply(f"answered a step of call {call_id}, which is not a run")
        return None

    def fail_all(self, reason: str) -> None:
        """End every call with Unavailable."""
        for call in self._pending.values():
            if not call.answer.done():
                call.answer.set_exception(Unavailable(reason))
        self._pending.clear()
