"""Calls of sessions behave alike in every engine: joined, repeated, superseded, released and waiting."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draft_service.proposer import Proposer
from specdec.contract.engine_api import DraftEngine, TargetEngine
from specdec.contract.errors import KvMiss, ResourceExhausted, StaleEpoch, Unavailable
from specdec.contract.types import ProposeRequest, SessionPosition, VerifyRequest
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.schedule.scheduler import Scheduler
from specdec.engine.sessions.table import DEFAULT_PIN_TTL_S, MAX_ANSWERS
from specdec.engine.simulated.device import ModelledTime
from specdec.engine.simulated.engines import SimulatedDraft, SimulatedTarget
from specdec.engine.simulated.simulated_pair import PRESETS
from target_service.verifier import Verifier
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

TOKENS = [3 + index * 7 % 20 for index in range(200)]
NO_TOKENS = np.empty(0, dtype=np.uint32)
MAX_STEP_TOKENS = 32
AT_ONCE = replace(PRESETS["70b-1b"], target=ModelledTime(0.0, 0.0), draft=ModelledTime(0.0, 0.0), predrafts=False)
PATIENCE_S = 60.0


class _HeldSteps:
    """Observes every simulated step at its start, and blocks it while the gate is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def observe_step(self, *, num_sequences: int, num_tokens: int, seconds: float) -> None:
        self.entered.release()
        self.gate.wait()

    def observe_queue(self, seconds: float) -> None:
        """Only steps are observed."""


class EngineRig:
    """An engine of either role; a test can block its steps and advance its clock."""

    def __init__(self, kind: str, num_blocks: int) -> None:
        self._passed_s = 0.0
        self._held: Any
        self.engine: Any
        if kind.startswith("simulated"):
            self._held = _HeldSteps()
            simulated = SimulatedDraft if kind.endswith("draft") else SimulatedTarget
            self.engine = simulated(
                AT_ONCE,
                max_gamma=16,
                scheduler=Scheduler(MAX_STEP_TOKENS),
                observer=self._held,
                num_kv_blocks=num_blocks,
                clock=self._now_s,
            )
        else:
            self._held = TableWorker(num_blocks=num_blocks)
            real = Proposer if kind.endswith("draft") else Verifier
            self.engine = real(self._held, ReplicaOptions(max_step_tokens=MAX_STEP_TOKENS), clock=self._now_s)

    def _now_s(self) -> float:
        return time.monotonic() + self._passed_s

    def pass_time(self, seconds: float) -> None:
        self._passed_s += seconds

    async def ask(self, position: SessionPosition) -> Any:
        if isinstance(self.engine, Proposer | SimulatedDraft):
            return await self.engine.propose(ProposeRequest(position, 1))
        return await self.engine.verify(VerifyRequest(position, NO_TOKENS, ()))

    async def start(self, position: SessionPosition) -> asyncio.Task[Any]:
        """Start a call whose step is then blocked."""
        self._held.gate.clear()
        task = asyncio.create_task(self.ask(position))
        assert await asyncio.to_thread(self._held.entered.acquire, True, PATIENCE_S)
        return task

    async def queue(self, position: SessionPosition) -> asyncio.Task[Any]:
        """Start a call while a step is blocked."""
        task = asyncio.create_task(self.ask(position))
        await asyncio.sleep(0)
        return task

    def let_go(self) -> None:
        self._held.gate.set()

    @property
    def num_steps(self) -> int:
        """Number of steps that the test has not waited for yet."""
        return int(self._held.entered._value)

    async def miss(self, session_id: str, num_tokens: int) -> None:
        """Fill `num_tokens` of a session with KV, which a miss then pins."""
        await self.ask(make_round(TOKENS[:num_tokens], session_id=session_id, round_id=1))
        other = [*TOKENS[: num_tokens - 1], 2, 2, 2]
        with pytest.raises(KvMiss):
            await self.ask(make_round(other, session_id=session_id, round_id=2, start=num_tokens))

    async def close(self) -> None:
        self.let_go()
        await self.engine.close()
        self.engine.check_integrity()


