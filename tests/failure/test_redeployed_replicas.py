"""A replica that is redeployed at its address and does not fit is left out, logged once, and used again later."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import DRAFT, TARGET
from specdec.rpc.client import open_link
from specdec.rpc.status_mapping import from_rpc_error
from specdec.state.redis_store import open_registry
from specdec.state.store import ReplicaRecord
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.links import silent_service
from tests.support.output import read_rest, read_until
from tests.support.stack import free_port
from tests.support.table_services import Service, start_service


async def redeploy(rig: Rig, service: Service, role: str = "", *, vocabulary: str = "table") -> Service:
    """End a service and start another one at its address, with the same model unless its role differs."""
    await service.kill()
    rig.services.remove(service)
    role = role or service.role
    again = await start_service(role, salt=int(role == DRAFT), listen=service.address, vocabulary=vocabulary)
    rig.services.append(again)
    return again


async def poll_until_refused(pools: ReplicaPools, caplog: pytest.LogCaptureFixture, num_refused: int = 1) -> None:
    """Poll until `num_refused` refusals have been logged, then some more: none of them is logged again."""
    async with asyncio.timeout(60):
        while len(refusals(caplog)) < num_refused:
            await pools.poll()
        for _ in range(5):
            await pools.poll()
    assert len(refusals(caplog)) == num_refused


async def poll_until_all_live(pools: ReplicaPools, num_replicas: int) -> None:
    async with asyncio.timeout(60):
        while sum(replica.is_alive for replica in pools.all_replicas()) < num_replicas:
            await pools.poll()


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def draft_states(coordinator: Coordinator) -> list[tuple[str, str]]:
    replicas = coordinator.pools.addressed_replicas()
    return [(replica.pool, replica.state) for replica in replicas if replica.role == DRAFT]


async def drafted(coordinator: Coordinator) -> int:
    return (await coordinator.generate(request(max_new_tokens=20))).finished.stats.num_draft_tokens


async def test_a_draft_redeployed_with_another_tokenizer_is_left_out_until_it_has_the_right_one_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        stream = coordinator.stub.Generate(request(max_new_tokens=200))
        output = await read_until(stream, 10)
        other = await redeploy(rig, rig.draft, vocabulary="other")
        await poll_until_refused(coordinator.pools, caplog)
        assert "fingerprint other, the tokenizer has table" in refusals(caplog)[0]
        assert ("", "refused") in draft_states(coordinator)
        await read_rest(stream, output)
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 200)
        assert (await drafted(coordinator), other.worker.steps) == (0, [])
        await redeploy(rig, other)
        await poll_until_all_live(coordinator.pools, 2)
        assert await drafted(coordinator) > 0
        assert ("default", "up") in draft_states(coordinator)


async def test_a_draft_that_is_refused_a_second_time_is_logged_a_second_time(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        other = await redeploy(rig, rig.draft, vocabulary="other")
        await poll_until_refused(coordinator.pools, caplog)
        fitting = await redeploy(rig, other)
        await poll_until_all_live(coordinator.pools, 2)
        await redeploy(rig, fitting, vocabulary="other")
        await poll_until_refused(coordinator.pools, caplog, num_refused=2)


async def test_another_target_serves_while_one_has_the_wrong_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig(targets=2) as rig:
        coordinator = await rig.coordinator()
        first, second = rig.of_role(TARGET)
        other = await redeploy(rig, first, vocabulary="other")
        await poll_until_refused(coordinator.pools, caplog)
        assert coordinator.pools.is_ready
        for _ in range(4):
            output = await coordinator.generate(request())
            assert output.token_ids == second.worker.greedy_continuation(PROMPT, 24)
        assert other.worker.steps == []


async def test_without_a_fitting_target_requests_are_refused_until_one_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Rig() as rig:
        told: list[bool] = []

        async def tell(is_ready: bool) -> None:
            told.append(is_ready)

        coordinator = await rig.coordinator()
        pools = ReplicaPools("table", open_link, static_endpoints=[(TARGET, rig.target.address)], on_readiness=tell)
        await poll_until_all_live(pools, 1)
        other = await redeploy(rig, rig.target, vocabulary="other")
        await poll_until_refused(coordinator.pools, caplog)
        await poll_until_refused(pools, caplog, num_refused=2)
        with pytest.raises(Exception, match="no target replica") as caught:
            await coordinator.generate(request())
        assert from_rpc_error(caught.value).reason == "REPLICA_UNAVAILABLE"  # type: ignore[arg-type]
        await redeploy(rig, other)
        await poll_until_all_live(pools, 1)
        await pools.poll()
        assert told == [True, False, True]
        await pools.close()
        await poll_until_all_live(coordinator.pools, 2)
        assert (await coordinator.generate(request())).token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)


async def test_a_registered_replica_that_was_refused_is_used_once_it_fits(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig() as rig:
        other = await redeploy(rig, rig.draft, vocabulary="other")
        registry = open_registry(f"memory://{id(rig)}")
        for service in rig.services:
            await registry.publish(ReplicaRecord(service.address, service.engine.info()), ttl_s=600.0)
        pools = ReplicaPools("table", open_link, registry=registry)
        await poll_until_refused(pools, caplog)
        assert pools.is_ready
        await redeploy(rig, other)
        await poll_until_all_live(pools, 2)
        assert [replica.address for replica in pools.drafts("default")] == [other.address]
        await pools.close()
        await registry.close()


@pytest.mark.parametrize("role", [DRAFT, TARGET])
async def test_an_endpoint_that_becomes_a_service_of_the_other_role_is_left_out(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        (service,) = rig.of_role(role)
        swapped = await redeploy(rig, service, TARGET if role == DRAFT else DRAFT)
        await poll_until_refused(coordinator.pools, caplog)
        assert f"{service.address} is not a {role} service" in refusals(caplog)[0]
        assert coordinator.pools.is_ready is (role == DRAFT)
        await redeploy(rig, swapped, role)
        await poll_until_all_live(coordinator.pools, 2)
        assert (await coordinator.generate(request())).finished.stats.num_draft_tokens > 0


async def test_an_endpoint_where_nothing_listens_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    pools = ReplicaPools("table", open_link, static_endpoints=[(TARGET, f"127.0.0.1:{free_port()}")])
    for _ in range(3):
        await pools.poll()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "does not answer yet" in warning
    await pools.close()


@pytest.mark.parametrize("role", [DRAFT, TARGET])
async def test_a_replica_that_hangs_until_its_record_expires_leaves_the_others_in_use(role: str) -> None:
    async with Rig() as rig, silent_service() as address:
        registry = open_registry(f"memory://{id(rig)}")
        for service in rig.services:
            await registry.publish(ReplicaRecord(service.address, service.engine.info()), ttl_s=600.0)
        (like,) = rig.of_role(role)
        engine = replace(like.engine.info(), replica_id="silent")
        await registry.publish(ReplicaRecord(address, engine), ttl_s=600.0)
        pools = ReplicaPools("table", open_link, registry=registry)
        await pools.poll()  # leaves it while it is being asked what it is
        for _ in range(2):
            await registry.remove("silent")
            await pools.poll()
            await registry.publish(ReplicaRecord(address, engine), ttl_s=600.0)
            await pools.poll()
        await poll_until_all_live(pools, 2)
        await pools.close()
        await registry.close()
