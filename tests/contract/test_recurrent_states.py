"""Sessions of a hybrid share few slots for recurrent states: they wait, are refused in words, and begin at snapshots
that follow exactly their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from specdec.contract.engine_api import EndedTurn
from specdec.contract.errors import Internal, ResourceExhausted
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import Verification, VerifyRequest
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.sessions.kv_queue import WaitLimits
from target_service.verifier import Verifier
from tests.support.recurrent_table_worker import STATE_BYTES, RecurrentTableWorker
from tests.support.round_driver import RoundDriver, make_round
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]

NO_TOKENS = np.empty(0, dtype=np.uint32)
PROMPT = [3 + index % 17 for index in range(100)]
SNAPSHOT = 80
"""Number of tokens after which the snapshot of a prompt of 100 tokens stands."""
PATIENCE_S = 60.0


class Replica:
    """A target with slots for `num_states` states."""

    def __init__(self, num_states: int, num_blocks: int = 64, max_waiting: int = 1) -> None:
        self.worker = RecurrentTableWorker(num_states=num_states, num_blocks=num_blocks)
        limits = WaitLimits(max_waiting=max_waiting, max_wait_s=30.0)
        self.verifier = Verifier(self.worker, ReplicaOptions(wait_limits=limits, max_step_tokens=96))

    async def verify(
        self, name: str, prompt: list[int], *, round_id: int = 0, tenant: str = DEFAULT_TENANT
    ) -> Verification:
        """Make the first call of a turn."""
        position = make_round(
            prompt, session_id=name, output_start=len(prompt), max_session_tokens=len(prompt) + 20, tenant=tenant,
            round_id=round_id,
        )  # fmt: skip
        return await self.verifier.verify(VerifyRequest(position, NO_TOKENS, ()))

    async def queue(self, name: str, prompt: list[int]) -> asyncio.Task[Verification]:
        """Start a call that has to wait, and return once the engine has it."""
        call = asyncio.create_task(self.verify(name, prompt))
        await asyncio.sleep(0)  # the call is posted
        await self.verifier.release([])  # and taken
        return call

    async def end(self, name: str) -> None:
        await self.verifier.end_turns([EndedTurn(name, 1)])

    def states_after(self, num_tokens: int) -> list[int]:
        """Return the slots that hold states after this number of tokens."""
        return [
            slot for slot, tokens in enumerate(self.worker.states) if tokens is not None and len(tokens) == num_tokens
        ]

    async def close(self) -> None:
        self.verifier.check_integrity()
        await self.verifier.close()


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica(num_states=3)
    yield made
    await made.close()


def _greedy(answer: Verification) -> int:
    assert answer.decided_token_id is not None
    return answer.decided_token_id


async def test_a_turn_waits_for_the_states_of_another_although_there_are_blocks(replica: Replica) -> None:
    await replica.verify("a", PROMPT)
    waiting = await replica.queue("b", [5, *PROMPT])
    assert not waiting.done()
    assert replica.verifier.stats().num_free_kv_blocks > 40
    await replica.end("a")
    answer = await asyncio.wait_for(waiting, PATIENCE_S)
    assert answer.kv_len == 101


async def test_a_turn_beyond_the_queue_is_refused_with_the_states_that_it_needs(replica: Replica) -> None:
    await replica.verify("a", PROMPT)
    waiting = await replica.queue("b", [5, *PROMPT])
    with pytest.raises(ResourceExhausted) as refusal:
        await replica.verify("c", [6, *PROMPT])
    assert refusal.value.reason == "KV_EXHAUSTED"
    assert refusal.value.retry_after_s is not None
    assert refusal.value.message == (
        "the recurrent states of this replica are reserved for running requests, and 1 requests wait for them; the "
        f"request needs 2 of {STATE_BYTES} bytes each beside its KV"
    )
    await replica.end("a")
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_a_request_that_fits_no_pool_is_told_the_bytes_of_the_states_beside_it() -> None:
    replica = Replica(num_states=6, num_blocks=4)
    with pytest.raises(ResourceExhausted, match=r"this replica has 4 beside 6000 bytes of recurrent states") as refusal:
        await replica.verify("a", PROMPT)
    assert refusal.value.retry_after_s is None
    await replica.close()


async def test_a_call_that_is_given_up_in_its_prompt_gives_back_the_slots_of_its_snapshots() -> None:
    """The prompt takes two steps; the snapshot is saved in the first, during which the call ends."""
    replica = Replica(num_states=4)
    for index in range(4):
        replica.worker.gate.clear()
        call = asyncio.create_task(replica.verify("a", [3 + index, *PROMPT[1:]], round_id=index))
        await asyncio.to_thread(replica.worker.entered.acquire)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        replica.worker.gate.set()
        await replica.end("a")
        assert replica.verifier.stats().snapshot_state_bytes == 0
    assert (await asyncio.wait_for(replica.verify("b", [9, *PROMPT]), PATIENCE_S)).kv_len == 101
    await replica.close()


async def test_a_session_begins_at_the_snapshot_of_exactly_its_tokens_and_tenant() -> None:
    replica = Replica(num_states=24)
    first = await replica.verify("a", PROMPT)
    assert first.num_cached_tokens == 0
    assert (await replica.verify("same", [*PROMPT, 4, 4])).num_cached_tokens == SNAPSHOT
    assert (await replica.verify("other end", [*PROMPT[:90], 4, 4, 4])).num_cached_tokens == SNAPSHOT
    assert (await replica.verify("other begin", [4, *PROMPT[1:]])).num_cached_tokens == 0
    assert (await replica.verify("other token", [*PROMPT[:79], 4, *PROMPT[80:]])).num_cached_tokens == 0
    assert (await replica.verify("shorter", PROMPT[:80])).num_cached_tokens == 0
    assert (await replica.verify("stranger", PROMPT, tenant="another")).num_cached_tokens == 0
    await replica.close()


async def test_a_damaged_snapshot_is_withdrawn_counted_and_its_tokens_run_again() -> None:
    replica = Replica(num_states=12)
    expected = _greedy(await replica.verify("a", PROMPT))
    await replica.verifier.release(["a"])
    (slot,) = replica.states_after(SNAPSHOT)
    replica.worker.damaged = {slot}
    with pytest.raises(Internal, match="non-finite"):
        await replica.verify("b", PROMPT)
    assert replica.verifier.stats().num_withdrawn_snapshots == 1
    for round_id, name in enumerate(("b", "c"), start=1):
        answer = await replica.verify(name, PROMPT, round_id=round_id)
        assert _greedy(answer) == expected
    assert replica.verifier.stats().num_withdrawn_snapshots == 1
    await replica.close()


async def test_a_snapshot_that_was_evicted_is_replayed() -> None:
    """Its KV blocks are still there, and of no use without it."""
    replica = Replica(num_states=3)
    expected = _greedy(await replica.verify("a", PROMPT))
    for name in ("a", "b"):  # the session of b takes the slot of the snapshot
        await replica.verifier.release([name])
        await replica.verify("b", [5, 6, 7])
        await replica.end("b")
    driver = RoundDriver("c", list(PROMPT), None, replica.verifier)
    await driver.generate(1, gamma=0)
    assert driver.output == [expected]
    await replica.close()
