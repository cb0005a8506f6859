"""Redis loses the end of a session's log after clients have seen it.

The coordinator that wrote the lost tokens repairs the log; others refuse new turns with SESSION_LOST. The append-only
file of a real `redis-server` is truncated, as the crash of a machine may leave it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.generation import log_repair
from specdec.contract.errors import SpecdecError
from specdec.contract.types import FinishReason
from specdec.rpc.status_mapping import from_rpc_error
from specdec.state.key_names import pack_tokens, session_keys
from specdec.state.store import SessionRecord
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.interrupted_store import InterruptedStore, coordinator_on
from tests.support.output import Output, read_rest, read_until
from tests.support.redis_fixture import RedisServer
from tests.support.store_sessions import forget_session
from tests.support.table_services import write_tokenizer

NUM_TOKENS = 60
LOST_BYTES = 4000
HELD = len(PROMPT) + NUM_TOKENS
LEASE_TTL_S = 3.0


@pytest.fixture
async def lossy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[RedisServer, Rig]]:
    server = RedisServer(tmp_path_factory.mktemp("lossy"), keeps_log=True)
    server.start()
    write_checkpoint = partial(write_tokenizer, chat_template="{{ messages[0].content }}")
    async with Rig(drafts=0, store_url=server.url, write_checkpoint=write_checkpoint) as rig:
        yield server, rig
    server.stop()


def chat(content: str, **fields: Any) -> pb.GenerateRequest:
    asked = request(None, session_id="s", **fields)
    asked.messages.messages.add(role="user", content=content)
    return asked


def turn(expected: int | None = None, **fields: Any) -> pb.GenerateRequest:
    asked = request(**{"session_id": "s", "max_new_tokens": NUM_TOKENS, **fields})
    if expected is not None:
        asked.expected_session_tokens = expected
    return asked


async def record_of(rig: Rig) -> SessionRecord:
    record = await rig.store.load("s")
    assert record is not None
    return record


async def refusal_of(coordinator: Coordinator, asked: pb.GenerateRequest) -> SpecdecError:
    """Return the error of a turn. While the session seems busy, the turn is refused with a delay and sent again."""
    async with asyncio.timeout(4 * LEASE_TTL_S):
        while True:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await coordinator.generate(asked)
            error = from_rpc_error(caught.value)
            if error.reason != "SESSION_BUSY":
                return error
            assert error.retry_after_s
            await asyncio.sleep(error.retry_after_s)


async def lose_the_tail(server: RedisServer, rig: Rig) -> None:
    server.restart_without_its_last(LOST_BYTES)
    record = await record_of(rig)
    assert len(PROMPT) < record.num_tokens < HELD
    assert record.request.finish_reason is None


@pytest.mark.parametrize("expected", [None, HELD])
async def test_the_coordinator_that_wrote_the_lost_tail_repairs_it_before_the_next_turn(
    lossy: tuple[RedisServer, Rig], expected: int | None
) -> None:
    server, rig = lossy
    coordinator = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)
    first = await coordinator.generate(turn())
    await lose_the_tail(server, rig)
    second = await coordinator.generate(turn(expected, max_new_tokens=5))
    held = [*PROMPT, *first.token_ids, *PROMPT]
    assert second.started.num_prompt_tokens == len(held)
    assert second.token_ids == rig.target.worker.greedy_continuation(held, 5)
    assert (await rig.store.read_tokens("s")).tolist() == [*held, *second.token_ids]
    assert (await record_of(rig)).request.turn == 1


async def test_the_coordinator_that_wrote_the_lost_tail_replays_the_whole_turn(lossy: tuple[RedisServer, Rig]) -> None:
    server, rig = lossy
    coordinator = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)
    first = await coordinator.generate(turn())
    num_steps = len(rig.target.worker.steps)
    await lose_the_tail(server, rig)
    again = await coordinator.generate(request(None, session_id="s", resume_from=0))
    assert again.token_ids == first.token_ids
    assert len(rig.target.worker.steps) == num_steps
    assert (await record_of(rig)).request.finish_reason is FinishReason.LENGTH


async def test_a_turn_that_is_lost_as_a_whole_is_repaired_by_its_coordinator(lossy: tuple[RedisServer, Rig]) -> None:
    server, rig = lossy
    coordinator = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)
    first = await coordinator.generate(turn())
    second = await coordinator.generate(turn(max_new_tokens=2))
    server.restart_without_its_last(2 * LOST_BYTES)
    assert (await record_of(rig)).num_tokens < HELD
    third = await coordinator.generate(turn(max_new_tokens=5))
    held = [*PROMPT, *first.token_ids, *PROMPT, *second.token_ids, *PROMPT]
    assert third.token_ids == rig.target.worker.greedy_continuation(held, 5)
    assert (await record_of(rig)).request.turn == 2


async def test_another_coordinator_refuses_new_turns_until_the_unfinished_turn_is_resumed(
    lossy: tuple[RedisServer, Rig],
) -> None:
    server, rig = lossy
    knowing = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)
    first = await knowing.generate(turn())
    await lose_the_tail(server, rig)
    num_left = (await record_of(rig)).num_tokens
    other = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)
    for expected in (HELD, None):
        error = await refusal_of(other, turn(expected))
        assert error.reason == "SESSION_LOST"
        assert str(num_left) in error.message
    assert str(HELD) in (await refusal_of(other, turn(HELD))).message
    # A refused resumption does not open the session to new turns either.
    for asked in (request(None, session_id="s", resume_from=NUM_TOKENS), turn()):
        assert (await refusal_of(other, asked)).reason == "SESSION_LOST"
    assert (await record_of(rig)).num_tokens == num_left
    assert (await record_of(rig)).owner == ""

    resumed = await other.generate(request(None, session_id="s", resume_from=0))
    assert resumed.token_ids == first.token_ids
    second = await other.generate(turn(HELD, max_new_tokens=5))
    assert second.token_ids == rig.target.worker.greedy_continuation([*PROMPT, *first.token_ids, *PROMPT], 5)


async def test_a_caller_that_names_the_remaining_length_may_continue_from_there(
    lossy: tuple[RedisServer, Rig],
) -> None:
    server, rig = lossy
    first = await (await rig.coordinator(lease_ttl_s=LEASE_TTL_S)).generate(turn())
    await lose_the_tail(server, rig)
    num_left = (await record_of(rig)).num_tokens
    other = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)
    await refusal_of(other, turn())
    second = await other.generate(turn(num_left, max_new_tokens=5))
    held = [*[*PROMPT, *first.token_ids][:num_left], *PROMPT]
    assert second.token_ids == rig.target.worker.greedy_continuation(held, 5)


async def test_a_repair_does_not_overwrite_what_another_coordinator_wrote_since() -> None:
    async with Rig(drafts=0) as rig:
        first, second = await rig.coordinator(), await rig.coordinator()
        await first.generate(turn())
        await forget_session(rig.store._connection, "s")
        shorter = await second.generate(turn(max_new_tokens=5))
        third = await first.generate(turn(max_new_tokens=5))
        held = [*PROMPT, *shorter.token_ids, *PROMPT]
        assert third.token_ids == rig.target.worker.greedy_continuation(held, 5)
        await forget_session(rig.store._connection, "s")
        anew = await first.generate(turn(max_new_tokens=5))
        assert anew.started.num_prompt_tokens == len(PROMPT)


async def test_any_coordinator_accepts_the_turn_after_an_abandoned_one() -> None:
    async with Rig(drafts=0) as rig:
        first, second = await rig.coordinator(), await rig.coordinator()
        stream = first.stub.Generate(turn(max_new_tokens=200))
        output: Output = await read_until(stream, 3)
        stream.cancel()
        async with asyncio.timeout(20):
            while (await record_of(rig)).owner:
                pass
        held = (await rig.store.read_tokens("s")).tolist()
        assert held[: len(PROMPT) + 3] == [*PROMPT, *output.token_ids[:3]]
        following = await second.generate(turn(max_new_tokens=5))
        assert following.token_ids == rig.target.worker.greedy_continuation([*held, *PROMPT], 5)


async def test_a_session_that_the_remembered_tail_does_not_continue_is_refused_and_unchanged() -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator()
        await coordinator.generate(turn())
        log = session_keys("default", "s")[1]
        run = rig.store._connection.run_command
        await run("SET", log, pack_tokens(np.full(HELD - 10, 9, np.uint32)))
        await refusal_of(coordinator, turn())
        error = await refusal_of(coordinator, turn())
        assert (error.reason, f"{HELD - 10} of {HELD} tokens" in error.message) == ("SESSION_LOST", True)
        assert (await rig.store.read_tokens("s")).tolist() == [9] * (HELD - 10)
        record = await record_of(rig)
        assert (record.owner, record.request.turn) == ("", 0)


async def test_a_loss_beyond_the_remembered_tokens_is_refused_and_the_session_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_repair, "MAX_TAIL_TOKENS", 20)
    async with asyncio.timeout(30), Rig(drafts=0) as rig:
        coordinator = await rig.coordinator()
        await coordinator.generate(turn())
        left = (await rig.store.read_tokens("s"))[: HELD - 30]
        await rig.store._connection.run_command("SET", session_keys("default", "s")[1], pack_tokens(left))
        assert (await refusal_of(coordinator, turn(HELD, max_new_tokens=5))).reason == "SESSION_LOST"
        assert (await rig.store.read_tokens("s")).tolist() == left.tolist()


@pytest.mark.parametrize("num_shown", [1, 12])
@pytest.mark.parametrize("num_new", [1, 21, 40], ids=["shorter", "as long", "longer"])
async def test_a_running_turn_whose_beginning_the_store_lost_is_written_again_as_a_whole(
    lossy: tuple[RedisServer, Rig], num_new: int, num_shown: int
) -> None:
    """The store keeps the lease, and has the log of the turn before, of which this turn kept a part only."""
    server, rig = lossy
    store = InterruptedStore(rig.store, "nothing")
    coordinator = await coordinator_on(rig, store, lease_ttl_s=30.0)
    await coordinator.generate(chat("w5 w6 w7", max_new_tokens=20))
    before = (await rig.store.read_tokens("s")).tolist()
    sizes: list[int] = []

    async def note_size(*_: Any) -> None:
        sizes.append(server.log_size)

    store.interrupt_next("begin_request", before=note_size)
    stream = coordinator.stub.Generate(chat("w5 w6" + " w9" * num_new, max_new_tokens=100))
    held = await read_until(stream, num_shown)
    await asyncio.to_thread(server.restart_without_its_last, server.log_size - sizes[0])
    await read_rest(stream, held)
    log = (await rig.store.read_tokens("s")).tolist()
    prompt = log[: held.started.num_prompt_tokens]
    assert prompt[: len(before)] != before[: len(prompt)]
    assert held.token_ids == rig.target.worker.greedy_continuation(prompt, 100)
    assert log == [*prompt, *held.token_ids]
    record = await record_of(rig)
    assert (record.request.turn, record.request.output_start) == (1, len(prompt))
    assert record.request.finish_reason is FinishReason.LENGTH
    assert record.was_left


@pytest.mark.parametrize("first", [0, HELD - 1])
@pytest.mark.parametrize("resume_from", [None, 0, NUM_TOKENS])
async def test_a_log_of_the_right_length_with_another_token_is_refused_by_name(
    first: int, resume_from: int | None
) -> None:
    async with Rig(drafts=0) as rig:
        await (await rig.coordinator()).generate(turn())
        log = await rig.store.read_tokens("s")
        log[first] ^= 1
        await rig.store._connection.run_command("SET", session_keys("default", "s")[1], pack_tokens(log))
        asked = turn(HELD) if resume_from is None else request(None, session_id="s", resume_from=resume_from)
        error = await refusal_of(await rig.coordinator(), asked)
        assert error.reason == "SESSION_LOST"
        assert f"its {HELD} tokens are not the {HELD} that were committed" in error.message
        other = await (await rig.coordinator()).generate(request(session_id="other", max_new_tokens=5))
        assert other.token_ids == rig.target.worker.greedy_continuation(PROMPT, 5)


async def test_a_repair_completes_although_its_client_disconnects(
    lossy: tuple[RedisServer, Rig],
) -> None:
    """The lease of an abandoned repair would have a newer epoch, as the lease of another coordinator has."""
    server, rig = lossy
    taken, gate = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        taken.set()
        await gate.wait()

    store = InterruptedStore(rig.store, "nothing")
    coordinator = await coordinator_on(rig, store, lease_ttl_s=LEASE_TTL_S)
    await coordinator.generate(turn())
    await lose_the_tail(server, rig)
    store.interrupt_next("acquire", after=wait)
    stream = coordinator.stub.Generate(turn(HELD, max_new_tokens=5))
    await taken.wait()
    stream.cancel()
    await asyncio.sleep(0.2)
    gate.set()
    await asyncio.sleep(0.3)
    assert len((await coordinator.generate(turn(HELD, max_new_tokens=5))).token_ids) == 5
