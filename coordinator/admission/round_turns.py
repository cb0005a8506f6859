"""Turns of rounds: while a tenant uses less than its share, rounds of tenants above theirs wait for one another.

`slots` owns it; a generation begins and ends each of its rounds at its slot.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

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
