"""Metrics under OpenTelemetry's names for generative AI, as a collector receives them from coordinator and gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from specdec.contract.errors import InvalidRequest
from specdec.observability.genai_metrics import GenAiMetrics, open_genai_metrics
from tests.support.coordinator_rig import PROMPT, Rig, eventually, read_until, request
from tests.support.gateway_rig import RunningGateway, running_gateway
from tests.support.stack import free_port
from tests.support.trace_collector import ExportedHistogram, TraceCollector, collector

__all__ = ["collector"]

SERVER = ("request.duration", "time_to_first_token", "time_per_output_token")
ATTRIBUTES = {
    "gen_ai.operation.name": "text_completion",
    "gen_ai.provider.name": "specdec",
    "gen_ai.request.model": "table",
    "gen_ai.response.model": "table",
}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig() as rig:
        yield rig


def served(collector: TraceCollector, name: str) -> list[ExportedHistogram]:
    return collector.histograms(f"gen_ai.server.{name}")


async def test_a_coordinator_sends_the_times_of_the_requests_that_it_serves(
    rig: Rig, collector: TraceCollector
) -> None:
    coordinator = await rig.coordinator()
    coordinator.metrics.genai = GenAiMetrics(collector.endpoint, "specdec-coordinator")
    outputs = [await coordinator.generate(request()) for _ in range(2)]
    outputs.append(await coordinator.generate(request(max_new_tokens=1)))
    await coordinator.stop()
    await asyncio.to_thread(coordinator.metrics.genai.close)

    (duration,), (first,), (each,) = (served(collector, name) for name in SERVER)
    for series in (duration, first, each):
        assert (series.service, series.unit, series.attributes) == ("specdec-coordinator", "s", ATTRIBUTES)
    assert (duration.count, first.count, each.count) == (3, 3, 2)  # one output has no token after the first
    stats = [output.finished.stats for output in outputs if output.finished is not None]
    assert duration.total == pytest.approx(sum(each.e2el_s for each in stats), rel=1e-4)
    assert first.total == pytest.approx(sum(each.ttft_s for each in stats), rel=1e-4)
    assert duration.bounds[:3] == (0.01, 0.02, 0.04)
    assert (first.bounds[0], each.bounds[0]) == (0.001, 0.01)
    assert collector.histograms("gen_ai.client.token.usage") == []


async def test_a_request_that_does_not_finish_has_a_duration_with_its_cause_alone(
    rig: Rig, collector: TraceCollector
) -> None:
    coordinator = await rig.coordinator()
    coordinator.metrics.genai = GenAiMetrics(collector.endpoint, "specdec-coordinator")
    stream = coordinator.stub.Generate(request(max_new_tokens=480))
    await read_until(stream, 1)
    stream.cancel()
    await eventually(lambda: not coordinator.generations.num_running)
    await coordinator.stop()
    await asyncio.to_thread(coordinator.metrics.genai.close)
    (duration,) = served(collector, "request.duration")
    assert (duration.count, duration.attributes["error.type"]) == (1, "client_left")
    assert served(collector, "time_to_first_token") == []


async def test_a_gateway_sends_the_tokens_of_what_it_requests_by_operation(rig: Rig, collector: TraceCollector) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as gateway:
        gateway.gateway.metrics.genai = genai = GenAiMetrics(collector.endpoint, "specdec-gateway")
        for stream in (False, True):
            await complete(gateway, n=2, stream=stream)
        await complete(gateway, session_id="s", expected_status=200)
        await asyncio.to_thread(genai.close)

    usage = {
        series.attributes["gen_ai.token.type"]: series for series in collector.histograms("gen_ai.client.token.usage")
    }
    for kind, num_tokens in (("input", len(PROMPT)), ("output", 12)):
        assert usage[kind].attributes == {**ATTRIBUTES, "gen_ai.token.type": kind}
        assert (usage[kind].service, usage[kind].unit) == ("specdec-gateway", "{token}")
        assert (usage[kind].count, usage[kind].total) == (5, 5 * num_tokens)
    (duration,) = collector.histograms("gen_ai.client.operation.duration")
    assert (duration.count, duration.attributes) == (5, ATTRIBUTES)


async def test_a_request_that_a_coordinator_refuses_has_the_reason_and_no_tokens(
    rig: Rig, collector: TraceCollector
) -> None:
    coordinator = await rig.coordinator(max_queue=0)
    async with running_gateway(coordinator.server.address) as gateway:
        gateway.gateway.metrics.genai = genai = GenAiMetrics(collector.endpoint, "specdec-gateway")
        await complete(gateway, expected_status=429)
        await asyncio.to_thread(genai.close)
    (duration,) = collector.histograms("gen_ai.client.operation.duration")
    assert duration.attributes == {**ATTRIBUTES, "error.type": "QUEUE_FULL"}
    assert collector.histograms("gen_ai.client.token.usage") == []


async def complete(gateway: RunningGateway, *, expected_status: int = 200, **fields: object) -> None:
    body = {"prompt": list(PROMPT), "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    answer = await gateway.http.post("/v1/completions", json=body)
    assert answer.status_code == expected_status, answer.text


async def test_a_collector_that_cannot_be_reached_costs_metrics_and_no_request(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    coordinator.metrics.genai = GenAiMetrics(f"http://127.0.0.1:{free_port()}", "specdec-coordinator")
    output = await coordinator.generate(request())
    assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
    await asyncio.to_thread(coordinator.metrics.genai.close)


def test_metrics_need_a_collector() -> None:
    with pytest.raises(InvalidRequest, match="no collector is named; set --otlp-endpoint") as refused:
        open_genai_metrics("", service="s", environ={})
    assert refused.value.field == "otlp_metrics"
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert open_genai_metrics("", service="s", environ={**named, "OTEL_SDK_DISABLED": "true"}) is None
