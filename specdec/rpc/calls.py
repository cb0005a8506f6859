"""The calls of one stream by their ids: those that wait for an answer, and those given up that are still owed one.

Not here: sending and decoding (`link_stream`, which holds one of these for each stream).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from specdec.errors import Unavailable

_CALL_ID_MODULUS = 1 << 32

#: Answers that a peer may owe to calls given up after they were sent; one that owes more answers nobody.
MAX_OWED = 4096


@dataclass(slots=True)
class WireStats:
    """What calls cost on the wire, whatever became of them."""

    num_bytes: int = 0
    """Serialised request items sent and reply items received."""
    sent_s: float = 0.0
    """When the frame of the last call that left was given to its stream, by `time.monotonic`; 0: none did."""
    heard_s: float = 0.0
    """When the frame of the last answer had been read; 0: there was none."""


@dataclass(slots=True)
class CallTimeout:
    """How long a call waits for its answer."""

    silence_s: float
    """Since it was asked, or since the replica last answered anybody on the stream, whichever came later."""
    total_s: float
    """Since it was asked, whoever is answered meanwhile."""


@dataclass(slots=True)
class PendingCall:
    """A call that somebody waits for."""

    request: Any
    item: bytes
    """The request, encoded."""
    wire: WireStats
    answer: asyncio.Future[Any]
    asked_at: float
    """By the event loop's clock."""
    timer: asyncio.TimerHandle | None = None
    """Of the caller's patience."""
    is_given_more: bool = False
    """Because the event loop stood still while it waited."""
    is_sent: bool = False
    is_answered: bool = False


class UnexpectedReply(Exception):
    """The peer answered a call that nobody asked, or one for the second time."""


class OpenCalls:
    """Use from one event loop."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingCall] = {}
        self._owed: set[int] = set()
        self._next_id = 0

    @property
    def owes_too_many(self) -> bool:
        return len(self._owed) > MAX_OWED

    @property
    def oldest(self) -> PendingCall | None:
        """The call that has waited longest."""
        return next(iter(self._pending.values()), None)

    def next_id(self) -> int:
        """An id that no answer may still come for."""
        while True:
            self._next_id = (self._next_id + 1) % _CALL_ID_MODULUS
            if self._next_id not in self._pending and self._next_id not in self._owed:
                return self._next_id

    def add(self, call_id: int, call: PendingCall) -> None:
        self._pending[call_id] = call

    def forget(self, call_id: int) -> None:
        """Nobody waits any more. Unsent, the call never leaves; sent, its answer is dropped on arrival. Idempotent."""
        call = self._pending.pop(call_id, None)
        if call is not None and call.is_sent and not call.is_answered:
            self._owed.add(call_id)

    def take(self, call_id: int) -> PendingCall | None:
        """The call that an answer is for; None where it was given up.

        Raises:
            UnexpectedReply: there is no such call, or it has been answered before.
        """
        call = self._pending.get(call_id)
        if call is None or call.is_answered:
            if call_id not in self._owed:
                raise UnexpectedReply(f"answered call {call_id}, which nobody waits for")
            self._owed.discard(call_id)
            return None
        call.is_answered = True
        return None if call.answer.done() else call

    def fail_all(self, reason: str) -> None:
        """Ends every call with Unavailable."""
        for call in self._pending.values():
            if not call.answer.done():
                call.answer.set_exception(Unavailable(reason))
        self._pending.clear()
