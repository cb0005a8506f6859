"""Carry answers from the device thread back to the event loops that await them.

A round's answer continues in the `proposer` or the `verifier` that awaits it, and from there through the `servicer`
onto the wire. A `Waiter` is made on its event loop; an `Outbox` belongs to the device thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Waiter:
    """A coroutine that awaits a call on an event loop; made there."""

    on_step: Callable[[Any], None] | None = None
    """Called on the event loop with the answer of each step of a run but the last."""
    event_loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    future: asyncio.Future[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.event_loop.create_future()


class Outbox:
    """Answers and errors of one turn of a thread."""

    def __init__(self) -> None:
        self._outcomes: list[tuple[Waiter, Any, bool]] = []
        """Waiters with their outcomes, and whether each is the last one."""

    @property
    def is_empty(self) -> bool:
        """True if nothing waits to be delivered."""
        return not self._outcomes

    def put(self, waiter: Waiter, outcome: Any) -> None:
        """Add an outcome: an answer, or an error to raise."""
        self._outcomes.append((waiter, outcome, True))

    def put_step(self, waiter: Waiter, answer: Any) -> None:
        """Add the answer of a run's step, which is not its last."""
        self._outcomes.append((waiter, answer, False))

    def deliver(self) -> None:
        """Deliver all outcomes, with one callback per event loop."""
        outcomes, self._outcomes = self._outcomes, []
        for event_loop in {waiter.event_loop for waiter, _, _ in outcomes}:
            own = [each for each in outcomes if each[0].event_loop is event_loop]
            try:
                event_loop.call_soon_threadsafe(_resolve, own)
            except RuntimeError:
                _log.warning("event loop closed before its calls were answered: calls=%d", len(own))


def _resolve(outcomes: list[tuple[Waiter, Any, bool]]) -> None:
    for waiter, outcome, is_last in outcomes:
        future = waiter.future
        if future.done():
            continue
        if not is_last:
            assert waiter.on_step is not None
            waiter.on_step(outcome)
        elif isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
