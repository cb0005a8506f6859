"""Turns of tenants at something that serves one request at a time. `constraints` compiles in such turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairTurns:
    """Gives one turn at a time, to the waiting tenants one after another. Used from one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting requests by tenant, the tenant with the next turn first; no tenant without one."""

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn of a tenant, and hold it within the block."""
        if self._is_taken:
            await self._wait(tenant)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(granted)
        try:
            await granted
        except BaseException:
            if not granted.cancelled():  # the turn came in the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next request that still waits; it is free if there is none."""
        self._is_taken = False
        while self._waiting and not self._is_taken:
            tenant, requests = self._waiting.popitem(last=False)
            granted = requests.popleft()
            if requests:
                self._waiting[tenant] = requests
            if not granted.cancelled():
                granted.set_result(None)
                self._is_taken = True
