"""The requests that wait for a slot (`slots`), by tenant and in their order.

The next slot goes to the waiting tenant that runs the fewest requests. Within a tenant the order is that of priorities,
then next turns of sessions before new sessions, then arrival.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from coordinator.admission.slot_request import SlotRequest
from specdec.contract.errors import SpecdecError


@dataclass(order=True, slots=True)
class WaitingRequest:
    """A request that waits. The first fields are its place within its tenant."""

    is_new: bool
    """False for a resumption, which comes first."""
    priority: int
    is_new_session: bool
    arrival: int
    request: SlotRequest = field(compare=False)
    granted: asyncio.Future[Any] = field(compare=False)
    """Gets the slot, or the error with which the request is refused."""
    is_judged: bool = field(compare=False)
    """True if its wait was predicted, or does not matter."""

    @property
    def tenant(self) -> str:
        return self.request.key.tenant

    def refuse(self, error: SpecdecError) -> None:
        """End the wait with an error, unless it has ended."""
        if not self.granted.done():
            self.granted.set_exception(error)


class WaitingRequests:
    """All waiting requests of one coordinator. Used from one event loop; `all` and `len` from any thread."""

    def __init__(self) -> None:
        self._queues: dict[str, list[WaitingRequest]] = {}
        """Waiting requests by tenant, in order; no tenant without one."""
        self._served_at: dict[str, int] = {}
        """Number of the last grant by waiting tenant, which decides between tenants that run equally many."""
        self._numbers = count()

    def __len__(self) -> int:
        return sum(len(queue) for queue in list(self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def tenants(self) -> KeysView[str]:
        """Names of the tenants with waiting requests; always up to date."""
        return self._queues.keys()

    def all(self) -> list[SlotRequest]:
        """Return all waiting requests, tenant by tenant."""
        return [waiter.request for queue in list(self._queues.values()) for waiter in list(queue)]

    def of_tenant(self, tenant: str) -> list[WaitingRequest]:
        """Return the waiting requests of a tenant in their order."""
        return list(self._queues.get(tenant, ()))

    def add(self, request: SlotRequest, *, is_judged: bool) -> WaitingRequest:
        """Let a request wait in its place."""
        waiter = WaitingRequest(
            not request.is_resumption,
            request.priority,
            not request.is_next_turn,
            next(self._numbers),
            request,
            asyncio.get_running_loop().create_future(),
            is_judged,
        )
        if waiter.tenant not in self._queues:
            self._queues[waiter.tenant] = []
            self._served_at[waiter.tenant] = next(self._numbers)
        insort(self._queues[waiter.tenant], waiter)
        return waiter

    def remove(self, waiter: WaitingRequest) -> None:
        """Remove a request that no longer waits. Idempotent."""
        queue = self._queues.get(waiter.tenant, [])
        if waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._queues[waiter.tenant], self._served_at[waiter.tenant]

    def pop(self, num_running: Mapping[str, int]) -> WaitingRequest:
        """Remove and return the next request; `num_running`: requests that run by tenant, 0 for others."""
        tenant = min(self._queues, key=lambda name: (num_running[name], self._served_at[name]))
        waiter = self._queues[tenant][0]
        self._served_at[tenant] = next(self._numbers)
        self.remove(waiter)
        return waiter

    def seconds_before(self, tenant: str, seconds_of: Callable[[SlotRequest], float]) -> Iterator[float]:
        """Yield the seconds of all requests that go before each of a tenant's, and then before a further one."""
        own = self._queues.get(tenant, [])
        others = [queue for name, queue in self._queues.items() if name != tenant]
        total_s = 0.0
        for index in range(len(own) + 1):
            total_s += sum(seconds_of(queue[index].request) for queue in others if index < len(queue))
            yield total_s
            if index < len(own):
                total_s += seconds_of(own[index].request)
