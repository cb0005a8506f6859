"""A turn is refused with SESSION_LOST when its session differs from what the caller expects, but not once it began."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from specdec.client import AsyncClient, Client
from specdec.contract.errors import SessionLost, SpecdecError
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request, started_coordinator
from tests.support.output import read_rest, read_until
from tests.support.store_sessions import forget_session
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]

NUM_TOKENS = 12
HELD = len(PROMPT) + NUM_TOKENS
GREEDY = {"temperature": 0.0, "ignore_eos": True, "gamma": 3, "max_new_tokens": NUM_TOKENS}


def turn(expected: int | None = None, **fields: Any) -> pb.GenerateRequest:
    asked = request(session_id="s", max_new_tokens=NUM_TOKENS, **fields)
    if expected is not None:
        asked.expected_session_tokens = expected
    return asked


async def refusal_of(
    coordinator: Coordinator, asked: pb.GenerateRequest, field: str = "expected_session_tokens"
) -> SpecdecError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await coordinator.generate(asked)
    error = from_rpc_error(caught.value)
    assert isinstance(error, SessionLost) == (field != "session_id")
    assert error.field == field
    return error


async def keys_of(rig: Rig) -> list[bytes]:
    return await rig.store._connection.run_command("KEYS", "specdec:default:*")


async def test_a_turn_that_expects_the_right_session_length_is_run() -> None:
    async with started_coordinator() as (rig, coordinator):
        first = await coordinator.generate(turn(0))
        second = await coordinator.generate(turn(HELD))
        held = [*PROMPT, *first.token_ids, *PROMPT]
        assert second.token_ids == rig.target.worker.greedy_continuation(held, NUM_TOKENS)


@pytest.mark.parametrize("expected", [0, 1, HELD - 1, HELD + 1, 2**32 - 1])
async def test_a_turn_that_expects_another_length_fails_and_leaves_the_session_unchanged(expected: int) -> None:
    async with started_coordinator() as (rig, coordinator):
        first = await coordinator.generate(turn())
        before = await rig.store.load("s")
        error = await refusal_of(coordinator, turn(expected))
        assert f"expected to hold {expected} tokens, it holds {HELD}" in error.message
        after = await rig.store.load("s")
        assert (after.epoch, after.num_tokens, after.request, after.owner) == (
            before.epoch, HELD, before.request, "",
        )  # fmt: skip
        replayed = await coordinator.generate(request(None, session_id="s", resume_from=0))
        assert replayed.token_ids == first.token_ids


async def test_a_turn_on_a_missing_session_fails_and_creates_no_session() -> None:
    async with started_coordinator() as (rig, coordinator):
        await coordinator.generate(turn())
        await forget_session(rig.store._connection, "s")
        error = await refusal_of(coordinator, turn(HELD))
        assert f"expected to hold {HELD} tokens" in error.message
        assert "holds 0" in error.message
        assert await keys_of(rig) == []
        assert coordinator.generations.num_running == 0
        await coordinator.generate(turn(0))


async def test_resuming_a_missing_session_with_held_tokens_fails_with_session_lost() -> None:
    async with started_coordinator() as (rig, coordinator):
        await coordinator.generate(turn())
        await forget_session(rig.store._connection, "s")
        error = await refusal_of(coordinator, request(None, session_id="s", resume_from=3), "resume_from")
        assert "of which 3 tokens are held" in error.message
        assert await keys_of(rig) == []
        error = await refusal_of(coordinator, request(None, session_id="s", resume_from=0), "session_id")
        assert error.reason == "SESSION_NOT_FOUND"


async def test_a_retry_of_a_started_turn_is_answered_although_the_session_has_grown() -> None:
    async with started_coordinator() as (_, coordinator):
        await coordinator.generate(turn())
        asked = turn(HELD, request_id="r2")
        whole = await coordinator.generate(asked)
        assert (await coordinator.generate(asked)).token_ids == whole.token_ids
        resumed = request(None, session_id="s", request_id="r2", resume_from=3)
        resumed.expected_session_tokens = HELD
        assert (await coordinator.generate(resumed)).token_ids == whole.token_ids[3:]


async def test_a_retry_joins_its_running_turn() -> None:
    async with started_coordinator() as (rig, coordinator):
        await coordinator.generate(turn())
        rig.target.worker.gate.clear()
        asked = turn(HELD, request_id="r2")
        stream = coordinator.stub.Generate(asked)
        await stream.read()  # it has begun
        joined = coordinator.stub.Generate(asked)
        await joined.read()
        rig.target.worker.gate.set()
        outputs = [await read_rest(each, await read_until(each, 1)) for each in (stream, joined)]
        assert outputs[0].token_ids == outputs[1].token_ids
        assert len(outputs[0].token_ids) == NUM_TOKENS


async def test_the_sdk_reports_a_lost_session_until_the_caller_starts_a_new_one() -> None:
    async with started_coordinator() as (rig, coordinator), AsyncClient(coordinator.server.address) as client:
        for _ in range(2):
            await client.generate(prompt_token_ids=PROMPT, session_id="s", **GREEDY)
        await forget_session(rig.store._connection, "s")
        for _ in range(2):
            with pytest.raises(SessionLost, match=f"expected to hold {2 * HELD} tokens"):
                await client.generate(prompt_token_ids=PROMPT, session_id="s", **GREEDY)
        anew = await client.generate(prompt_token_ids=PROMPT, session_id="s", expected_session_tokens=0, **GREEDY)
        assert anew.usage.num_prompt_tokens == len(PROMPT)
        await client.delete_session("s")
        anew = await client.generate(prompt_token_ids=PROMPT, session_id="s", **GREEDY)
        assert anew.usage.num_prompt_tokens == len(PROMPT)


async def test_the_sdk_expects_no_length_after_an_abandoned_turn() -> None:
    async with started_coordinator() as (_, coordinator), AsyncClient(coordinator.server.address) as client:
        await client.generate(prompt_token_ids=PROMPT, session_id="s", **GREEDY)
        async with client.generate(prompt_token_ids=PROMPT, session_id="s", stream=True, **GREEDY) as left:
            await anext(left)
        assert (await client.generate(prompt_token_ids=PROMPT, session_id="s", **GREEDY)).token_ids


async def test_the_blocking_sdk_reports_a_lost_session_and_shows_the_target_model() -> None:
    async with started_coordinator() as (rig, coordinator):
        loop = asyncio.get_running_loop()

        def forget() -> None:
            asyncio.run_coroutine_threadsafe(forget_session(rig.store._connection, "s"), loop).result()

        def talk() -> tuple[str, bool]:
            with Client(coordinator.server.address) as client:
                answer = client.generate(prompt_token_ids=PROMPT, session_id="s", **GREEDY)
                forget()
                with pytest.raises(SessionLost):
                    client.generate(prompt_token_ids=PROMPT, session_id="s", **GREEDY)
            return answer.target_fingerprint, answer.target_changed

        assert await asyncio.to_thread(talk) == ("table-0-table", False)
