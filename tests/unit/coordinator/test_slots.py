"""The queue before generation: order, fairness among tenants, deadlines, and the limit that follows measured speeds."""

from __future__ import annotations

import asyncio
import time

import pytest

from coordinator.admission.slot_request import SlotRequest
from coordinator.admission.slots import MAX_RESUMED, RunningSlot, RunningSlots
from coordinator.admission.speeds import BASE_STREAMS, RunningLimit, StreamSpeeds
from specdec.contract.errors import ResourceExhausted, Unavailable
from specdec.contract.tenant import SessionKey

NUM_TOKENS = 100


def asked(tenant: str = "a", session_id: str = "s", *, within_s: float | None = None, **fields: object) -> SlotRequest:
    deadline_s = None if within_s is None else time.monotonic() + within_s
    return SlotRequest(SessionKey(tenant, session_id), NUM_TOKENS, deadline_s=deadline_s, **fields)  # type: ignore[arg-type]


def slots_of(max_running: int | None, *, max_queue: int = 1000, max_wait_s: float = 1e6) -> RunningSlots:
    return RunningSlots(lambda: 1, max_queue=max_queue, max_running=max_running, max_wait_s=max_wait_s)


async def queued(slots: RunningSlots, request: SlotRequest) -> asyncio.Task[RunningSlot]:
    """Return the task of a request that waits."""
    task = asyncio.create_task(slots.acquire(request))
    await settled()
    return task


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def with_known_speed(slots: RunningSlots, token_s: float) -> None:
    """Let the queue see eight requests, each of `NUM_TOKENS` tokens, at this speed."""
    for _ in range(8):
        slot = await slots.acquire(asked(is_resumption=True))
        slots.note_chunk("a", 1, None, token_s)
        slots.note_chunk("a", NUM_TOKENS - 1, (NUM_TOKENS - 1) * token_s, 0.0)
        slots.note_released(slot.tenant, NUM_TOKENS, NUM_TOKENS * token_s)


async def test_waiting_requests_start_by_priority_then_next_turns_then_arrival() -> None:
    slots = slots_of(1)
    running = await slots.acquire(asked())
    tasks = {
        "late": await queued(slots, asked(priority=1)),
        "first": await queued(slots, asked()),
        "second": await queued(slots, asked()),
        "next turn": await queued(slots, asked(is_next_turn=True)),
        "urgent": await queued(slots, asked(priority=-1)),
    }
    order = []
    while tasks:
        running.release()
        await settled()
        (name,) = [name for name, task in tasks.items() if task.done()]
        order.append(name)
        running = tasks.pop(name).result()
    assert order == ["urgent", "next turn", "first", "second", "late"]


async def test_a_free_slot_goes_to_the_tenant_that_runs_the_fewest_requests() -> None:
    slots = slots_of(4)
    flood = [await slots.acquire(asked("flood")) for _ in range(4)]
    waiting = [await queued(slots, asked("flood", priority=-9)) for _ in range(4)]
    first = await slots.acquire(asked("other"))  # the first request of a tenant does not wait
    second = await queued(slots, asked("other"))
    assert not second.done()
    flood[0].release()
    flood[1].release()
    await settled()
    assert second.done()
    assert not any(task.done() for task in waiting)
    first.release()
    second.result().release()
    for slot in flood[2:]:
        slot.release()
    await settled()
    assert all(task.done() for task in waiting)


async def slots_that_slow_down() -> RunningSlots:
    """Return 8 slots of which a token takes 1 s alone and with two streams, and 2 s with more."""
    slots = slots_of(8)
    for num_streams, token_s in ((1, 1.0), (2, 1.0), (4, 2.0), (8, 2.0)):
        running = [await slots.acquire(asked()) for _ in range(num_streams)]
        slots.note_chunk("a", 10, 10 * token_s, 0.0)
        for slot in running:
            slot.release()
    return slots


async def test_a_flood_gets_few_slots_and_few_turns_while_another_tenant_has_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = await slots_that_slow_down()
    monkeypatch.setattr("coordinator.admission.shares.PRESENT_S", 0.2)
    await asyncio.sleep(0.25)  # tenant "a" is gone
    flood = [await slots.acquire(asked("flood")) for _ in range(8)]
    waiting = [await queued(slots, asked("flood")) for _ in range(8)]
    for slot in flood:  # alone, its rounds take no turns
        await slot.begin_round()

    one = await slots.acquire(asked("one"))
    for slot in flood:
        slot.end_round()
    await one.begin_round()
    rounds = [asyncio.create_task(slot.begin_round()) for slot in flood]
    await settled()
    assert [task.done() for task in rounds] == [True] + 7 * [False]  # one stream each, as two are not slow
    flood[0].end_round()
    await settled()
    assert [task.done() for task in rounds] == 2 * [True] + 6 * [False]

    for slot in flood[2:]:
        slot.release()
    one.end_round()
    one.release()
    await settled()
    assert not any(task.done() for task in waiting)  # the next request of the one stream may come at once
    one = await slots.acquire(asked("one"))
    one.release()
    await asyncio.sleep(0.25)
    flood[0].release()
    await settled()
    assert all(task.done() for task in waiting[:7])
    for task in rounds[2:]:
        task.cancel()


