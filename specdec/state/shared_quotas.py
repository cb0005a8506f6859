"""Limits that all processes of a system count together: streams at once, requests and tokens a minute.

    specdec:TENANT:quota          hash: what a tenant uses, counted by the coordinators
    specdec:TENANT:quota:KEY_ID   hash: what one of its API keys uses, counted by the gateways

A request asks Redis once before it begins. Its tokens are counted here, and reported in the background: once the
process has used the tokens that it holds in advance, and at a third of its lease. The lease of a process that died
expires, and with it its streams and the tokens that it held.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specdec.contract.errors import SpecdecError, Unavailable
from specdec.settings.cluster_names import DEFAULT_CLUSTER
from specdec.state.connection import RedisConnection
from specdec.state.key_names import quota_key

#: Shortest time between two reports of tokens.
_REPORT_PAUSE_S = 0.25
#: Time for which a request waits if streams of other processes fill the limit: one of them may have just ended.
_LEAVING_GRACE_S = 0.3
_RETRY_S = 0.05

_log = logging.getLogger(__name__)


class QuotaLimits(NamedTuple):
    """The limits that are counted; None: no limit."""

    max_streams: int | None
    max_requests_per_minute: int | None
    max_tokens_per_minute: int | None

    @property
    def is_unlimited(self) -> bool:
        return self == (None, None, None)


class QuotaOwner(NamedTuple):
    """A tenant, or one of its API keys."""

    tenant: str
    key_id: str = ""


class Refusal(NamedTuple):
    """The limit that a request exceeds."""

    limit: str
    """`streams`, `requests` or `tokens`."""
    retry_after_s: float


@dataclass(slots=True)
class _Use:
    """Use of one tenant's or key's limits by this process."""

    key: str
    num_streams: Callable[[], int]
    """Returns the number of streams that run or wait here."""
    limits: QuotaLimits
    waiting: list[tuple[bool, asyncio.Future[Refusal | None]]] = field(default_factory=list)
    """Requests that are to be asked for; True for resumptions."""
    num_asking: int = 0
    """Calls of `take` that have not returned."""
    num_entering: int = 0
    """Granted requests that `num_streams` does not count yet."""
    num_returned: int = 0
    num_tokens: int = 0
    """Tokens since the last report."""
    unanswered: Any = None
    """A call without an answer, which may have been counted: it is sent again before the next one."""
    num_held: int = 0
    """Tokens that count as used before they are reported."""
    num_others: int = 0
    """Streams of other processes."""
    reported_streams: int = 0
    reported_s: float = float("-inf")
    telling: asyncio.Task[None] | None = None
    """Reports this use; one call is under way at a time."""

    def is_due(self, now_s: float, lease_s: float) -> bool:
        """Return whether Redis is to be told of the use."""
        streams = self.num_streams() + self.num_entering
        if streams < self.reported_streams or self.num_returned or self.unanswered:
            return True
        age_s = now_s - self.reported_s
        if self.num_tokens > self.num_held and age_s >= _REPORT_PAUSE_S:
            return True
        return bool(streams or self.num_tokens) and age_s >= lease_s / 3

    @property
    def is_over(self) -> bool:
        """True if nothing is left to report, and no report is under way."""
        if self.unanswered or (self.telling is not None and not self.telling.done()):
            return False
        is_idle = not (self.num_streams() or self.num_entering or self.num_asking or self.reported_streams)
        return is_idle and not (self.num_tokens or self.num_returned)


class SharedQuotas:
    """The part of one process in the limits of all tenants or keys. Used from one event loop."""

    def __init__(
        self, connection: RedisConnection, process: str, *, lease_ttl_s: float, cluster: str = DEFAULT_CLUSTER
    ) -> None:
        """
        Args:
            connection: connection to Redis; its owner closes it.
            process: unique name of the process.
            lease_ttl_s: time after which the streams of a process that died no longer count.
            cluster: name of the system.
        """
        self._connection, self._process, self._lease_ttl_s = connection, process, lease_ttl_s
        self._cluster = cluster
        self._numbers = itertools.count(1)
        self._uses: dict[QuotaOwner, _Use] = {}
        self._wake = asyncio.Event()
        self._reporting: asyncio.Task[None] | None = None
        self._has_failed = False

    async def take(
        self, owner: QuotaOwner, limits: QuotaLimits, num_streams: Callable[[], int], *, is_resumption: bool = False
    ) -> Refusal | None:
        """Ask for a request. A granted one counts among the streams until `entered`, and then by `num_streams`.

        A resumed stream counts as a stream alone. It waits as long as the lease of a process that died may live.

        Returns:
            None for a granted request, else the limit that it exceeds.

        Raises:
            Unavailable: the store cannot be reached; the request is not counted.
        """
        use = self._uses.get(owner)
        if use is None:
            use = self._uses[owner] = _Use(quota_key(*owner, self._cluster), num_streams, limits)
        use.limits = limits
        grace_s = self._lease_ttl_s + _RETRY_S if is_resumption else _LEAVING_GRACE_S
        ends_s = time.monotonic() + grace_s
        use.num_asking += 1
        try:
            while True:
                refusal = await self._ask(use, is_resumption)
                if refusal is None or refusal.limit != "streams" or not use.num_others or time.monotonic() > ends_s:
                    return refusal
                await asyncio.sleep(_RETRY_S)
        finally:
            use.num_asking -= 1

    def entered(self, owner: QuotaOwner) -> None:
        """Note that `num_streams` counts a granted request from now on, or that it has been given up."""
        self._uses[owner].num_entering -= 1

    def give_back(self, owner: QuotaOwner) -> None:
        """Give back a request that was granted and then did not begin."""
        if use := self._uses.get(owner):
            use.num_returned += 1
            self.note_end(owner)

    def count_tokens(self, owner: QuotaOwner, num_tokens: int) -> None:
        """Count tokens of a prompt or an output. No effect on a tenant or key that has no limit."""
        use = self._uses.get(owner)
        if use is not None and use.limits.max_tokens_per_minute is not None:
            use.num_tokens += num_tokens

    def note_end(self, owner: QuotaOwner) -> None:
        """Note that a stream has ended, so that other processes learn of it at once."""
        if owner in self._uses:
            self._wake.set()
            self._report_on()

    def num_others(self, owner: QuotaOwner) -> int:
        """Return the number of streams that other processes had when this one asked last."""
        use = self._uses.get(owner)
        return use.num_others if use is not None else 0

    async def close(self) -> None:
        """Give back the streams of this process, and stop. Idempotent."""
        uses, self._uses = list(self._uses.values()), {}
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.wait([self._reporting])
        for use in uses:
            use.num_streams = lambda: 0
            if use.telling is not None:
                await asyncio.wait([use.telling])  # it may have told of the streams before
            if not self._has_failed:
                await self._tell(use)

    async def _ask(self, use: _Use, is_resumption: bool) -> Refusal | None:
        granted: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        use.waiting.append((is_resumption, granted))
        self._tell(use)
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None and not granted.result():
                use.num_entering -= 1
                use.num_returned += not is_resumption
                self._wake.set()
            raise

    def _tell(self, use: _Use) -> asyncio.Task[None]:
        """Report a use, and ask for the requests that wait: one call at a time, so that each has the last one's
        grants among its streams."""
        if use.telling is None or use.telling.done():
            # An own context: its records must not have the ids of the request that came first.
            use.telling = asyncio.create_task(self._tell_all(use), name="quota", context=contextvars.Context())
        return use.telling

    async def _tell_all(self, use: _Use) -> None:
        await self._call(use)
        while use.waiting:
            await self._call(use)
        self._report_on()

    async def _call(self, use: _Use) -> None:
        if use.unanswered and not await self._repeat(use):
            return
        call, waiters = self._begin(use)
        (answer,) = await self._connection.run_scripts("use_quota", [call])
        if isinstance(answer, SpecdecError):
            use.unanswered = call
            self._fail(waiters, answer)
        else:
            self._settle(use, waiters, answer)

    async def _repeat(self, use: _Use) -> bool:
        """Send a call again that has no answer yet: the script counts one number once. Return whether it has now."""
        (answer,) = await self._connection.run_scripts("use_quota", [use.unanswered])
        if isinstance(answer, SpecdecError):
            waiters, use.waiting = use.waiting, []
            self._fail(waiters, answer)
            return False
        use.unanswered = None
        use.num_returned += answer[0]  # their callers have been told that they failed
        return True

    def _begin(self, use: _Use) -> tuple[Any, list[tuple[bool, asyncio.Future[Refusal | None]]]]:
        waiters = [each for each in use.waiting if not each[1].done()]
        use.waiting = []
        num_resumed = sum(is_resumption for is_resumption, _ in waiters)
        streams = use.num_streams() + use.num_entering
        args = [
            self._process,
            next(self._numbers),
            round(self._lease_ttl_s * 1000),
            streams,
            len(waiters) - num_resumed,
            num_resumed,
            use.num_returned,
            use.num_tokens,
            *("" if limit is None else limit for limit in use.limits),
        ]
        use.num_returned = use.num_tokens = 0
        use.reported_streams, use.reported_s = streams, time.monotonic()
        return (([use.key], args), waiters)

    def _settle(self, use: _Use, waiters: list[tuple[bool, asyncio.Future[Refusal | None]]], answer: Any) -> None:
        granted, resumed, use.num_held, use.num_others, limit, wait_ms = answer
        refusal = Refusal(limit.decode(), wait_ms / 1000)
        use.reported_streams += granted + resumed
        left = {True: resumed, False: granted}
        for is_resumption, waiter in waiters:
            is_granted, left[is_resumption] = left[is_resumption] > 0, left[is_resumption] - 1
            if not is_granted:
                if not waiter.done():
                    waiter.set_result(refusal)
            elif waiter.done():  # its caller has left
                use.num_returned += not is_resumption
            else:
                use.num_entering += 1
                waiter.set_result(None)
        self._has_failed = False

    def _fail(self, waiters: list[tuple[bool, asyncio.Future[Refusal | None]]], error: SpecdecError) -> None:
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(Unavailable(error.message, reason=error.reason))
        if not self._has_failed:
            self._has_failed = True
            _log.warning("cannot report the use of limits, trying again: %s", error)

    def _report_on(self) -> None:
        """Report in the background while there is anything to report."""
        if self._uses and (self._reporting is None or self._reporting.done()):
            self._reporting = asyncio.create_task(self._report_all(), name="quotas")

    async def _report_all(self) -> None:
        while self._uses:
            self._wake.clear()
            now_s = time.monotonic()
            for use in self._uses.values():  # without waiting: one that is flooded goes on telling
                if use.is_due(now_s, self._lease_ttl_s):
                    self._tell(use)
            for owner in [owner for owner, use in self._uses.items() if use.is_over]:
                del self._uses[owner]
            if self._has_failed:
                await asyncio.sleep(_REPORT_PAUSE_S)
            await self._next_turn()

    async def _next_turn(self) -> None:
        """Wait until a report may be due."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_PAUSE_S):
                await self._wake.wait()
