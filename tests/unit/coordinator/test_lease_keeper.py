"""Renewal of leases, on a clock that tests set and against a store that records renewals."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.generation.session_leases import MAX_BATCH, LeaseKeeper
from specdec.contract.errors import LeaseLost, SpecdecError, Unavailable
from specdec.state.redis_store import open_store
from specdec.state.store import Lease, SessionStore
from tests.support.coordinator_rig import eventually

#: The keeper checks six times in this time by the machine's clock; a renewal is due after a third by the set clock.
TTL_S = 0.3
THIRD_S = TTL_S / 3
SEVERAL_LOOKS_S = TTL_S


class Clock:
    def __init__(self) -> None:
        self.now = 128.0
        self.num_asked = 0

    def __call__(self) -> float:
        self.num_asked += 1
        return self.now


def keeper_threads() -> set[threading.Thread]:
    """Return the running threads of keepers. A thread that waits for its store may outlive its test."""
    return {thread for thread in threading.enumerate() if thread.name == "lease keeper"}


class NotedStore:
    """A session store that records which sessions are renewed together, and that tests may let fail or block."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self.renewed: list[list[str]] = []
        self.errors: dict[str, SpecdecError] = {}
        """Errors of renewals, by session id."""
        self.gate: threading.Event | None = None
        self.num_asked = 0
        self.num_closed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def reopen(self) -> NotedStore:
        return self

    async def renew_all(self, leases: Sequence[Lease]) -> list[SpecdecError | None]:
        self.num_asked += 1
        if self.gate is not None:
            await asyncio.to_thread(self.gate.wait, 30)
        self.renewed.append([lease.session_id for lease in leases])
        return [self.errors.get(lease.session_id) for lease in leases]

    async def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("coordinator.generation.session_leases.time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
async def store(clock: Clock) -> AsyncIterator[NotedStore]:
    real = open_store("memory://")
    yield NotedStore(real)
    await real.close()


@pytest.fixture
async def keeper(store: NotedStore) -> AsyncIterator[LeaseKeeper]:
    keeper = LeaseKeeper(store)  # type: ignore[arg-type]
    yield keeper
    await keeper.close()


def lease(session_id: str = "s") -> Lease:
    return Lease(session_id, "us", 1, TTL_S)


async def renewals(store: NotedStore, num_times: int) -> list[list[str]]:
    """Return all batches, after at least `num_times` were sent and several checks have added none."""
    async with asyncio.timeout(20):
        await eventually(lambda: len(store.renewed) >= num_times)
    await asyncio.sleep(SEVERAL_LOOKS_S)
    return store.renewed


async def test_a_lease_is_renewed_after_each_third_of_its_life_and_not_earlier(
    clock: Clock, store: NotedStore, keeper: LeaseKeeper
) -> None:
    keeper.keep(lease())
    clock.now += THIRD_S * 0.99
    assert await renewals(store, 0) == []
    clock.now += THIRD_S * 0.02
    assert await renewals(store, 1) == [["s"]]
    clock.now += THIRD_S * 0.99
    assert await renewals(store, 1) == [["s"]]
    clock.now += THIRD_S * 0.02
    assert await renewals(store, 2) == [["s"]] * 2


async def test_a_lease_that_is_due_exactly_now_is_renewed(clock: Clock, store: NotedStore, keeper: LeaseKeeper) -> None:
    keeper.keep(Lease("s", "us", 1, 0.375))
    clock.now += 0.125
    assert await renewals(store, 1) == [["s"]]


async def test_leases_are_checked_several_times_in_their_life(clock: Clock, keeper: LeaseKeeper) -> None:
    keeper.keep(lease())
    async with asyncio.timeout(60 * TTL_S):  # a twentieth of that is enough
        await eventually(lambda: clock.num_asked > 60)


async def test_each_lease_is_renewed_on_its_own_schedule_and_a_dropped_one_never(
    clock: Clock, store: NotedStore, keeper: LeaseKeeper
) -> None:
    first = lease("first")
    keeper.keep(first)
    clock.now += THIRD_S / 2
    keeper.keep(lease("second"))
    assert keeper.num_kept == 2
    clock.now += THIRD_S * 0.6
    assert await renewals(store, 1) == [["first"]]
    keeper.drop(first)
    keeper.drop(first)
    assert keeper.num_kept == 1
    clock.now += THIRD_S * 3
    assert await renewals(store, 2) == [["first"], ["second"]]


async def test_the_later_lease_of_a_session_is_kept_when_the_earlier_one_is_dropped(
    clock: Clock, store: NotedStore, keeper: LeaseKeeper
) -> None:
    earlier, later = lease(), lease()
    keeper.keep(earlier)
    keeper.keep(later)
    keeper.drop(earlier)
    assert keeper.num_kept == 1
    keeper.drop(later)
    assert keeper.num_kept == 0


async def test_a_lost_lease_is_dropped_and_a_failed_renewal_is_repeated_at_the_next_check(
    clock: Clock, store: NotedStore, keeper: LeaseKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    store.errors = {"lost": LeaseLost("taken"), "failed": Unavailable("the store is gone")}
    for session_id in ("lost", "failed", "kept"):
        keeper.keep(lease(session_id))
    clock.now += THIRD_S * 1.5
    batches = await renewals(store, 3)
    assert batches[0] == ["lost", "failed", "kept"]
    assert all(batch == ["failed"] for batch in batches[1:])
    assert keeper.num_kept == 2
    assert caplog.messages == ["lease lost: tenant=default session=lost: taken"]


async def test_a_lease_released_during_its_renewal_is_not_reported_lost_and_its_successor_is_kept(
    clock: Clock, store: NotedStore, keeper: LeaseKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    store.errors = {"s": LeaseLost("given back"), "t": LeaseLost("given back")}
    given_back, successor, other = lease("s"), lease("s"), lease("t")
    keeper.keep(given_back)
    keeper.keep(other)
    store.gate = threading.Event()
    clock.now += THIRD_S * 1.5
    await eventually(lambda: store.num_asked == 1)
    for held in (given_back, other):
        keeper.drop(held)
    keeper.keep(successor)
    store.gate.set()
    await renewals(store, 1)
    assert keeper.num_kept == 1
    assert caplog.messages == []


async def test_leases_are_renewed_in_batches_of_limited_size(
    clock: Clock, store: NotedStore, keeper: LeaseKeeper
) -> None:
    names = [f"s{index}" for index in range(2 * MAX_BATCH + 1)]
    for name in names:
        keeper.keep(lease(name))
    clock.now += THIRD_S * 1.5
    assert await renewals(store, 3) == [names[:MAX_BATCH], names[MAX_BATCH : 2 * MAX_BATCH], names[2 * MAX_BATCH :]]


async def test_leases_of_a_hung_loop_are_not_renewed_until_it_turns_again(clock: Clock, store: NotedStore) -> None:
    keeper = LeaseKeeper(store, loop_timeout_s=8.0)  # type: ignore[arg-type]
    keeper.keep(lease())
    await asyncio.sleep(SEVERAL_LOOKS_S)
    clock.now += 8.0
    began_s = time.monotonic()
    while not store.renewed and time.monotonic() - began_s < 20:
        time.sleep(0.01)  # noqa: ASYNC251  the loop hangs
    assert store.renewed == [["s"]]
    clock.now += 8.5
    time.sleep(SEVERAL_LOOKS_S)  # noqa: ASYNC251
    assert store.renewed == [["s"]]
    assert await renewals(store, 2) == [["s"]] * 2
    await keeper.close()


async def test_closing_ends_the_thread_and_closes_its_store_and_the_keeper_can_be_used_again(
    clock: Clock, store: NotedStore, keeper: LeaseKeeper
) -> None:
    before, others = threading.active_count(), keeper_threads()
    await keeper.close()
    for num_closed in (1, 2):
        keeper.keep(lease())
        keeper.keep(lease("t"))
        (thread,) = keeper_threads() - others
        assert thread.daemon
        clock.now += THIRD_S * 1.5
        assert await renewals(store, num_closed) == [["s", "t"]] * num_closed
        for _ in range(2):
            await keeper.close()
        assert store.num_closed == num_closed
        assert not thread.is_alive()
    assert threading.active_count() <= before + 1  # the thread of `to_thread`


async def test_a_keeper_whose_store_does_not_answer_can_be_closed(
    clock: Clock, store: NotedStore, keeper: LeaseKeeper
) -> None:
    keeper.keep(lease())
    store.gate = threading.Event()
    clock.now += THIRD_S * 1.5
    await eventually(lambda: store.num_asked == 1)
    await asyncio.wait_for(keeper.close(), 15)
    assert store.renewed == []
    store.gate.set()


def test_a_keeper_whose_loop_is_closed_first_ends_without_an_error(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", complaints.append)
    store = NotedStore(open_store("memory://"))

    async def keep() -> threading.Thread:
        others = keeper_threads()
        LeaseKeeper(store).keep(lease())  # type: ignore[arg-type]
        (thread,) = keeper_threads() - others
        return thread

    thread = asyncio.run(keep())
    thread.join(20)
    assert not thread.is_alive()
    assert complaints == []
    assert store.num_closed == 1


async def test_an_error_in_the_thread_of_a_live_loop_is_reported(
    clock: Clock, store: NotedStore, keeper: LeaseKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", complaints.append)
    store.errors = SimpleNamespace(get=_fail)  # type: ignore[assignment]
    keeper.keep(lease())
    clock.now += THIRD_S * 1.5
    async with asyncio.timeout(20):
        await eventually(lambda: bool(complaints))
    assert str(complaints[0].exc_value) == "a fault"


def _fail(session_id: str) -> None:
    raise RuntimeError("a fault")
