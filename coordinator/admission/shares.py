"""Shares of tenants: how many requests run while a tenant uses less than its share, and whose rounds wait.

The queue (`slots`) asks for the limit before it starts a request. Requests that have started run to their end, so the
limit alone would leave a tenant that comes later slow for as long as they run. Until fewer run, rounds of tenants above
their share wait for one another (`RoundTurns`). A generation begins and ends each of its rounds at its slot.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection

from coordinator.admission.speeds import RunningLimit

#: Longest pause after a round; a round that takes longer waits for something else than the device.
MAX_PAUSE_S = 1.0


class RoundTurns:
    """Rounds that run or wait, in order of arrival. Used from one event loop."""

    def __init__(self, num_turns: Callable[[str], int | None], pause_share: Callable[[], float]) -> None:
        """
        Args:
            num_turns: returns how many rounds may run at once for a tenant's to begin; None: it need not wait.
            pause_share: returns the time for which a turn is not taken again, relative to the duration of its round.
        """
        self._num_turns, self._pause_share = num_turns, pause_share
        self._num_taken = 0
        """Turns that a round holds, or that pause."""
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    def is_free(self, tenant: str) -> bool:
        """Return whether the rounds of a tenant need not wait."""
        return self._num_turns(tenant) is None

    async def begin(self, tenant: str) -> float | None:
        """Return once a round may run: the time at which it begins, for `end`, or None if it holds no turn."""
        limit = self._num_turns(tenant)
        if limit is None:
            return None
        if self._num_taken < limit and not self._waiting:
            self._num_taken += 1
            return time.monotonic()
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((tenant, granted))
        try:
            await granted
        except BaseException:
            if not granted.cancelled():  # the turn came in the same moment
                self._give_back()
            raise
        return time.monotonic()

    def end(self, began_s: float) -> None:
        """Note the end of a round that holds a turn since `began_s`."""
        pause_s = min(MAX_PAUSE_S, self._pause_share() * (time.monotonic() - began_s))
        if pause_s > 0.0:
            asyncio.get_running_loop().call_later(pause_s, self._give_back)
        else:
            self._give_back()

    def fill(self) -> None:
        """Let waiting rounds run. Called as well when a tenant needs less than before."""
        while self._waiting:
            tenant, granted = self._waiting[0]
            if not granted.cancelled():
                limit = self._num_turns(tenant)
                if limit is not None and self._num_taken >= limit:
                    return
                self._num_taken += 1
                granted.set_result(None)
            self._waiting.popleft()

    def _give_back(self) -> None:
        self._num_taken -= 1
        self.fill()


#: Time for which a tenant without requests still counts as one that uses less than its share. Between two requests of a
#: stream, the slots of a whole batch would otherwise go to another tenant, whose requests would slow down the next one.
PRESENT_S = 1.0

#: Pause after a round of a tenant above its share, relative to the round, if the device has no room for two streams:
#: other tenants then have the device for themselves half of the time.
PAUSE_SHARE = 1.0

#: Part of the limit that stays in use if a tenant uses less than its share.
MIN_SHARED_PART = 8


class TenantShares:
    """Running requests of each tenant. Used from one event loop."""

    def __init__(self, limit: RunningLimit, waiting: Collection[str]) -> None:
        """
        Args:
            limit: number of requests that may run while no tenant is disturbed.
            waiting: names of the tenants with waiting requests, kept up to date by its owner.
        """
        self._limit, self._waiting = limit, waiting
        self.running: Counter[str] = Counter()
        """Number of running requests by tenant, above 0."""
        self._left_at_s: dict[str, float] = {}
        """Time at which the last request of a tenant ended, by tenant without requests, for `PRESENT_S`."""

    def begin(self, tenant: str) -> None:
        """Note a request that runs from now on."""
        self.running[tenant] += 1

    def end(self, tenant: str) -> None:
        """Note the end of a request."""
        self.running[tenant] -= 1
        if not self.running[tenant]:
            del self.running[tenant]
            self._left_at_s[tenant] = time.monotonic()

    @property
    def limit(self) -> int:
        """Number of requests that may run."""
        shared = self.shared_limit
        return self._limit.value if shared is None else shared

    @property
    def shared_limit(self) -> int | None:
        """The limit while a tenant that does not wait uses less than its share; None if no tenant does."""
        if len(self.running) + len(self._waiting) + len(self._left_at_s) < 2:
            return None
        limit, tenants = self._limit.value, self._present_tenants()
        share = limit // max(1, len(tenants))
        if len(tenants) > 1 and any(tenant not in self._waiting and self.running[tenant] < share for tenant in tenants):
            return max(len(tenants), self._limit.shared_value, limit // MIN_SHARED_PART)
        return None

    def num_turns(self, tenant: str) -> int | None:
        """Return how many rounds of the tenants above their shares may run at once; None if `tenant` is below its."""
        shared = self.shared_limit
        if shared is None or self.running.total() <= shared:
            return None
        share = shared // len(self._present_tenants())
        if self.running[tenant] <= share:
            return None
        return max(1, shared - sum(number for number in self.running.values() if number <= share))

    @property
    def pause_share(self) -> float:
        """Pause of a turn relative to its round: above 0 if a single other stream slows a stream down too much."""
        shared = self.shared_limit
        return PAUSE_SHARE if shared is not None and self._limit.shared_value < shared else 0.0

    def _present_tenants(self) -> set[str]:
        since_s = time.monotonic() - PRESENT_S
        for tenant in [tenant for tenant, left_s in self._left_at_s.items() if left_s < since_s]:
            del self._left_at_s[tenant]
        return {*self.running, *self._waiting, *self._left_at_s}
