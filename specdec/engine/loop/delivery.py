"""Carry answers from the device thread back to the event loops that await them.

A round's answer continues in the `proposer` or the `verifier` that awaits it, and from there through the `servicer`
onto the wire. A `Waiter` is made on its event loop; an `Outbox` belongs to the device thread.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Waiter:
    """A coroutine that awaits a call on an event loop; made there."""

    event_loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    future: asyncio.Future[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.event_loop.create_future()


class Outbox:
    """Answers and errors of one turn of a thread."""

    def __init__(self, own: asyncio.AbstractEventLoop | None = None) -> None:
        """`own` is the event loop that runs on this thread, or None."""
        self._own = own
        self._outcomes: list[tuple[Waiter, Any]] = []

    @property
    def is_empty(self) -> bool:
        """True if nothing waits to be delivered."""
        return not self._outcomes

    def put(self, waiter: Waiter, outcome: Any) -> None:
        """Add an outcome: an answer, or an error to raise."""
        self._outcomes.append((waiter, outcome))

    def deliver(self) -> None:
        """Deliver all outcomes, with one callback per event loop."""
        outcomes, self._outcomes = self._outcomes, []
        for event_loop in {waiter.event_loop for waiter, _ in outcomes}:
            own = [(waiter.future, outcome) for waiter, outcome in outcomes if waiter.event_loop is event_loop]
            if event_loop is self._own:
                _resolve(own)
                continue
            try:
                event_loop.call_soon_threadsafe(_resolve, own)
            except RuntimeError:
                _log.warning("event loop closed before its calls were answered: calls=%d", len(own))


def _resolve(outcomes: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in outcomes:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
