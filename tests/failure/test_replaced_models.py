"""A replica's process is replaced in mid-session by one with the same vocabulary and other weights.

Replicas are polled only where a test says so, so that the calls themselves must keep the other model's tokens away. The
greedy output of both models is known (`TableWorker`), so one foreign token is noticed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from coordinator.replicas.replica import TARGET
from draft_service.fan_out_policy import Predraft
from specdec.contract.types import Proposal, ProposeRequest
from specdec.rpc.status_mapping import from_rpc_error
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, request
from tests.support.output import Output, read_until
from tests.support.table_services import Service, start_service
from tests.support.table_worker import TableWorker

NUM_TOKENS = 40
#: Two models of one vocabulary.
SALTS = (0, 5)


async def replace_model(rig: Rig, service: Service, salt: int, **options: Any) -> Service:
    """Start a process of another model at the address of a service, as a redeploy or a load balancer does."""
    listen = service.address
    await service.kill()
    reborn = await start_service(service.role, salt=salt, listen=listen, **options)
    rig.services[rig.services.index(service)] = reborn
    return reborn


class Interposed:
    """An engine that calls a hook after its `after`-th answer, before the answer is sent."""

    def __init__(self, engine: Any, after: int, happens: Callable[[], Awaitable[object]]) -> None:
        self._engine = engine
        self._countdown = itertools.count(after - 1, -1)
        self._happens = happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def propose(self, request: ProposeRequest) -> Proposal:
        proposal = await self._engine.propose(request)
        if next(self._countdown) == 0:
            await self._happens()
        return proposal


async def read_on(stream: Any, output: Output) -> str:
    """Read to the end of a stream; return the reason of its error, or ""."""
    try:
        while (response := await stream.read()) is not grpc.aio.EOF:
            output.add(response)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return ""


async def poll_until_alive(coordinator: Coordinator, num_replicas: int) -> None:
    async with asyncio.timeout(20):
        while sum(replica.is_alive for replica in coordinator.pools.all_replicas()) < num_replicas:
            await coordinator.pools.poll()


def greedy_of(salt: int, held: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    return TableWorker(salt=salt).greedy_continuation(held, num_tokens)


async def a_swapped_session(rig: Rig, coordinator: Coordinator, number: int) -> tuple[int, bool]:
    """Run a session whose target's model is replaced after some tokens, or between a propose and its verify.

    Returns:
        Foreign tokens shown, in that turn and where it was resumed; whether the turn broke off.
    """
    before, after = SALTS[number % 2], SALTS[(number + 1) % 2]
    prompt, session_id = [*PROMPT, 2 + number % 20], f"s{number}"
    in_mid_round = number % 3 == 1

    async def swap() -> None:
        await replace_model(rig, rig.target, after)

    if in_mid_round:
        await replace_model(
            rig, rig.draft, 1, between=lambda engine: Interposed(engine, 1 + number % 4, swap),
            predraft=Predraft.ON if number % 2 else Predraft.OFF,
        )  # fmt: skip
        await poll_until_alive(coordinator, 2)
    stream = coordinator.stub.Generate(request(prompt, session_id=session_id, max_new_tokens=NUM_TOKENS, gamma=3))
    output = Output()
    if not in_mid_round:
        output = await read_until(stream, 1 + number % 9)
        await swap()
    reason = await read_on(stream, output)
    shown = output.token_ids
    assert reason in ("", "REPLICA_UNAVAILABLE")
    own = greedy_of(before, prompt)
    foreign = sum(token_id != wanted for token_id, wanted in zip(shown, own, strict=False))
    if reason and shown:
        await poll_until_alive(coordinator, 2)
        rest = Output()
        resumption = request(None, session_id=session_id, resume_from=len(shown))
        reason = await read_on(coordinator.stub.Generate(resumption), rest)
        assert rest.token_ids or reason == "REPLICA_UNAVAILABLE"
        foreign += sum(token_id != wanted for token_id, wanted in zip(rest.token_ids, own[len(shown) :], strict=False))
    return foreign, bool(reason)


@pytest.mark.parametrize("num_swaps", [24, pytest.param(100, marks=pytest.mark.full)])
async def test_swapping_the_model_behind_an_address_never_shows_a_token_of_the_other_model(num_swaps: int) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        outcomes = []
        for number in range(num_swaps):
            await coordinator.pools.poll()
            await poll_until_alive(coordinator, 2)
            outcomes.append(await a_swapped_session(rig, coordinator, number))
    assert sum(foreign > 0 for foreign, _ in outcomes) == 0
    # Otherwise the swaps came too late to prove anything.
    assert sum(broke for _, broke in outcomes) > num_swaps // 2


@pytest.mark.parametrize("predraft", [Predraft.OFF, Predraft.ON], ids=lambda predraft: predraft.value)
async def test_a_draft_replaced_by_another_model_is_not_used_until_it_is_polled(predraft: Predraft) -> None:
    async with Rig() as rig:
        await replace_model(rig, rig.draft, 1, predraft=predraft)
        coordinator = await rig.coordinator()
        first = await coordinator.generate(request())
        other = await replace_model(rig, rig.draft, 5, predraft=predraft)
        output = await coordinator.generate(request())
        assert (first.token_ids, output.token_ids) == (greedy_of(0, list(PROMPT), 24),) * 2
        assert first.finished.stats.num_draft_tokens > 0
        assert output.finished.stats.num_draft_tokens == 0
        assert other.worker.steps == []
        await coordinator.pools.poll()
        assert (await coordinator.generate(request())).finished.stats.num_draft_tokens > 0


async def test_a_session_moves_to_a_replica_of_its_model_when_its_own_serves_another() -> None:
    async with Rig(targets=2) as rig:
        coordinator = await rig.coordinator()
        stream = coordinator.stub.Generate(request(max_new_tokens=200, gamma=2))
        output = await read_until(stream, 10)
        serving = next(service for service in rig.of_role(TARGET) if service.engine.info().num_sessions)
        other = await replace_model(rig, serving, 5)
        assert await read_on(stream, output) == ""
        assert output.token_ids == greedy_of(0, list(PROMPT), 200)
        assert other.worker.steps == []


async def test_a_replica_that_restarts_with_its_model_is_used_at_once() -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator()
        watching = asyncio.create_task(coordinator.pools.watch())
        first = await coordinator.generate(request(session_id="s"))
        before = coordinator.pools.target_info.incarnation
        await replace_model(rig, rig.target, 0)
        again = await coordinator.generate(request((9,), session_id="s"))
        assert again.token_ids == greedy_of(0, [*PROMPT, *first.token_ids, 9], 24)
        async with asyncio.timeout(5):
            await eventually(lambda: coordinator.pools.target_info.incarnation != before)
        watching.cancel()


async def test_a_turn_on_another_model_reports_the_change_also_when_it_is_replayed() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        first = await coordinator.generate(request(session_id="s"))
        same = await coordinator.generate(request((9,), session_id="s"))
        assert [output.started.target_fingerprint for output in (first, same)] == ["table-0-table", "table-0-table"]
        assert [output.started.target_changed for output in (first, same)] == [False, False]
        await replace_model(rig, rig.target, 5)
        await coordinator.pools.poll()
        held = [*PROMPT, *first.token_ids, 9, *same.token_ids, 9]
        changed = await coordinator.generate(request((9,), session_id="s"))
        assert changed.token_ids == greedy_of(5, held, 24)
        replayed = await coordinator.generate(request(None, session_id="s", resume_from=0))
        for output in (changed, replayed):
            assert (output.started.target_fingerprint, output.started.target_changed) == ("table-5-table", True)
        registry = coordinator.generations._metrics.registry
        assert registry.get_sample_value("specdec:target_changes_total", {"model_name": "table"}) == 1
        last = await coordinator.generate(request((9,), session_id="s"))
        assert (last.started.target_fingerprint, last.started.target_changed) == ("table-5-table", False)


async def test_a_turn_that_has_shown_no_token_moves_to_the_new_model_and_reports_it() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        first = await coordinator.generate(request(session_id="s"))
        await replace_model(rig, rig.target, 5)
        turn, output = request((9,), session_id="s", request_id="r2"), Output()
        assert await read_on(coordinator.stub.Generate(turn), output) == "REPLICA_UNAVAILABLE"
        assert output.token_ids == []
        await coordinator.pools.poll()
        for asked in (turn, request(None, session_id="s", resume_from=0)):
            output = await coordinator.generate(asked)
            assert output.token_ids == greedy_of(5, [*PROMPT, *first.token_ids, 9], 24)
            assert (output.started.target_fingerprint, output.started.target_changed) == ("table-5-table", True)
