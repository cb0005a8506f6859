"""Metrics of a coordinator's requests and replicas, as an operator reads them from the metrics endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from coordinator.generation.interrupted_turns import InterruptedTurns
from coordinator.generation.request_log import identity_of
from specdec.contract.errors import Unavailable
from specdec.contract.tenant import DEFAULT_TENANT, SessionKey
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.state.redis_store import open_store
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, Rig, eventually, request
from tests.support.output import read_rest, read_until
from tests.support.scraping import Endpoint, Page, served
from tests.support.table_services import start_service
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]

ENDED = ("success", "failures", "interruptions", "cancellations", "refusals")


def ends(page: Page) -> dict[tuple[str, str], float]:
    """Return the requests that have ended, by counter and by its label (reason or cause)."""
    return {
        (counter, next(value for name, value in labels if name != "model_name")): count
        for counter in ENDED
        for labels, count in page.series(f"request_{counter}_total").items()
        if count
    }


@asynccontextmanager
async def metered(**settings: Any) -> AsyncIterator[tuple[Rig, Coordinator, Endpoint]]:
    """A coordinator with these settings, and its metrics endpoint."""
    async with Rig() as rig:
        coordinator = await rig.coordinator(**settings)
        with served(coordinator.metrics.registry) as endpoint:
            yield rig, coordinator, endpoint


async def ended(coordinator: Coordinator) -> None:
    await eventually(lambda: not coordinator.generations.num_running)


async def break_stream(rig: Rig, coordinator: Coordinator) -> int:
    """Kill every service while a stream runs on session s; return the number of tokens that it gave."""
    stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
    output = await read_until(stream, 1)
    await asyncio.gather(*(service.kill() for service in rig.services))
    with pytest.raises(grpc.aio.AioRpcError):
        await read_rest(stream, output)
    await ended(coordinator)
    return len(output.token_ids)


async def restart_services(rig: Rig, coordinator: Coordinator) -> None:
    """Start services at the addresses of the killed ones, and wait until the coordinator knows them."""
    rig.services = [
        await start_service(service.role, salt=0 if service.role == "target" else 1, listen=service.address)
        for service in rig.services
    ]
    while not all(replica.is_alive for replica in coordinator.pools.all_replicas()):
        await coordinator.pools.poll()


async def test_a_stream_that_its_client_cancels_counts_as_cancelled_and_not_as_failed() -> None:
    async with metered(recovery_s=0.0) as (_, coordinator, endpoint):
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        await read_until(stream, 1)
        stream.cancel()
        await ended(coordinator)
        assert ends(await endpoint.scrape()) == {("cancellations", "client_left"): 1.0}


async def test_a_request_whose_session_is_deleted_counts_as_cancelled_and_not_as_failed() -> None:
    async with metered(recovery_s=0.0) as (_, coordinator, endpoint):
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        await read_until(stream, 1)
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
        await ended(coordinator)
        assert ends(await endpoint.scrape()) == {("cancellations", "session_deleted"): 1.0}


async def test_a_request_that_is_not_resumed_in_time_counts_as_failed() -> None:
    async with metered(recovery_s=0.0) as (rig, coordinator, endpoint):
        await coordinator.generate(request(max_new_tokens=4))
        await break_stream(rig, coordinator)
        page = await endpoint.until(lambda page: ("failures", "REPLICA_UNAVAILABLE") in ends(page))
        assert ends(page) == {
            ("success", "length"): 1.0,
            ("interruptions", "REPLICA_UNAVAILABLE"): 1.0,
            ("failures", "REPLICA_UNAVAILABLE"): 1.0,
        }


async def test_a_request_that_is_resumed_does_not_count_as_failed() -> None:
    async with metered(recovery_s=3600.0) as (rig, coordinator, endpoint):
        num_held = await break_stream(rig, coordinator)
        await restart_services(rig, coordinator)
        await coordinator.generate(request(None, session_id="s", resume_from=num_held))
        page = await endpoint.scrape()
        assert ends(page) == {("interruptions", "REPLICA_UNAVAILABLE"): 1.0, ("success", "length"): 1.0}
        assert page.value("resumed_turns_total") == 1
        assert page.value("turns_total", model_fingerprint="table-0-table") == 1


async def test_a_request_that_another_coordinator_finishes_does_not_count_as_failed() -> None:
    """The turn is noted as interrupted after its end elsewhere, so that the test depends on no time."""
    async with metered() as (rig, coordinator, endpoint):
        await coordinator.generate(request(session_id="finished", max_new_tokens=2))
        record = await rig.store.load("finished")
        assert record is not None
        assert record.request is not None
        turn = identity_of("finished", record.request)
        interrupted = InterruptedTurns(rig.store, coordinator.metrics, recovery_s=0.0)
        interrupted.note(SessionKey(DEFAULT_TENANT, "finished"), turn, "LEASE_LOST")
        interrupted.note(SessionKey(DEFAULT_TENANT, "gone"), turn, "STORE_UNAVAILABLE")
        page = await endpoint.until(lambda page: ("failures", "STORE_UNAVAILABLE") in ends(page))
        await interrupted.close()
        assert ends(page) == {
            ("success", "length"): 1.0,
            ("interruptions", "LEASE_LOST"): 1.0,
            ("interruptions", "STORE_UNAVAILABLE"): 1.0,
            ("failures", "STORE_UNAVAILABLE"): 1.0,
        }
        assert page.value("leases_lost_total") == 1


async def test_a_request_that_a_drain_ends_is_interrupted_since_another_coordinator_may_resume_it() -> None:
    async with metered() as (_, coordinator, endpoint):
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        await read_until(stream, 1)
        await coordinator.generations.drain(0.0)
        assert ends(await endpoint.scrape()) == {("interruptions", "DRAINING"): 1.0}


async def test_a_request_that_does_not_start_counts_as_refused_by_its_reason() -> None:
    async with metered(max_queue=1) as (rig, coordinator, endpoint):
        assert (await endpoint.scrape()).value("request_capacity") == 1
        for bad in (request(temperature=-1.0), request(draft_pool="nowhere")):
            with pytest.raises(grpc.aio.AioRpcError):
                await coordinator.generate(bad)
        rig.target.worker.gate.clear()
        first = asyncio.create_task(coordinator.generate(request(session_id="s", max_new_tokens=2)))
        await endpoint.until(lambda page: page.value("num_requests_running") == 1)
        with pytest.raises(grpc.aio.AioRpcError):
            await coordinator.generate(request(session_id="t"))
        rig.target.worker.gate.set()
        await first
        refused = {reason: count for (counter, reason), count in ends(await endpoint.scrape()).items()
                   if counter == "refusals"}  # fmt: skip
        assert refused == {"INVALID_REQUEST": 1.0, "POOL_NOT_FOUND": 1.0, "QUEUE_FULL": 1.0}


async def test_a_call_of_a_store_that_cannot_be_reached_is_counted() -> None:
    metrics, store = CoordinatorMetrics("m"), open_store("redis://127.0.0.1:1")
    metrics.watch_store(lambda: store.num_failures)
    with served(metrics.registry) as endpoint:
        with pytest.raises(Unavailable):
            await store.load("s")
        assert (await endpoint.scrape()).value("store_errors_total") == 1
    await store.close()


async def test_series_that_alerts_name_are_zero_before_the_first_request() -> None:
    async with metered() as (_, _, endpoint):
        page = await endpoint.scrape()
        for name in ("store_errors_total", "leases_lost_total", "resumed_turns_total", "num_requests_running",
                     "num_requests_admitting", "commit_seconds_count"):  # fmt: skip
            assert page.value(name) == 0
        for reason in ("REPLICA_UNAVAILABLE", "STORE_UNAVAILABLE", "INTERNAL", "KV_EXHAUSTED"):
            assert page.value("request_failures_total", reason=reason) == 0
        assert page.value("request_refusals_total", reason="QUEUE_FULL") == 0
        for wait in ("draft", "target", "store", "client"):
            assert page.value("round_wait_seconds_total", on=wait) == 0
        assert page.value("draft_late_total", pool="default") == 0
        assert page.value("target_only_steps_total", pool="default", cause="no_replica") == 0


async def test_rounds_whose_draft_misses_its_deadline_are_late_and_have_no_draft_token() -> None:
    async with metered(draft_timeout_s=0.2) as (rig, coordinator, endpoint):
        (draft,) = [service for service in rig.services if service.role == "draft"]
        draft.worker.gate.clear()
        output = await coordinator.generate(request(gamma=3, max_new_tokens=4))
        draft.worker.gate.set()
        assert output.finished is not None
        page = await endpoint.scrape()
        assert page.value("draft_late_total", pool="default") >= 1
        late = page.value("target_only_steps_total", pool="default", cause="late")
        assert page.value("draft_late_total", pool="default") == late


async def test_a_request_shows_its_times_its_gamma_and_its_pool() -> None:
    async with metered() as (_, coordinator, endpoint):
        output = await coordinator.generate(request(gamma=3, max_new_tokens=12))
        page = await endpoint.scrape()
        assert output.finished is not None
        stats = output.finished.stats
        assert page.value("spec_decode_num_draft_tokens_total", pool="default") == stats.num_draft_tokens
        assert page.value("draft_gamma_count", pool="default") == stats.num_rounds
        assert page.value("commit_seconds_count") == stats.num_rounds
        assert page.value("round_wait_seconds_total", on="draft") == pytest.approx(stats.draft_s)
        assert page.value("round_wait_seconds_total", on="target") == pytest.approx(stats.verify_s)
        assert page.value("round_wait_seconds_total", on="client") > 0
        parts = [page.value(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
        assert sum(parts) == pytest.approx(page.value("e2e_request_latency_seconds_sum"))
        assert page.value("request_prompt_tokens_sum") == 4


async def test_the_counts_of_replicas_follow_a_killed_replica_and_its_return() -> None:
    async with metered() as (rig, coordinator, endpoint):

        def states(page: Page, role: str) -> tuple[float, float]:
            up, down = (page.value("replicas", role=role, pool="default", state=state) for state in ("up", "down"))
            return up, down

        page = await endpoint.scrape()
        assert (states(page, "target"), states(page, "draft")) == ((1, 0), (1, 0))
        await rig.draft.kill()
        while any(replica.is_alive for replica in coordinator.pools.drafts("default")):
            await coordinator.pools.poll()
        page = await endpoint.scrape()
        assert (states(page, "target"), states(page, "draft")) == ((1, 0), (0, 1))
        back = await start_service("draft", salt=1, listen=rig.draft.address)
        rig.services = [rig.target, back]
        while not all(replica.is_alive for replica in coordinator.pools.all_replicas()):
            await coordinator.pools.poll()
        assert states(await endpoint.scrape(), "draft") == (1, 0)
