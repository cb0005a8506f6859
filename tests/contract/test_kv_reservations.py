"""A turn that states its greatest length keeps its KV blocks until it ends, and only its first call is ever refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from draft_service.proposer import Proposer
from specdec.contract.engine_api import EndedTurn
from specdec.contract.errors import KvMiss, ResourceExhausted, StaleEpoch
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import ProposeRequest, Verification, VerifyRequest
from specdec.engine.loop.replica_engine import ReplicaEngine, ReplicaOptions
from specdec.engine.sessions.kv_queue import WaitLimits
from specdec.engine.sessions.table import DEFAULT_HOLD_S
from target_service.verifier import Verifier
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker, held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]

NO_TOKENS = np.empty(0, dtype=np.uint32)
PROMPT = [3 + index % 17 for index in range(20)]
NUM_BLOCKS = 8
PATIENCE_S = 60.0


class Replica:
    """A target of few blocks; a test can block its steps and advance its clock."""

    def __init__(self, limits: WaitLimits, num_blocks: int = NUM_BLOCKS, kv_reserve_tokens: int = 4096) -> None:
        self.worker = TableWorker(num_blocks=num_blocks)
        self._passed_s = 0.0
        self.verifier = Verifier(
            self.worker,
            # A prompt takes two steps.
            ReplicaOptions(wait_limits=limits, max_step_tokens=16, kv_reserve_tokens=kv_reserve_tokens),
            clock=lambda: time.monotonic() + self._passed_s,
        )

    def pass_time(self, seconds: float) -> None:
        self._passed_s += seconds

    async def verify(
        self,
        name: str,
        num_output: int = 0,
        *,
        max_tokens: int,
        start: int = 0,
        epoch: int = 1,
        tenant: str = DEFAULT_TENANT,
    ) -> Verification:
        """Make the call of a turn that has some output; each session has a prompt of its own."""
        prompt = [3 + ord(name) % 17, *PROMPT]
        tokens = prompt + [3 + index % 13 for index in range(num_output)]
        position = make_round(
            tokens,
            session_id=name,
            epoch=epoch,
            round_id=num_output,
            start=start,
            output_start=len(prompt),
            max_session_tokens=max_tokens,
            tenant=tenant,
        )
        return await self.verifier.verify(VerifyRequest(position, NO_TOKENS, ()))

    async def end(self, name: str, epoch: int = 1) -> None:
        await self.verifier.end_turns([EndedTurn(name, epoch)])

    async def queue(
        self, name: str, num_output: int = 0, *, max_tokens: int, tenant: str = DEFAULT_TENANT
    ) -> asyncio.Task[Verification]:
        """Start a call that has to wait for blocks, and return once the engine has it."""
        call = asyncio.create_task(self.verify(name, num_output, max_tokens=max_tokens, tenant=tenant))
        await asyncio.sleep(0)  # the call is posted
        await self.verifier.release([])  # and taken
        return call


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica(WaitLimits(max_waiting=1, max_wait_s=30.0))
    yield made
    await made.verifier.close()
    made.verifier.check_integrity()


async def test_a_turn_keeps_its_blocks_between_its_calls_and_grows_into_them(replica: Replica) -> None:
    await replica.verify("a", max_tokens=112)
    assert replica.verifier.stats().num_active_kv_blocks == 7
    waiting = await replica.queue("b", max_tokens=40)
    for num_output in range(1, 90, 8):
        answer = await replica.verify("a", num_output, max_tokens=112)
        assert answer.num_cached_tokens >= 20  # nothing was taken from it, so nothing runs again
    assert not waiting.done()
    await replica.end("a")
    assert (await asyncio.wait_for(waiting, PATIENCE_S)).kv_len == 21


async def test_a_new_turn_beyond_the_queue_is_refused_with_the_time_to_retry_and_counted(replica: Replica) -> None:
    await replica.verify("a", max_tokens=112)
    waiting = await replica.queue("b", max_tokens=40)
    with pytest.raises(ResourceExhausted) as refusal:
        await replica.verify("c", max_tokens=40)
    assert refusal.value.reason == "KV_EXHAUSTED"
    assert refusal.value.retry_after_s is not None
    assert replica.verifier.stats().num_kv_exhausted == 1
    await replica.end("a")
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_a_tenant_that_floods_the_pool_leaves_a_part_of_it_to_the_others_and_comes_after_them() -> None:
    replica = Replica(WaitLimits(max_waiting=4, max_wait_s=30.0), num_blocks=16)
    await replica.verify("y", max_tokens=32, tenant="other")
    await replica.end("y")
    for name in "ab":
        await replica.verify(name, max_tokens=112, tenant="flooding")  # 14 blocks
    own = await replica.queue("c", max_tokens=112, tenant="flooding")
    small = await replica.queue("d", max_tokens=32, tenant="flooding")
    await asyncio.wait_for(replica.verify("y", max_tokens=32, epoch=2, tenant="other"), PATIENCE_S)
    await replica.end("y", epoch=2)
    await replica.verify("y", max_tokens=32, epoch=3, tenant="other")
    assert not own.done()
    assert not small.done()  # although two blocks were free for it
    late = await replica.queue("z", max_tokens=80, tenant="another")
    await replica.end("a")
    await asyncio.wait_for(late, PATIENCE_S)
    assert not own.done()
    for name, epoch in (("z", 1), ("y", 3), ("b", 1)):
        await replica.end(name, epoch=epoch)
    await asyncio.wait_for(asyncio.gather(own, small), PATIENCE_S)
    await replica.verifier.close()
    replica.verifier.check_integrity()


async def test_a_new_turn_that_has_waited_for_too_long_is_refused(replica: Replica) -> None:
    await replica.verify("a", max_tokens=112)
    waiting = await replica.queue("b", max_tokens=40)
    replica.pass_time(31.0)
    await replica.verify("a", 1, max_tokens=112)  # wakes the replica
    with pytest.raises(ResourceExhausted):
        await asyncio.wait_for(waiting, PATIENCE_S)


async def test_a_turn_that_has_output_already_waits_instead_of_being_refused(replica: Replica) -> None:
    """Its first replica died. It comes before new turns, however many wait."""
    await replica.verify("a", max_tokens=112)
    new = await replica.queue("b", max_tokens=100)
    moved = await replica.queue("c", 30, max_tokens=112)
    assert not moved.done()
    await replica.end("a")
    assert (await asyncio.wait_for(moved, PATIENCE_S)).kv_len == 51
    assert not new.done()
    await replica.end("c")
    await asyncio.wait_for(new, PATIENCE_S)


async def test_of_turns_that_all_outgrow_their_reservations_the_oldest_goes_on() -> None:
    """Each holds exactly what is reserved for it, and none of them may go on without a further block."""
    replica = Replica(WaitLimits(max_waiting=4, max_wait_s=30.0), num_blocks=6, kv_reserve_tokens=1)
    names = "abc"
    for name in names:
        await replica.verify(name, max_tokens=60)
    calls = [await replica.queue(name, 12, max_tokens=60) for name in names]
    for name, call in zip(names, calls, strict=True):
        assert (await asyncio.wait_for(call, PATIENCE_S)).kv_len == 33
        for num_output in range(13, 40):
            await asyncio.wait_for(replica.verify(name, num_output, max_tokens=60), PATIENCE_S)
        await replica.end(name)
    stats = replica.verifier.stats()
    assert stats.num_preemptions > 0
    assert stats.num_kv_exhausted == 0
    await replica.verifier.close()
    replica.verifier.check_integrity()


async def test_a_request_larger_than_the_pool_is_refused_before_it_has_a_token(replica: Replica) -> None:
    with pytest.raises(ResourceExhausted, match="200 tokens need 13 KV blocks, this replica has 8"):
        await replica.verify("a", max_tokens=200)


async def test_kv_of_idle_sessions_does_not_count(replica: Replica) -> None:
    for name in "abcd":
        await replica.verify(name, max_tokens=32)
        await replica.end(name)
    assert replica.verifier.stats().num_held_kv_blocks == NUM_BLOCKS
    assert replica.verifier.stats().num_active_kv_blocks == 0
    assert (await replica.verify("e", max_tokens=128)).kv_len == 21


async def test_the_reservation_of_a_turn_that_falls_silent_ends(replica: Replica) -> None:
    """Its coordinator died; the turn may still call later, and runs its tokens again."""
    await replica.verify("a", max_tokens=112)
    replica.pass_time(DEFAULT_HOLD_S + 1.0)
    await replica.verify("b", max_tokens=112)
    await replica.end("b")
    with pytest.raises(KvMiss):
        await replica.verify("a", 1, max_tokens=112, start=21)
    assert (await replica.verify("a", 1, max_tokens=112)).kv_len == 22


async def test_the_end_of_a_turn_abandons_its_call_and_frees_its_blocks_within_a_step(replica: Replica) -> None:
    replica.worker.gate.clear()
    running = asyncio.create_task(replica.verify("a", max_tokens=112))
    await asyncio.to_thread(replica.worker.entered.acquire)
    ended = asyncio.create_task(replica.end("a"))
    stale = asyncio.create_task(replica.end("a", epoch=7))  # an end of another turn changes nothing
    await asyncio.sleep(0)
    replica.worker.gate.set()
    await asyncio.gather(ended, stale)
    assert replica.verifier.stats().num_active_kv_blocks == 0
    with pytest.raises(StaleEpoch):
        await running
    await asyncio.wait_for(replica.verify("b", max_tokens=128), PATIENCE_S)


async def test_a_draft_without_blocks_is_refused_at_once() -> None:
    proposer = Proposer(TableWorker(num_blocks=NUM_BLOCKS), ReplicaOptions())
    positions = [
        make_round([3 + index, *PROMPT], session_id=f"s{index}", output_start=21, max_session_tokens=100)
        for index in range(2)
    ]
    await proposer.propose(ProposeRequest(positions[0], 4))
    with pytest.raises(ResourceExhausted) as refusal:
        await proposer.propose(ProposeRequest(positions[1], 4))
    assert refusal.value.reason == "KV_EXHAUSTED"
    again = replace(positions[0], round_id=1)
    await proposer.propose(ProposeRequest(again, 4))
    await _end_all(proposer, [position.session_id for position in positions])
    await proposer.propose(ProposeRequest(replace(positions[1], round_id=1), 4))
    await proposer.close()


async def _end_all(engine: ReplicaEngine, session_ids: list[str]) -> None:
    await engine.end_turns([EndedTurn(session_id, 1) for session_id in session_ids])
