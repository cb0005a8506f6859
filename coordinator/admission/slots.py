"""The queue before generation: a limited number of requests run, and the others wait for a slot or are refused.

A request is refused at once where it could not end before its deadline, so that it does not fail in the middle of its
output. `generation_service` takes a slot for each request and gives it back when the generation ends. Slots are shared
among tenants: the next one goes to the waiting tenant that runs the fewest requests. Within a tenant the order is that
of priorities, then next turns of sessions before new sessions, then arrival.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from coordinator.admission.round_turns import RoundTurns
from coordinator.admission.shares import TenantShares
from coordinator.admission.slot_request import QueueState, SlotRequest
from coordinator.admission.speeds import RunningLimit, StreamSpeeds
from specdec.errors import ResourceExhausted, SpecdecError
from specdec.tenant import SessionKey

#: Factor on predicted times before they are compared with a deadline.
CAUTION = 1.5

#: Time after a request found no slot in which free slots are given only to requests that meet their deadlines.
LOADED_S = 5.0

#: Requests that may wait for each slot, however long that takes. So two clients for each slot are not refused.
WAITING_PER_SLOT = 1

#: Resumptions run beyond the limit up to this multiple of it, so that the loss of one of two coordinators does not make
#: streams wait. Beyond it they wait before all other requests of their tenant.
MAX_RESUMED = 2

_MIN_RETRY_S = 0.5
_MAX_RETRY_S = 60.0


class RunningSlot:
    """The right of one request to run. It must be released."""

    def __init__(self, slots: RunningSlots, tenant: str) -> None:
        self.tenant = tenant
        self._slots = slots
        self._began_s = time.monotonic()
        self._num_tokens: int | None = None
        self._is_released = False
        self._turn_began_s: float | None = None
        self.is_handed_on = False
        """Set once a generation releases the slot."""
        self.when_released: Callable[[], None] = lambda: None
        """Called once, when the slot is free."""

    async def begin_round(self) -> None:
        """Return once the request's next round may run. Call `end_round` after it."""
        self._turn_began_s = await self._slots.turns.begin(self.tenant)

    def end_round(self) -> None:
        """Note the end of a round."""
        began_s, self._turn_began_s = self._turn_began_s, None
        if began_s is not None:
            self._slots.turns.end(began_s)

    def note_chunk(self, num_tokens: int, since_last_s: float | None) -> None:
        """Note new tokens, `since_last_s` after the request's previous ones; None: its first ones."""
        self._slots.note_chunk(self.tenant, num_tokens, since_last_s, time.monotonic() - self._began_s)

    def note_finished(self, num_tokens: int) -> None:
        """Note that the output is complete."""
        self._num_tokens = num_tokens

    def release(self) -> None:
        """Give the slot to the next request. Idempotent."""
        if not self._is_released:
            self._is_released = True
            running_s = time.monotonic() - self._began_s if self.is_handed_on else None
            self.when_released()
            self._slots.note_released(self.tenant, self._num_tokens, running_s)


@dataclass(order=True, slots=True)
class _Waiter:
    is_new: bool
    """False for a resumption, which comes first."""
    priority: int
    is_new_session: bool
    arrival: int
    key: SessionKey = field(compare=False)
    granted: asyncio.Future[RunningSlot] = field(compare=False)