@pytest.fixture(params=["simulated draft", "simulated target", "real draft", "real target"])
async def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def rig(kind: str) -> AsyncIterator[EngineRig]:
    rig = EngineRig(kind, num_blocks=64)
    yield rig
    await rig.close()


@pytest.fixture
async def small(kind: str) -> AsyncIterator[EngineRig]:
    """Return an engine with KV for 64 tokens."""
    rig = EngineRig(kind, num_blocks=4)
    yield rig
    await rig.close()


async def test_an_engine_has_every_method_of_the_contract_as_declared(rig: EngineRig) -> None:
    contract = DraftEngine if rig.engine.info().role == "draft" else TargetEngine
    declared = [name for base in contract.__mro__ for name in vars(base) if not name.startswith("_")]
    assert {"warm_up", "release", "info", "is_stalled", "wait_ended", "close"} < set(declared)
    for name in declared:
        if name == "is_stalled":
            assert rig.engine.is_stalled is False
            continue
        ours, theirs = getattr(type(rig.engine), name), getattr(contract, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)


async def test_the_same_call_joins_the_one_in_flight(rig: EngineRig) -> None:
    position = make_round(TOKENS[:20], round_id=1)
    first = await rig.start(position)
    second = await rig.queue(position)
    rig.let_go()
    assert await first is await second
    assert rig.num_steps == 0


async def test_cancelling_one_of_two_joined_calls_leaves_the_other(rig: EngineRig) -> None:
    position = make_round(TOKENS[:20], round_id=1)
    first = await rig.start(position)
    second = await rig.queue(position)
    first.cancel()
    rig.let_go()
    assert (await second).kv_len == 20
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_an_answered_call_is_repeated_from_the_store(rig: EngineRig) -> None:
    position = make_round(TOKENS[:20], round_id=1)
    first = await rig.ask(position)
    num_steps = rig.num_steps
    assert await rig.ask(position) is first
    assert rig.num_steps == num_steps


@pytest.mark.parametrize("key", [{"epoch": 1, "round_id": 2}, {"epoch": 2, "round_id": 0}])
async def test_a_newer_call_supersedes_the_one_in_flight(rig: EngineRig, key: dict[str, int]) -> None:
    first = await rig.start(make_round(TOKENS[:90], round_id=1))
    second = await rig.queue(make_round(TOKENS[:91], **key))
    rig.let_go()
    with pytest.raises(StaleEpoch):
        await first
    assert (await second).kv_len == 91


async def test_a_call_of_the_same_round_with_another_request_supersedes(rig: EngineRig) -> None:
    first = await rig.start(make_round(TOKENS[:90], round_id=1))
    second = await rig.queue(make_round(TOKENS[:91], round_id=1))
    rig.let_go()
    with pytest.raises(StaleEpoch):
        await first
    assert (await second).kv_len == 91


async def test_an_answer_is_not_repeated_to_another_request_of_its_round(rig: EngineRig) -> None:
    await rig.ask(make_round(TOKENS[:20], round_id=1))
    assert (await rig.ask(make_round(TOKENS[:21], round_id=1))).kv_len == 21


async def test_an_older_call_is_refused(rig: EngineRig) -> None:
    first = await rig.start(make_round(TOKENS[:20], round_id=5))
    late = await rig.queue(make_round(TOKENS[:19], round_id=4))
    rig.let_go()
    with pytest.raises(StaleEpoch):
        await late
    await first


