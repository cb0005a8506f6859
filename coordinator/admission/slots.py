"""The queue before generation: a limited number of requests run, and the others wait for a slot or are refused.

A request is refused at once if it could not end before its deadline, so that it does not fail in the middle of its
output, or if the queue before it would last too long. While the number of slots still rises, neither is known: the
requests that come meanwhile wait, and are judged once it does not (`RunningLimit.is_settled`). `generation_service`
takes a slot for each request and gives it back when the generation ends. `waiting` has the order of the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import islice

from coordinator.admission.shares import RoundTurns, TenantShares
from coordinator.admission.slot_request import QueueState, SlotRequest, refusal
from coordinator.admission.speeds import OutputLength, RunningLimit, StreamSpeeds
from coordinator.admission.waiting import WaitingRequest, WaitingRequests
from specdec.contract.errors import ResourceExhausted, SpecdecError
from specdec.contract.tenant import SessionKey

#: Factor on predicted times before they are compared with a deadline.
CAUTION = 1.5

#: Time after a request found no slot in which free slots are given only to requests that meet their deadlines.
LOADED_S = 5.0

#: Requests that may wait for each slot, however long that takes. So two clients for each slot are not refused.
WAITING_PER_SLOT = 1

#: Resumed requests may exceed the slot limit by this factor, so streams of a lost coordinator need not wait. Beyond it
#: they wait before all other requests of their tenant.
MAX_RESUMED = 2


class RunningSlot:
    """The right of one request to run. It must be released."""

    def __init__(self, slots: RunningSlots, tenant: str, length: OutputLength) -> None:
        self.tenant = tenant
        self.length = length
        self.num_made_tokens = 0
        """Output tokens since it took the slot."""
        self._slots = slots
        self._began_s = time.monotonic()
        self._num_tokens: int | None = None
        self._is_released = False
        self._has_started = False
        self._turn_began_s: float | None = None
        self.is_handed_on = False
        """True once a generation releases the slot."""
        self.when_released: Callable[[], None] = lambda: None
        """Called once, when the slot is free."""

    def hand_on(self) -> None:
        """Note that a generation uses the slot from now on, and releases it."""
        self.is_handed_on = True
        self._slots.num_starting += 1

    @property
    def may_run_ahead(self) -> bool:
        """True if the request's rounds need not wait for those of other tenants."""
        return self._slots.turns.is_free(self.tenant)

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
        if since_last_s is None:
            self._note_started()
        self.num_made_tokens += num_tokens
        self._slots.note_chunk(self.tenant, num_tokens, since_last_s, time.monotonic() - self._began_s)

    def note_finished(self, num_tokens: int) -> None:
        """Note that the output is complete."""
        self._num_tokens = num_tokens

    def release(self) -> None:
        """Give the slot to the next request. Idempotent."""
        if not self._is_released:
            self._is_released = True
            self._note_started()
            running_s = time.monotonic() - self._began_s if self.is_handed_on else None
            self.when_released()
            self._slots.running.discard(self)
            self._slots.note_released(self.tenant, self._num_tokens, running_s)

    def _note_started(self) -> None:
        if self.is_handed_on and not self._has_started:
            self._has_started = True
            self._slots.num_starting -= 1


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
        num_reading: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            num_targets: returns the number of target replicas that take sessions.
            max_queue: requests that wait or run at once.
            max_running: requests that run at once; None: chosen from measured speeds.
            max_wait_s: predicted wait beyond which a request is refused once one waits for each slot.
            count_tokens: called with the tenant and the number of output tokens of each chunk.
            num_reading: returns the number of readers that no slot counts, such as replays; part of `max_queue`.
        """
        self._max_queue, self._max_wait_s = max_queue, max_wait_s
        self._count_tokens, self._num_reading = count_tokens, num_reading
        self._speeds = StreamSpeeds()
        self._limit = RunningLimit(self._speeds, num_targets, max_running)
        self.num_running = 0
        self.running: set[RunningSlot] = set()
        self.num_starting = 0
        """Number of generations without a token so far: they read their prompts, or wait for KV blocks."""
        self._waiting = WaitingRequests()
        self._shares = TenantShares(self._limit, self._waiting.tenants)
        self.turns = RoundTurns(self._shares.num_turns, lambda: self._shares.pause_share)
        self._has_unjudged = False
        """True if requests wait that came while the number of slots was not settled."""
        self._full_at_s = float("-inf")
        """Time at which a request last found no slot."""
        self._closed: Callable[[], SpecdecError] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def state(self) -> QueueState:
        """State for metrics; any thread may read it."""
        num_slots = self._limit.value
        is_full = self.num_running >= num_slots
        return QueueState(self.num_waiting, num_slots, self._queue_s() if is_full else 0.0)

    def num_of_tenant(self, tenant: str) -> int:
        """Return the number of requests of a tenant that run or wait."""
        return self._shares.running[tenant] + len(self._waiting.of_tenant(tenant))

    async def acquire(self, request: SlotRequest) -> RunningSlot:
        """Return a slot once one is free.

        Raises:
            ResourceExhausted: QUEUE_FULL; the request would wait too long, or could not end before its deadline.
            SpecdecError: what `close` or `withdraw` was given.
        """
        if self._closed is not None:
            raise self._closed()
        if self.num_running + self.num_waiting + self._num_reading() >= self._max_queue:
            raise refusal(
                f"the coordinator already has {self._max_queue} requests, its limit (--max-queue); try again later",
                self._queue_s(),
            )
        tenant, may_start = request.key.tenant, self._may_start(request.key.tenant)
        if not may_start:
            self._limit.note_wanted()
            self._full_at_s = time.monotonic()
        if request.is_resumption:
            may_start = self.num_running < MAX_RESUMED * self._limit.value
        elif not may_start or self._is_loaded():
            self._require_time(request, may_start=may_start)
        return self._take(tenant, request.length) if may_start else await self._wait(request)

    def withdraw(self, key: SessionKey, error: Callable[[], SpecdecError]) -> None:
        """Refuse the waiting requests of a session with the error that `error` makes."""
        for waiter in self._waiting.of_tenant(key.tenant):
            if waiter.request.key == key:
                waiter.refuse(error())

    def close(self, error: Callable[[], SpecdecError]) -> None:
        """Refuse all waiting requests, and all later ones, with the error that `error` makes."""
        self._closed = error
        for tenant in self._waiting.tenants:
            for waiter in self._waiting.of_tenant(tenant):
                waiter.refuse(error())

    def note_chunk(self, tenant: str, num_tokens: int, since_last_s: float | None, since_start_s: float) -> None:
        """Note new tokens of a running request."""
        self._count_tokens(tenant, num_tokens)
        if since_last_s is None:
            self._speeds.note_first_token(since_start_s)
            return
        before, num_streams = self._limit.value, self.num_running - self.num_starting
        if self._waiting:
            self._limit.note_wanted()
        if (shared := self._shares.shared_limit) is not None and num_streams > shared:
            if self._shares.num_turns(tenant) is not None or self._shares.pause_share:
                return  # rounds wait for turns, so their times say nothing about the speed of the target
            num_streams = shared
        self._limit.note_chunk(num_tokens, since_last_s, num_streams)
        if self._limit.value > before:
            self._fill()
        if self._has_unjudged and self._limit.is_settled:
            self._judge_waiting()

    def note_released(self, tenant: str, num_tokens: int | None, running_s: float | None) -> None:
        """Note a slot that its request gave back; `running_s` is None if no generation used it."""
        self.num_running -= 1
        self._shares.end(tenant)
        if running_s is not None:
            self._speeds.note_end(num_tokens, running_s)
        self._fill()
        self.turns.fill()

    def _is_loaded(self) -> bool:
        """Return whether the time to generate is to be predicted even if a slot is free.

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
        is_only = not (running[tenant] or tenant in self._waiting.tenants)
        has_room = self.num_running < self._limit.value + num_more or len(running) <= num_more
        return is_only and bool(running) and has_room

    def _require_time(self, request: SlotRequest, *, may_start: bool) -> None:
        """Check that a request that arrives has the time for its wait and its output. Raises ResourceExhausted."""
        wait_s, num_before = 0.0, 0
        if not may_start:
            waiting = self._waiting.of_tenant(request.key.tenant)
            num_before = sum(waiter.request.priority <= request.priority for waiter in waiting)
            waits_s = self._waiting.seconds_before(request.key.tenant, self._running_s)
            wait_s = self._wait_s(next(islice(waits_s, num_before, None)))
        refusal = self._late(request, wait_s)
        if refusal is None and self._limit.is_settled:
            refusal = self._long(request, wait_s, num_before)
        if refusal is not None:
            raise refusal

    def _judge_waiting(self) -> None:
        """Refuse requests that came while the number of slots was not settled, and that have not enough time."""
        self._has_unjudged = False
        for tenant in list(self._waiting.tenants):
            waits_s = list(self._waiting.seconds_before(tenant, self._running_s))
            for index, waiter in enumerate(self._waiting.of_tenant(tenant)):
                if not waiter.is_judged:
                    waiter.is_judged = True
                    wait_s = self._wait_s(waits_s[index])
                    refusal = self._late(waiter.request, wait_s) or self._long(waiter.request, wait_s, index)
                    if refusal is not None:
                        waiter.refuse(refusal)
                        self._waiting.remove(waiter)

    def _late(self, request: SlotRequest, wait_s: float) -> ResourceExhausted | None:
        """Return the refusal of a request that would end after its deadline; None for any other."""
        if request.deadline_s is None:
            return None
        generation_s = self._generation_s(request)
        needed_s, left_s = CAUTION * (wait_s + generation_s), request.deadline_s - time.monotonic()
        if needed_s <= left_s:
            return None
        return refusal(
            f"the request would probably end after its deadline: it would wait {wait_s:.1f} s and generate for "
            f"{generation_s:.1f} s, and {max(left_s, 0.0):.1f} s are left; try again later",
            max(wait_s, needed_s - left_s),
        )

    def _long(self, request: SlotRequest, wait_s: float, num_before: int) -> ResourceExhausted | None:
        """Return the refusal of a request that would wait for too long; None for any other.

        Args:
            request: the request.
            wait_s: its predicted wait.
            num_before: waiting requests of its tenant that go before it. Without one for each slot, it may wait.
        """
        num_tenants = len(self._waiting.tenants | {request.key.tenant})
        if wait_s <= self._max_wait_s or num_before < max(1, WAITING_PER_SLOT * self._shares.limit // num_tenants):
            return None
        return refusal(
            f"the request would probably wait {wait_s:.1f} s; the limit is {self._max_wait_s:g} s (--max-wait-s); try "
            "again later",
            wait_s,
        )

    async def _wait(self, request: SlotRequest) -> RunningSlot:
        waiter = self._waiting.add(request, is_judged=request.is_resumption or self._limit.is_settled)
        self._has_unjudged |= not waiter.is_judged
        until_s, granted = request.deadline_s, waiter.granted
        timeout_s = until_s and until_s - time.monotonic() - CAUTION * self._generation_s(request)
        try:
            async with asyncio.timeout(timeout_s):
                slot: RunningSlot = await granted
                return slot
        except BaseException as error:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result().release()
            if isinstance(error, TimeoutError):
                raise refusal(
                    "the request has waited so long that it would probably end after its deadline; try again later",
                    self._queue_s(),
                ) from None
            raise
        finally:
            self._waiting.remove(waiter)

    def _fill(self) -> None:
        """Give free slots to waiting requests."""
        while self._waiting and self.num_running < self._shares.limit:
            waiter: WaitingRequest = self._waiting.pop(self._shares.running)
            if not waiter.granted.done():
                waiter.granted.set_result(self._take(waiter.tenant, waiter.request.length))

    def _take(self, tenant: str, length: OutputLength) -> RunningSlot:
        self.num_running += 1
        self._shares.begin(tenant)
        slot = RunningSlot(self, tenant, length)
        self.running.add(slot)
        return slot

    def _generation_s(self, request: SlotRequest) -> float:
        """Return the predicted time to generate. 0 while nothing is known."""
        # Free slots are soon taken, so the speed is that of a full system, unless few of them are in use.
        limit = self._shares.limit
        num_streams = limit if self.num_running >= limit // 4 else self.num_running + 1
        return self._speeds.generation_s(request.length, self._limit.streams_per_target(num_streams)) or 0.0

    def _running_s(self, request: SlotRequest | RunningSlot) -> float:
        """Return the predicted time for which a request holds its slot in a full system."""
        return self._speeds.running_s(request.length, self._limit.streams_per_target(self._limit.value))

    def _queue_s(self) -> float:
        """Return the predicted wait behind all waiting requests."""
        return self._wait_s(sum(map(self._running_s, self._waiting.all())))

    def _wait_s(self, before_s: float) -> float:
        """Return the predicted wait behind requests that will hold slots for `before_s` in all."""
        limit, running = self._limit.value, list(self.running)
        # Requests that run began at different times: the next one ends after a part of its time, if no more is known.
        next_s = sum(map(self._running_s, running)) / max(1, len(running))
        num_left = sum(max(0, slot.length.least - slot.num_made_tokens) for slot in running)
        left_s = num_left * (self._speeds.token_s(self._limit.streams_per_target(limit)) or 0.0)
        return (max(next_s, left_s) + before_s) / limit