class RunningSlots:
    """The slots of one coordinator, and the requests that wait for one. Used from one event loop."""

    def __init__(
        self,
        num_targets: Callable[[], int],
        *,
        max_queue: int,
        max_running: int | None = None,
        max_wait_s: float,
        count_tokens: Callable[[str, int], None] = lambda tenant, num_tokens: None,
    ) -> None:
        """
        Args:
            num_targets: returns the number of target replicas that take sessions.
            max_queue: requests that wait or run at once.
            max_running: requests that run at once; None: chosen from measured speeds.
            max_wait_s: predicted wait beyond which a request is refused once several wait for each slot.
            count_tokens: called with the tenant and the number of output tokens of each chunk.
        """
        self._max_queue, self._max_wait_s = max_queue, max_wait_s
        self._count_tokens = count_tokens
        self._speeds = StreamSpeeds()
        self._limit = RunningLimit(self._speeds, num_targets, max_running)
        self.num_running = 0
        self._waiting: dict[str, list[_Waiter]] = {}
        """Waiting requests by tenant, in order; no tenant without one."""
        self._shares = TenantShares(self._limit, self._waiting.keys())
        self.turns = RoundTurns(self._shares.num_turns, lambda: self._shares.pause_share)
        self._served_at: dict[str, int] = {}
        """Number of the last grant by waiting tenant, which decides between tenants that run equally many."""
        self._numbers = count()
        self._full_at_s = float("-inf")
        """Time at which a request last found no slot."""
        self._closed: Callable[[], SpecdecError] | None = None

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in list(self._waiting.values()))

    @property
    def state(self) -> QueueState:
        """State for metrics; any thread may read it."""
        num_slots = self._limit.value
        is_full = self.num_running >= num_slots
        return QueueState(self.num_waiting, num_slots, self._wait_s(self.num_waiting) if is_full else 0.0)

    def num_of_tenant(self, tenant: str) -> int:
        """Return the number of requests of a tenant that run or wait."""
        return self._shares.running[tenant] + len(self._waiting.get(tenant, ()))

    async def acquire(self, request: SlotRequest) -> RunningSlot:
        """Return a slot once one is free.

        Raises:
            ResourceExhausted: QUEUE_FULL; the request would wait too long, or could not end before its deadline.
            SpecdecError: what `close` or `withdraw` was given.
        """
        if self._closed is not None:
            raise self._closed()
        if self.num_running + self.num_waiting >= self._max_queue:
            raise ResourceExhausted(
                f"the coordinator already has {self._max_queue} requests, its limit (--max-queue); try again later",
                retry_after_s=_retry_s(self._wait_s(self.num_waiting)),
            )
        self._speeds.note_asked(request.max_new_tokens)
        tenant, may_start = request.key.tenant, self._may_start(request.key.tenant)
        if not may_start:
            self._limit.note_wanted()
            self._full_at_s = time.monotonic()
        if request.is_resumption:
            may_start = self.num_running < MAX_RESUMED * self._limit.value
            return self._take(tenant) if may_start else await self._wait(request, 0.0)
        if may_start and not self._is_loaded():
            return self._take(tenant)
        generation_s = self._require_time(request, may_start=may_start)
        return self._take(tenant) if may_start else await self._wait(request, generation_s)

    def withdraw(self, key: SessionKey, error: Callable[[], SpecdecError]) -> None:
        """Refuse the waiting requests of a session with the error that `error` makes."""
        for waiter in self._waiting.get(key.tenant, ()):
            if waiter.key == key and not waiter.granted.done():
                waiter.granted.set_exception(error())

    def close(self, error: Callable[[], SpecdecError]) -> None:
        """Refuse all waiting requests, and all later ones, with the error that `error` makes."""
        self._closed = error
        for queue in self._waiting.values():
            for waiter in queue:
                if not waiter.granted.done():
                    waiter.granted.set_exception(error())

    def note_chunk(self, tenant: str, num_tokens: int, since_last_s: float | None, since_start_s: float) -> None:
        """Note new tokens of a running request."""
        self._count_tokens(tenant, num_tokens)
        if since_last_s is None:
            self._speeds.note_first_token(since_start_s)
            return
        before, num_streams = self._limit.value, self.num_running
        if self._waiting:
            self._limit.note_wanted()
        if (shared := self._shares.shared_limit) is not None and num_streams > shared:
            if self._shares.num_turns(tenant) is not None or self._shares.pause_share:
                return  # rounds wait for turns, so their times say nothing about the speed of the target
            num_streams = shared
        self._limit.note_chunk(num_tokens, since_last_s, num_streams)
        if self._limit.value > before:
            self._fill()

    def note_released(self, tenant: str, num_tokens: int | None, running_s: float | None) -> None:
        """Note a slot that its request gave back; `running_s` is None where no generation used it."""
        self.num_running -= 1
        self._shares.end(tenant)
        if running_s is not None:
            self._speeds.note_end(num_tokens, running_s)
        self._fill()
        self.turns.fill()

    def _is_loaded(self) -> bool:
        """Return whether the time to generate is to be predicted even where a slot is free.

        While more requests come than can run, a free slot is taken by the next one that arrives. On a system that has
        room, a request is served for as long as its caller waits.
        """
        return self.num_running > 0 and time.monotonic() - self._full_at_s < LOADED_S

    def _may_start(self, tenant: str) -> bool:
        if not self._waiting and self.num_running < self._shares.limit:
            return True
        # The first request of another tenant does not wait for those of a tenant that has taken all slots, and that may
        # run more requests than a limit that has fallen since.
        num_more, running = max(1, self._limit.value // 4), self._shares.running
        is_only = not (running[tenant] or tenant in self._waiting)
        has_room = self.num_running < self._limit.value + num_more or len(running) <= num_more
        return is_only and bool(running) and has_room

    def _require_time(self, request: SlotRequest, *, may_start: bool) -> float:
        """Return the predicted time to generate. Raises ResourceExhausted where the request must be refused."""
        limit, queue = self._shares.limit, self._waiting.get(request.key.tenant, [])
        num_ahead = sum(waiter.priority <= request.priority for waiter in queue)
        wait_s = 0.0 if may_start else self._wait_s(self._num_before(request.key.tenant, num_ahead))
        # Free slots are soon taken, so the speed is that of a full system, unless few of them are in use.
        num_streams = limit if self.num_running >= limit // 4 else self.num_running + 1
        num_streams = self._limit.streams_per_target(num_streams)
        generation_s = self._speeds.generation_s(request.max_new_tokens, num_streams) or 0.0
        if request.deadline_s is not None:
            needed_s, left_s = CAUTION * (wait_s + generation_s), request.deadline_s - time.monotonic()
            if needed_s > left_s:
                raise ResourceExhausted(
                    f"the request would probably end after its deadline: it would wait {wait_s:.1f} s and generate for "
                    f"{generation_s:.1f} s, and {max(left_s, 0.0):.1f} s are left; try again later",
                    retry_after_s=_retry_s(max(wait_s, needed_s - left_s)),
                )
        if may_start:
            return generation_s
        num_tenants = len(self._waiting.keys() | {request.key.tenant})
        if len(queue) >= max(1, WAITING_PER_SLOT * limit // num_tenants) and wait_s > self._max_wait_s:
            raise ResourceExhausted(
                f"the request would probably wait {wait_s:.1f} s; the limit is {self._max_wait_s:g} s "
                "(--max-wait-s); try again later",
                retry_after_s=_retry_s(wait_s),
            )
        return generation_s

    async def _wait(self, request: SlotRequest, generation_s: float) -> RunningSlot:
        tenant, loop = request.key.tenant, asyncio.get_running_loop()
        granted: asyncio.Future[RunningSlot] = loop.create_future()
        waiter = _Waiter(
            not request.is_resumption,
            request.priority,
            not request.is_next_turn,
            next(self._numbers),
            request.key,
            granted,
        )
        if tenant not in self._waiting:
            self._waiting[tenant] = []
            self._served_at[tenant] = next(self._numbers)
        insort(self._waiting[tenant], waiter)
        timeout_s = None
        if request.deadline_s is not None:
            timeout_s = request.deadline_s - time.monotonic() - CAUTION * generation_s
        try:
            async with asyncio.timeout(timeout_s):
                return await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result().release()
            if isinstance(error, TimeoutError):
                raise ResourceExhausted(
                    "the request has waited so long that it would probably end after its deadline; try again later",
                    retry_after_s=_retry_s(self._wait_s(self.num_waiting)),
                ) from None
            raise
        finally:
            self._remove(tenant, waiter)

    def _fill(self) -> None:
        """Give free slots to waiting requests."""
        while self._waiting and self.num_running < self._shares.limit:
            tenant = min(self._waiting, key=lambda name: (self._shares.running[name], self._served_at[name]))
            waiter = self._waiting[tenant][0]
            self._served_at[tenant] = next(self._numbers)
            self._remove(tenant, waiter)
            if not waiter.granted.done():
                waiter.granted.set_result(self._take(tenant))

    def _take(self, tenant: str) -> RunningSlot:
        self.num_running += 1
        self._shares.begin(tenant)
        return RunningSlot(self, tenant)

    def _remove(self, tenant: str, waiter: _Waiter) -> None:
        queue = self._waiting.get(tenant, [])
        if waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[tenant], self._served_at[tenant]

    def _num_before(self, tenant: str, num_ahead: int) -> int:
        """Return how many waiting requests go before one that has `num_ahead` of its own tenant before it."""
        others = (len(queue) for name, queue in self._waiting.items() if name != tenant)
        return num_ahead + sum(min(length, num_ahead + 1) for length in others)

    def _wait_s(self, num_before: int) -> float:
        """Return the predicted wait behind `num_before` waiting requests, while all slots are taken."""
        limit = self._limit.value
        return (num_before + 1) * self._speeds.running_s(self._limit.streams_per_target(limit)) / limit


def _retry_s(wait_s: float) -> float:
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