async def test_the_running_limit_holds_and_every_slot_comes_back() -> None:
    slots = slots_of(3)
    most = 0

    async def use(index: int) -> None:
        nonlocal most
        slot = await slots.acquire(asked(f"t{index % 2}"))
        most = max(most, slots.num_running)
        await asyncio.sleep(0)
        slot.release()
        slot.release()

    await asyncio.gather(*(use(index) for index in range(40)))
    assert most == 3
    assert (slots.num_running, slots.num_waiting) == (0, 0)


async def test_a_cancelled_request_leaves_the_queue_and_keeps_no_slot() -> None:
    slots = slots_of(1)
    running = await slots.acquire(asked())
    waiting, granted = await queued(slots, asked()), await queued(slots, asked())
    waiting.cancel()
    await settled()
    assert slots.num_waiting == 1
    running.release()
    granted.cancel()  # after the slot was given to it, before it could take it
    await asyncio.wait([waiting, granted])
    assert granted.cancelled()
    assert (slots.num_running, slots.num_waiting) == (0, 0)


async def test_a_request_that_would_end_after_its_deadline_is_refused_and_told_when_to_retry() -> None:
    slots = slots_of(2)
    await with_known_speed(slots, token_s=1.0)  # a request takes 100 s
    running = [await slots.acquire(asked(within_s=1.0)) for _ in range(2)]  # no request waits: it may try
    with pytest.raises(ResourceExhausted) as refused:
        await slots.acquire(asked(within_s=200.0))
    assert refused.value.reason == "QUEUE_FULL"
    assert refused.value.retry_after_s == pytest.approx(50.0, rel=0.2)
    assert not (await queued(slots, asked(within_s=400.0))).done()
    with pytest.raises(ResourceExhausted):  # another request waits before this one now
        await slots.acquire(asked(within_s=260.0))
    assert not (await queued(slots, asked())).done()
    slots.close(lambda: Unavailable("end"))
    for slot in running:
        slot.release()


async def test_a_waiting_request_is_refused_when_its_deadline_comes_too_near() -> None:
    slots = slots_of(1)
    await slots.acquire(asked())
    with pytest.raises(ResourceExhausted) as refused:
        await slots.acquire(asked(within_s=0.05))
    assert refused.value.retry_after_s is not None
    assert slots.num_waiting == 0


async def test_a_request_without_a_deadline_is_refused_where_several_wait_too_long_for_each_slot() -> None:
    slots = slots_of(2, max_wait_s=10.0)
    await with_known_speed(slots, token_s=1.0)
    for _ in range(2):
        await slots.acquire(asked())
    tasks = [await queued(slots, asked()) for _ in range(2)]
    assert not any(task.done() for task in tasks)
    with pytest.raises(ResourceExhausted, match="--max-wait-s"):
        await slots.acquire(asked())
    resumed = await slots.acquire(asked(is_resumption=True))
    resumed.release()
    slots.close(lambda: Unavailable("end"))
    assert all(isinstance(error, Unavailable) for error in await asyncio.gather(*tasks, return_exceptions=True))
    with pytest.raises(Unavailable):
        await slots.acquire(asked())


