"""One coordinator serves several tenants, whose calls name them in their metadata, and shares nothing among them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.client import AsyncClient, Client
from specdec.contract.errors import Forbidden, InvalidRequest, SessionLost, SpecdecError
from specdec.contract.tenant import DEFAULT_TENANT, TENANT_KEY
from specdec.contract.types import BLOCK_TOKENS
from specdec.observability.coordinator_metrics import OTHER
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, request
from tests.support.logged import CountedLog, logged
from tests.support.output import Output, read_rest, read_until
from tests.support.redis_fixture import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]

PREFIX = tuple(2 + (5 * index + index // 7) % 20 for index in range(8 * BLOCK_TOKENS))
TENANTS = (DEFAULT_TENANT, "acme", "ACME")
METHODS = pb.DESCRIPTOR.services_by_name["CoordinatorService"].methods_by_name


def named(*tenants: str) -> tuple[tuple[str, str], ...]:
    return tuple((TENANT_KEY, tenant) for tenant in tenants)


async def turn(
    coordinator: Coordinator, tenant: str, session_id: str, prompt: Sequence[int] | None, **options: Any
) -> Output:
    output = Output()
    asked = request(prompt, session_id=session_id, **({"max_new_tokens": 12} | options))
    async for response in coordinator.stub.Generate(asked, metadata=named(tenant)):
        output.add(response)
    return output


async def refusal(call: Any) -> SpecdecError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


def num_cached(output: Output) -> int:
    assert output.finished is not None
    return output.finished.usage.num_cached_prompt_tokens


async def session_of(coordinator: Coordinator, tenant: str, session_id: str) -> pb.GetSessionResponse:
    asked = pb.GetSessionRequest(session_id=session_id, include_token_ids=True)
    return await coordinator.stub.GetSession(asked, metadata=named(tenant))


async def test_tenants_with_equal_ids_and_prompts_have_separate_sessions_and_kv_blocks(redis_url: str) -> None:
    async with Rig(store_url=redis_url) as rig:
        coordinator = await rig.coordinator(tenant_header=True)
        for tenant in TENANTS:
            prompts = [(*PREFIX, 4), (*PREFIX, 5)]
            outputs = [await turn(coordinator, tenant, f"h{index}", prompt) for index, prompt in enumerate(prompts)]
            assert [num_cached(output) for output in outputs] == [0, len(PREFIX)]
            assert [output.token_ids for output in outputs] == [
                rig.target.worker.greedy_continuation(prompt, 12) for prompt in prompts
            ]
        for number, tenant in enumerate(TENANTS):
            output = await turn(coordinator, tenant, "h0", (6 + number,))
            held = [*PREFIX, 4, *rig.target.worker.greedy_continuation((*PREFIX, 4), 12), 6 + number]
            assert output.token_ids == rig.target.worker.greedy_continuation(held, 12)
            assert (await session_of(coordinator, tenant, "h0")).token_ids == [*held, *output.token_ids]


async def test_a_session_of_another_tenant_is_an_unknown_session(redis_url: str) -> None:
    async with Rig(store_url=redis_url) as rig:
        coordinator = await rig.coordinator(tenant_header=True)
        output = await turn(coordinator, "acme", "private", PROMPT)
        for session_id in ("private", "unknown"):
            errors = [
                await refusal(session_of(coordinator, "other", session_id)),
                await refusal(turn(coordinator, "other", session_id, None, resume_from=0)),
                await refusal(turn(coordinator, "other", session_id, None, resume_from=3)),
            ]
            assert [error.reason for error in errors] == ["SESSION_NOT_FOUND", "SESSION_NOT_FOUND", "SESSION_LOST"]
        unlike = [error.message.replace("unknown", "private") for error in errors]
        assert unlike[0] == (await refusal(session_of(coordinator, "other", "private"))).message
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id="private"), metadata=named("other"))
        assert (await session_of(coordinator, "acme", "private")).token_ids == [*PROMPT, *output.token_ids]
        replayed = await turn(coordinator, "acme", "private", None, resume_from=0)
        assert replayed.token_ids == output.token_ids
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id="private"), metadata=named("acme"))
        assert (await refusal(session_of(coordinator, "acme", "private"))).reason == "SESSION_NOT_FOUND"


async def test_a_running_session_is_neither_busy_nor_deleted_for_another_tenant(redis_url: str) -> None:
    async with Rig(store_url=redis_url) as rig:
        coordinator = await rig.coordinator(tenant_header=True)
        asked = request(session_id="running", max_new_tokens=300)
        stream = coordinator.stub.Generate(asked, metadata=named("acme"))
        output = await read_until(stream, 1)
        busy = await refusal(turn(coordinator, "acme", "running", PROMPT))
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id="running"), metadata=named("other"))
        theirs = await turn(coordinator, "other", "running", PREFIX[:20])
        await read_rest(stream, output)
        assert busy.reason == "SESSION_BUSY"
        assert theirs.token_ids == rig.target.worker.greedy_continuation(PREFIX[:20], 12)
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 300)


@pytest.mark.parametrize("method", METHODS)
async def test_a_coordinator_without_the_header_refuses_every_call_for_another_tenant(method: str) -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator(tenant="acme")
        message = getattr(pb, METHODS[method].input_type.name)()

        async def call(tenant: str) -> SpecdecError | None:
            answer = getattr(coordinator.stub, method)(message, metadata=named(tenant))
            try:
                await (answer.read() if METHODS[method].server_streaming else answer)
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error)
            return None

        refused, own = await call("other"), await call("acme")
        assert refused is not None
        assert (refused.code, refused.reason, refused.field) == ("PERMISSION_DENIED", "FORBIDDEN", TENANT_KEY)
        assert own is None or own.reason != "FORBIDDEN"


@pytest.mark.parametrize("reads_header", [True, False])
@pytest.mark.parametrize(
    "tenants", [("",), ("a/b",), ("x" * 65,), ("a b",), ("acme", "other"), ("acme", "acme")], ids=repr
)
async def test_a_call_that_names_no_valid_tenant_or_two_is_refused(
    tenants: tuple[str, ...], reads_header: bool
) -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator(tenant="acme", tenant_header=reads_header)
        error = await refusal(coordinator.stub.GetInfo(pb.GetInfoRequest(), metadata=named(*tenants)))
        assert (error.reason, error.field) == ("INVALID_REQUEST", TENANT_KEY)
        await coordinator.stub.GetInfo(pb.GetInfoRequest(), metadata=named("acme"))


async def test_all_tenants_share_one_limit_on_admitted_requests() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator(tenant_header=True, max_queue=1)
        stream = coordinator.stub.Generate(request(max_new_tokens=400), metadata=named("acme"))
        output = await read_until(stream, 1)
        error = await refusal(turn(coordinator, "other", "s", PROMPT))
        await read_rest(stream, output)
        assert (error.reason, error.retryable) == ("QUEUE_FULL", True)
        assert len((await turn(coordinator, "other", "s", PROMPT)).token_ids) == 12


async def test_only_the_coordinators_own_tenant_changes_the_promotion_and_sees_the_routes() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator(routes=True, tenant_header=True)
        await turn(coordinator, "acme", "s", PROMPT)
        promotion = pb.PromoteRequest(draft_pool="default", share=1.0)
        assert (await refusal(coordinator.stub.Promote(promotion, metadata=named("acme")))).reason == "FORBIDDEN"
        assert (await coordinator.stub.Promote(promotion)).promotion.draft_pool == "default"
        theirs = await coordinator.stub.GetInfo(pb.GetInfoRequest(), metadata=named("acme"))
        ours = await coordinator.stub.GetInfo(pb.GetInfoRequest())
        assert not any(pool.routes for pool in theirs.pools)
        assert not theirs.HasField("promotion")
        assert any(pool.routes for pool in ours.pools)
        assert ours.promotion.draft_pool == "default"


async def test_tenants_have_series_of_their_own_up_to_a_limit() -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator(tenant_header=True)  # its limit is 2
        for tenant in ("acme", "other", "third", "fourth", "acme"):
            await turn(coordinator, tenant, "", PROMPT)
        await eventually(lambda: not coordinator.generations.num_running)

        def value(name: str, tenant: str, **labels: str) -> float | None:
            series = {"model_name": "table", "tenant": tenant, **labels}
            return coordinator.metrics.registry.get_sample_value(f"specdec:tenant_{name}_total", series)

        counts = {tenant: value("requests", tenant, outcome="finished") for tenant in ("acme", "other", OTHER, "third")}
        assert counts == {"acme": 2, "other": 1, OTHER: 2, "third": None}
        assert (value("generation_tokens", "acme"), value("prompt_tokens", OTHER)) == (24, 2 * len(PROMPT))


async def test_drafts_are_found_in_the_outputs_of_the_own_tenant_only() -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator(tenant_header=True, lookup=["suffix"])
        accepted = []
        for tenant in ("acme", "acme", "other"):
            output = await turn(coordinator, tenant, "", PROMPT, gamma=4, max_new_tokens=40)
            await coordinator.history_settled()
            accepted.append(output.finished.stats.num_accepted_tokens)
        first, again, other = accepted
        assert again >= first + 10
        assert other == first


async def test_each_tenants_turns_are_in_its_own_learning_log(tmp_path: Path) -> None:
    async with Rig() as rig:
        log = CountedLog(tmp_path, serves_all_tenants=True)
        coordinator = await rig.coordinator(tenant_header=True, learning_log=log)
        outputs = {tenant: await turn(coordinator, tenant, "", PREFIX[: 8 + len(tenant)]) for tenant in ("a", "bb")}
        await eventually(lambda: not coordinator.generations.num_running)
    assert log.counts == {"written": 24}
    for tenant, output in outputs.items():
        _, (logged_turn,) = logged(tmp_path, tenant)
        assert logged_turn.token_ids.tolist() == [*PREFIX[: 8 + len(tenant)], *output.token_ids]
        assert (tmp_path / f"tenant-{tenant}").stat().st_mode & 0o077 == 0


async def test_a_tenant_that_is_idle_holds_no_task_thread_or_connection(redis_url: str) -> None:
    async with Rig(store_url=redis_url) as rig:
        coordinator = await rig.coordinator(tenant_header=True, lookup=["suffix"])

        async def in_use() -> tuple[int, int, int]:
            await coordinator.history_settled()
            await eventually(lambda: not any(task.get_name() == "commits" for task in asyncio.all_tasks()))
            clients = await rig.store._connection.run_command("CLIENT", "LIST")
            return len(asyncio.all_tasks()), threading.active_count(), len(clients.splitlines())

        for number in range(4):
            await turn(coordinator, "first", f"s{number}", PROMPT)
        before = await in_use()
        for number in range(30):
            await turn(coordinator, f"tenant-{number}", "s", PROMPT)
        async with asyncio.timeout(60):  # replicas are told of the end of a turn beside it
            while not await in_use() <= before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_clients_of_two_tenants_share_a_connection_and_know_their_own_session_sizes() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator(tenant_header=True)
        async with AsyncClient(coordinator.server.address) as client:
            acme, other = client.for_tenant("acme"), client.for_tenant("x").for_tenant("other")
            for caller, prompt in ((acme, PROMPT), (other, PREFIX[:20]), (acme, (9,)), (other, (9,))):
                options: dict[str, Any] = {"session_id": "one", "max_new_tokens": 12, "ignore_eos": True}
                await caller.generate(prompt_token_ids=prompt, **options)
            assert (await acme.get_session("one")).num_tokens == 12 + len(PROMPT) + 12 + 1
            assert (await other.get_session("one")).num_tokens == 12 + 20 + 12 + 1
            with pytest.raises(InvalidRequest, match=r"^tenant: 'a/b' is not"):
                client.for_tenant("a/b")
            await acme.delete_session("one")
            with pytest.raises(SessionLost):  # control: the size that one client knows is what the server compares
                await acme.generate(
                    prompt_token_ids=(9,), session_id="one", expected_session_tokens=29, max_new_tokens=1
                )


async def test_a_blocking_client_of_another_tenant_is_refused_without_the_header() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator(tenant="acme")

        def call(tenant: str) -> int:
            with Client(coordinator.server.address) as client:
                options: dict[str, Any] = {"prompt_token_ids": PROMPT, "max_new_tokens": 5, "ignore_eos": True}
                return client.for_tenant(tenant).generate(**options).usage.num_output_tokens

        assert await asyncio.to_thread(call, "acme") == 5
        with pytest.raises(Forbidden, match="--tenant-header on"):
            await asyncio.to_thread(call, "other")
