"""Metrics of replicas under load, idle, full and loading, as Prometheus scrapes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specdec.contract.errors import InvalidRequest, ResourceExhausted
from specdec.contract.types import VerifyRequest
from specdec.engine.loader import load_worker
from specdec.engine.loop.replica_engine import LOCAL_REPLICA
from specdec.engine.options import EAGER, CompileOptions, LoadRequest
from specdec.observability.engine_metrics import EngineMetrics
from specdec.service.replica_main import serve_replica
from specdec.settings.target import TargetSettings
from target_service.__main__ import KIND
from target_service.verifier import Verifier
from tests.support.coordinator_rig import request, started_coordinator
from tests.support.output import read_until
from tests.support.round_driver import make_round
from tests.support.scraping import Endpoint, Page, served
from tests.support.stack import free_port
from tests.support.table_worker import TableWorker, held_steps_are_no_hangs
from tests.support.tiny_models import build_tiny_pair

__all__ = ["held_steps_are_no_hangs"]

NO_DRAFT = np.empty(0, dtype=np.uint32)


async def test_blocks_of_a_running_stream_are_active_and_those_of_an_ended_one_are_idle() -> None:
    async with started_coordinator() as (rig, coordinator):
        with served(rig.target.metrics.registry) as endpoint:
            page = await endpoint.scrape()
            num_blocks = page.value("kv_blocks")
            assert page.value("kv_blocks", state="free") == num_blocks
            rig.target.worker.gate.clear()
            stream = coordinator.stub.Generate(request(tuple(range(2, 24)) * 3, session_id="s", max_new_tokens=8))
            page = await endpoint.until(lambda page: page.value("num_requests_running") == 1)
            assert page.value("kv_blocks", state="active") >= 5  # 66 tokens in blocks of 16
            assert page.value("kv_cache_usage_perc") == page.value("kv_blocks", state="active") / num_blocks
            assert rig.target.engine.info().kv_usage == page.value("kv_cache_usage_perc")
            rig.target.worker.gate.set()
            await read_until(stream, 8)
            page = await endpoint.until(lambda page: page.value("kv_blocks", state="active") == 0)
            assert page.value("kv_cache_usage_perc") == rig.target.engine.info().kv_usage == 0
            assert page.value("num_sessions") == 1  # its KV is kept for the next turn
            assert page.value("kv_blocks", state="idle") >= 5
            assert page.value("kv_blocks") == num_blocks


async def test_calls_that_no_step_has_taken_wait_and_their_number_falls_again() -> None:
    async with started_coordinator() as (rig, coordinator):
        with served(rig.target.metrics.registry) as endpoint:
            rig.target.worker.gate.clear()
            first, *others = [request((token, *range(2, 20)) * 4, max_new_tokens=4) for token in range(2, 8)]
            asked = [asyncio.create_task(coordinator.generate(first))]
            await endpoint.until(lambda page: page.value("num_requests_running") == 1)
            asked += [asyncio.create_task(coordinator.generate(other)) for other in others]
            page = await endpoint.until(lambda page: page.value("num_requests_waiting") == len(others))
            assert page.value("num_requests_running") == 1
            rig.target.worker.gate.set()
            await asyncio.gather(*asked)
            page = await endpoint.scrape()
            assert page.value("num_requests_waiting") == page.value("num_requests_running") == 0
            assert page.value("prefill_backlog_tokens") == 0
            assert page.value("queue_seconds_count") >= len(asked)
            assert page.value("queue_seconds_sum") > 0
            assert page.value("step_seconds_count") == page.value("iteration_tokens_total_count")


async def test_the_tokens_of_long_prompts_that_have_not_run_are_the_backlog() -> None:
    worker = TableWorker(num_blocks=64)
    metrics = EngineMetrics("table", role="target")
    verifier = Verifier(worker, LOCAL_REPLICA, observer=metrics)
    metrics.watch_engine(verifier.stats, verifier.info)
    worker.gate.clear()
    with served(metrics.registry) as endpoint:
        calls = [asyncio.create_task(verifier.verify(_round(name, 200))) for name in ("a", "b")]
        page = await endpoint.until(lambda page: page.value("prefill_backlog_tokens") >= 200)
        worker.gate.set()
        await asyncio.gather(*calls)
        page = await endpoint.until(lambda page: page.value("prefill_backlog_tokens") == 0)
        assert page.value("num_requests_waiting") == 0
    await verifier.close()


async def test_a_call_that_no_block_is_left_for_is_counted() -> None:
    metrics = EngineMetrics("table", role="target")
    verifier = Verifier(TableWorker(num_blocks=4), LOCAL_REPLICA, observer=metrics)
    metrics.watch_engine(verifier.stats, verifier.info)
    with served(metrics.registry) as endpoint:
        assert (await endpoint.scrape()).value("kv_exhausted_total") == 0
        with pytest.raises(ResourceExhausted):
            await verifier.verify(_round("s", 100))
        assert (await endpoint.scrape()).value("kv_exhausted_total") == 1
    await verifier.close()


async def test_a_turn_that_gives_up_its_blocks_is_counted_as_preempted() -> None:
    """Of eight blocks, session a holds three and the younger b four; then a grows to seven."""
    metrics = EngineMetrics("table", role="target")
    verifier = Verifier(TableWorker(num_blocks=8), LOCAL_REPLICA, observer=metrics)
    metrics.watch_engine(verifier.stats, verifier.info)
    for call in (_round("a", 40), _round("b", 60), _round("a", 100, round_id=2)):
        await verifier.verify(call)
    with served(metrics.registry) as endpoint:
        assert (await endpoint.scrape()).value("num_preemptions_total") == 1
    await verifier.close()


async def test_metrics_are_served_while_the_model_is_loaded(tmp_path: Path) -> None:
    """The load is the test's own: it scrapes the process that waits for it, and then refuses."""
    target, _ = build_tiny_pair("llama", tmp_path)
    address = f"127.0.0.1:{free_port()}"
    settings = TargetSettings(model=str(target), listen="127.0.0.1:0", redis_url="memory://", metrics=address,
                              pool="big")  # fmt: skip
    pages: list[Page] = []

    def load(num_decode_rows: int, note_loaded: Callable[[float], None]) -> TableWorker:
        note_loaded(0.25)
        pages.append(Endpoint(address).scrape_now())
        raise InvalidRequest("refused by the test", field="model")

    with pytest.raises(InvalidRequest):
        await serve_replica(KIND, settings, load)
    (page,) = pages
    labels = {"model_name": target.name, "role": "target", "pool": "big"}
    assert page.value("load_phase", phase="loading", **labels) == 1
    assert page.value("load_phase", **labels) == 1
    assert page.value("load_progress", **labels) == 0.25
    assert page.value("load_seconds", **labels) > 0
    for name in ("kv_exhausted_total", "num_preemptions_total", "device_stalled", "num_requests_waiting", "kv_blocks",
                 "kv_cache_usage_perc", "prefill_backlog_tokens", "busy_seconds_total"):  # fmt: skip
        assert page.value(name, **labels) == 0
    assert page.value("call_failures_total", reason="KV_EXHAUSTED", **labels) == 0


def test_the_share_of_the_weights_that_are_loaded_rises_to_all(tmp_path: Path) -> None:
    shares: list[float] = []
    target, _ = build_tiny_pair("llama", tmp_path)
    load_worker(
        LoadRequest(str(target), device="cpu", dtype="float32", num_kv_blocks=4, self_check=False,
                    compiling=CompileOptions(EAGER), note_loaded=shares.append)
    ).close()  # fmt: skip
    assert len(shares) > 3
    assert shares == sorted(set(shares))
    assert shares[-1] == 1


def _round(session_id: str, num_tokens: int, round_id: int = 1) -> VerifyRequest:
    """Return a round of committed tokens of the table worker's vocabulary, without draft tokens."""
    tokens = [2 + (index + ord(session_id)) % 20 for index in range(num_tokens)]
    return VerifyRequest(make_round(tokens, session_id=session_id, round_id=round_id), NO_DRAFT, ())