async def make_tokens(running: list[RunningSlot], token_s: float) -> None:
    """Let the queue see a window of chunks of the running requests, at this speed."""
    for slot in running:
        if not slot.is_handed_on:
            slot.hand_on()
            slot.note_chunk(1, None)
    for _ in range(64 // len(running) + 1):
        for slot in running:
            slot.note_chunk(1, token_s)
    await settled()


async def test_an_idle_system_takes_a_batch_and_refuses_only_what_would_wait_too_long_once_its_speed_is_known() -> None:
    slots = slots_of(2, max_wait_s=60.0)
    running = [await slots.acquire(asked(min_new_tokens=NUM_TOKENS)) for _ in range(2)]
    waiting = [await queued(slots, asked(min_new_tokens=NUM_TOKENS)) for _ in range(10)]
    hurried = await queued(slots, asked(within_s=30.0, min_new_tokens=NUM_TOKENS))
    assert slots.num_waiting == 11  # nothing is known yet
    await make_tokens(running, token_s=0.2)  # a request takes 20 s, and those that run have 13 s left
    refused = [task for task in waiting if task.done()]
    assert refused == waiting[5:]
    for task in refused:
        error = task.exception()
        assert isinstance(error, ResourceExhausted)
        assert (error.reason, "--max-wait-s" in error.message) == ("QUEUE_FULL", True)
        assert error.retry_after_s is not None
        assert error.retry_after_s > 50.0
    assert isinstance(hurried.exception(), ResourceExhausted)
    with pytest.raises(ResourceExhausted, match="--max-wait-s"):
        await slots.acquire(asked())
    slots.close(lambda: Unavailable("end"))
    await asyncio.wait(waiting)


async def test_long_outputs_that_run_count_in_the_wait_although_earlier_ones_were_short() -> None:
    slots = slots_of(1, max_wait_s=60.0)
    await with_known_speed(slots, token_s=0.1)  # a request took 10 s
    (await slots.acquire(asked())).release()
    long = await slots.acquire(SlotRequest(SessionKey("a", "long"), 1000, min_new_tokens=1000))
    first = await queued(slots, asked())  # one may wait for each slot
    with pytest.raises(ResourceExhausted, match=r"wait 1\d\d\.\d s"):
        await slots.acquire(asked())
    long.release()
    await asyncio.wait([first])


async def test_requests_that_wait_for_kv_blocks_do_not_raise_the_limit() -> None:
    slots = slots_of(None)
    running = [await slots.acquire(asked()) for _ in range(BASE_STREAMS)]
    waiting = [await queued(slots, asked()) for _ in range(100)]
    for slot in running[8:]:
        slot.hand_on()  # its generation has no token yet
    for _ in range(10):
        await make_tokens(running[:8], token_s=0.01)
    assert slots.num_running == BASE_STREAMS
    slots.close(lambda: Unavailable("end"))
    await asyncio.wait(waiting)


async def test_resumptions_run_beyond_the_limit_up_to_a_bound_and_then_wait_first() -> None:
    slots = slots_of(2)
    running = [await slots.acquire(asked(is_resumption=True)) for _ in range(2 * MAX_RESUMED)]
    urgent, resumed = await queued(slots, asked(priority=-1)), await queued(slots, asked(is_resumption=True))
    for slot in running[: 2 * MAX_RESUMED - 1]:
        slot.release()
    await settled()
    assert resumed.done()
    assert not urgent.done()
    urgent.cancel()


async def test_the_waiting_requests_of_a_deleted_session_are_refused() -> None:
    slots = slots_of(1)
    await slots.acquire(asked())
    gone, other = await queued(slots, asked(session_id="gone")), await queued(slots, asked(session_id="other"))
    slots.withdraw(SessionKey("a", "gone"), lambda: Unavailable("deleted"))
    await asyncio.wait([gone])
    assert isinstance(gone.exception(), Unavailable)
    assert not other.done()
    other.cancel()


@pytest.mark.parametrize(
    ("slope", "is_wanted", "low", "high"),
    [
        (0.0, True, 300, 10**9),  # more streams cost nothing
        (0.0, False, BASE_STREAMS, BASE_STREAMS),  # no request needs another slot
        (0.1, True, BASE_STREAMS, 20),
        (0.05, True, 25, 36),  # beyond 36, ten percent more streams make less than one percent more tokens
    ],
)
def test_the_limit_rises_only_while_more_streams_make_more_tokens_per_second(
    slope: float, is_wanted: bool, low: int, high: int
) -> None:
    """`slope`: share by which each stream beyond the base makes a token take longer."""
    limit = RunningLimit(StreamSpeeds(), lambda: 1)
    for _ in range(10_000):
        num_streams = limit.value
        if is_wanted:
            limit.note_wanted()
        token_s = 0.01 * (1.0 + slope * max(0, num_streams - BASE_STREAMS))
        limit.note_chunk(2, 2 * token_s, num_streams)
    assert low <= limit.value <= high


def test_the_shared_limit_keeps_half_of_the_speed_of_a_stream_alone() -> None:
    speeds = StreamSpeeds()
    limit = RunningLimit(speeds, lambda: 2)
    assert limit.shared_value == limit.value == 2 * BASE_STREAMS
    for num_streams, token_s in ((1, 0.01), (2, 0.012), (4, 0.016), (8, 0.025), (16, 0.05)):
        speeds.note_chunk(10, 10 * token_s, num_streams)
    assert limit.shared_value == 2 * 4