async def test_a_call_in_flight_on_a_released_session_misses_and_may_be_sent_again(rig: EngineRig) -> None:
    position = make_round(TOKENS[:90], round_id=1)
    first = await rig.start(position)
    release = asyncio.create_task(rig.engine.release(["s", "unknown"]))
    await asyncio.sleep(0)
    rig.let_go()
    await release
    with pytest.raises(KvMiss) as miss:
        await first
    assert miss.value.have == 0
    assert rig.engine.info().num_sessions == 0
    again = await rig.ask(position)
    assert (again.kv_len, again.num_cached_tokens) == (90, 0)


async def test_the_newest_answers_are_repeated_and_older_ones_computed_again(kind: str) -> None:
    rig = EngineRig(kind, num_blocks=MAX_ANSWERS + 8)
    positions = [make_round(TOKENS[:3], session_id=f"s{index}") for index in range(MAX_ANSWERS + 1)]
    answers = [await rig.ask(position) for position in positions]
    for index in (MAX_ANSWERS, 1):
        assert await rig.ask(positions[index]) is answers[index]
    assert await rig.ask(positions[0]) is not answers[0]
    await rig.close()


async def test_a_session_larger_than_the_pool_is_refused_with_the_reason(small: EngineRig) -> None:
    with pytest.raises(ResourceExhausted) as refusal:
        await small.ask(make_round(TOKENS[:65]))
    assert refusal.value.reason == "KV_EXHAUSTED"
    assert small.engine.stats().num_held_kv_blocks == 0


async def test_a_call_waits_for_the_blocks_of_one_that_runs(small: EngineRig) -> None:
    first = await small.start(make_round(TOKENS[:50], session_id="a"))
    second = await small.queue(make_round([9, *TOKENS[:40]], session_id="b"))
    small.let_go()
    assert (await first).kv_len == 50
    assert (await second).kv_len == 41


async def test_a_resend_ends_the_wait_for_its_pin(small: EngineRig) -> None:
    await small.miss("a", 50)
    waiting = await small.queue(make_round([9, *TOKENS[:40]], session_id="b"))
    await small.engine.release([])  # after this the engine has seen the call
    assert not waiting.done()
    again = await small.ask(make_round([*TOKENS[:49], 2, 2, 2], session_id="a", round_id=2, start=32))
    assert again.kv_len == 52
    assert (await waiting).kv_len == 41


async def test_a_call_that_only_pins_block_waits_for_their_end(small: EngineRig) -> None:
    await small.miss("a", 50)
    small.pass_time(DEFAULT_PIN_TTL_S - 0.3)
    # Only the end of the pin wakes the engine.
    answer = await asyncio.wait_for(small.ask(make_round([9, *TOKENS[:40]], session_id="b")), PATIENCE_S)
    assert answer.kv_len == 41


async def test_a_call_cancelled_while_waiting_for_blocks_reserves_none(small: EngineRig) -> None:
    first = await small.start(make_round(TOKENS[:50], session_id="a"))
    waiting = await small.queue(make_round([9, *TOKENS[:40]], session_id="b"))
    waiting.cancel()
    third = await small.queue(make_round([8, *TOKENS[:30]], session_id="c"))
    small.let_go()
    assert (await third).kv_len == 31
    await first
    assert waiting.cancelled()
    assert small.num_steps == 2  # the second step of the first call, and the step of the third call


async def test_closing_finishes_calls_that_wait_for_blocks_and_refuses_new_ones(small: EngineRig) -> None:
    first = await small.start(make_round(TOKENS[:50], session_id="a"))
    second = await small.queue(make_round([9, *TOKENS[:40]], session_id="b"))
    closing = asyncio.create_task(small.engine.close())
    await asyncio.sleep(0)
    assert small.engine.info().draining
    with pytest.raises(Unavailable) as refusal:
        await small.ask(make_round(TOKENS[:5], session_id="c"))
    assert refusal.value.reason == "DRAINING"
    small.let_go()
    assert ((await first).kv_len, (await second).kv_len) == (50, 41)
    await closing
    await small.engine.wait_ended()
    assert small.engine.stats().num_held_kv_blocks == 0
