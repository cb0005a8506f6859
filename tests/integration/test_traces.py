"""Traces of requests through a real coordinator and real replicas, as a collector receives them over OTLP."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator
from itertools import pairwise

import grpc
import pytest

from coordinator.generation.request_trace import DRAFT_SERVICE, TARGET_SERVICE
from specdec.client import AsyncClient, Client
from specdec.contract.errors import InvalidRequest
from specdec.observability.logging import configure_logging
from specdec.observability.tracing import Tracing
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, request
from tests.support.gateway_rig import running_gateway
from tests.support.log_stream import lines, stream
from tests.support.output import Output, read_until
from tests.support.stack import free_port
from tests.support.trace_collector import ExportedSpan, TraceCollector, collector

__all__ = ["collector", "stream"]

CALL = "specdec.v1.CoordinatorService/Generate"
REQUEST = "text_completion table"
TRACE_ID, CALLER_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig() as rig:
        yield rig


async def traced(
    coordinator: Coordinator,
    tracing: Tracing,
    collector: TraceCollector,
    message: pb.GenerateRequest,
    *,
    traceparent: str = "",
) -> Output:
    """Run a request to its end, and export its spans."""
    output = Output()
    metadata = (("traceparent", traceparent),) if traceparent else ()
    async for response in coordinator.stub.Generate(message, metadata=metadata):
        output.add(response)
    # The servicer's span ends after the stream's last message was sent.
    while len(collector.spans) < 1 + num_spans(output):
        await asyncio.to_thread(tracing.flush)
    return output


def num_spans(output: Output) -> int:
    """Number of spans of a request, that of its call left out: its own, its rounds and their calls of replicas."""
    assert output.finished is not None
    stats = output.finished.stats
    return 1 + 3 * stats.num_rounds - stats.num_target_only_steps


async def test_a_request_gives_one_tree_of_its_rounds_and_their_calls(rig: Rig, collector: TraceCollector) -> None:
    tracing = Tracing(collector.endpoint, 1.0, "specdec-coordinator")
    coordinator = await rig.coordinator(tracing=tracing)
    output = await traced(coordinator, tracing, collector, request(gamma=3))
    tracing.close()
    stats, usage = output.finished.stats, output.finished.usage

    (call,) = collector.named(CALL)
    (whole,) = collector.children(call)
    rounds = collector.children(whole)
    calls = [span for one in rounds for span in collector.children(one)]
    assert call.parent_id == ""
    assert len(collector.spans) == 2 + len(rounds) + len(calls)
    assert {span.trace_id for span in collector.spans} == {call.trace_id}

    assert (call.service, whole.service, whole.name) == ("specdec-coordinator", "specdec-coordinator", REQUEST)
    assert whole.attributes["gen_ai.operation.name"] == "text_completion"
    assert whole.attributes["gen_ai.usage.input_tokens"] == usage.num_prompt_tokens
    assert whole.attributes["gen_ai.usage.output_tokens"] == usage.num_output_tokens
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["length"]

    assert [span.name for span in rounds] == ["round"] * stats.num_rounds
    assert total(rounds, "gamma") == stats.num_draft_tokens
    assert total(rounds, "accepted_tokens") == stats.num_accepted_tokens
    assert total(rounds, "output_tokens") == usage.num_output_tokens
    assert total(rounds, "wire_bytes") == stats.wire_bytes
    assert sum("specdec.round.target_only_cause" in span.attributes for span in rounds) == stats.num_target_only_steps


def total(rounds: list[ExportedSpan], name: str) -> int:
    return sum(span.attributes[f"specdec.round.{name}"] for span in rounds)


async def test_the_calls_of_draft_and_target_lie_within_their_round_one_after_the_other(
    rig: Rig, collector: TraceCollector
) -> None:
    tracing = Tracing(collector.endpoint, 1.0, "specdec-coordinator")
    coordinator = await rig.coordinator(tracing=tracing)
    await traced(coordinator, tracing, collector, request(gamma=3))
    tracing.close()
    rounds = collector.named("round")
    assert rounds
    for one in rounds:
        calls = collector.children(one)
        assert all(call.is_within(one) for call in calls)
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(calls))
        services = [(call.service, call.name, call.attributes["specdec.replica"]) for call in calls]
        verified = (TARGET_SERVICE, "verify", rig.target.address)
        drafted = [(DRAFT_SERVICE, "propose", rig.draft.address)] if one.attributes["specdec.round.gamma"] else []
        assert services == [*drafted, verified]
        assert all({"specdec.wait_ms", "specdec.step_ms"} <= call.attributes.keys() for call in calls)


async def test_the_span_that_a_client_names_is_the_parent(rig: Rig, collector: TraceCollector) -> None:
    tracing = Tracing(collector.endpoint, 0.0, "specdec-coordinator")  # the caller's choice wins over the share
    coordinator = await rig.coordinator(tracing=tracing)
    await traced(coordinator, tracing, collector, request(), traceparent=f"00-{TRACE_ID}-{CALLER_ID}-01")
    tracing.close()
    (call,) = collector.named(CALL)
    assert call.parent_id == CALLER_ID
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}


@pytest.mark.parametrize(
    ("share", "traceparent"), [(1.0, f"00-{TRACE_ID}-{CALLER_ID}-00"), (0.0, ""), (0.0, "00-no-trace-01")]
)
async def test_a_request_that_is_not_sampled_exports_nothing(
    rig: Rig, collector: TraceCollector, share: float, traceparent: str
) -> None:
    tracing = Tracing(collector.endpoint, share, "specdec-coordinator")
    coordinator = await rig.coordinator(tracing=tracing)
    metadata = (("traceparent", traceparent),) if traceparent else ()
    assert [response async for response in coordinator.stub.Generate(request(), metadata=metadata)]
    await coordinator.stop()  # the call has ended on both sides
    await asyncio.to_thread(tracing.close)
    assert collector.spans == []


async def test_a_refused_request_has_a_failed_span_with_the_reason(rig: Rig, collector: TraceCollector) -> None:
    tracing = Tracing(collector.endpoint, 1.0, "specdec-coordinator")
    coordinator = await rig.coordinator(tracing=tracing)
    with pytest.raises(grpc.aio.AioRpcError):
        await coordinator.generate(request(max_new_tokens=100_000))
    await asyncio.to_thread(tracing.close)
    (call,) = collector.spans
    assert call.is_failed
    assert call.attributes["error.type"] == "CONTEXT_TOO_LONG"


async def test_a_request_that_its_client_leaves_has_a_span_with_the_cause(rig: Rig, collector: TraceCollector) -> None:
    tracing = Tracing(collector.endpoint, 1.0, "specdec-coordinator")
    coordinator = await rig.coordinator(tracing=tracing)
    stream = coordinator.stub.Generate(request(max_new_tokens=480))
    await read_until(stream, 1)
    stream.cancel()
    await eventually(lambda: not coordinator.generations.num_running)
    await coordinator.stop()  # the call has ended on both sides
    await asyncio.to_thread(tracing.close)
    (whole,) = collector.named(REQUEST)
    assert whole.attributes["specdec.cancel_cause"] == "client_left"
    assert whole.attributes["gen_ai.usage.output_tokens"] == total(collector.named("round"), "output_tokens") < 480
    assert not whole.is_failed


async def test_a_request_that_another_coordinator_resumes_is_traced_there(rig: Rig, collector: TraceCollector) -> None:
    tracing = Tracing(collector.endpoint, 1.0, "specdec-coordinator")
    first, second = await rig.coordinator(), await rig.coordinator(tracing=tracing)
    stream = first.stub.Generate(request(session_id="s", request_id="r", max_new_tokens=480))
    held = await read_until(stream, 1)
    await first.stop()
    resumption = request(None, session_id="s", request_id="r", resume_from=len(held.token_ids))
    assert (await second.generate(resumption)).finished is not None
    await second.stop()  # the call has ended on both sides
    await asyncio.to_thread(tracing.close)
    (whole,) = collector.named(REQUEST)
    assert whole.attributes["specdec.resumed"] is True
    assert whole.attributes["gen_ai.usage.output_tokens"] == 480
    assert 0 < total(collector.named("round"), "output_tokens") < 480


async def test_a_collector_that_cannot_be_reached_costs_spans_and_no_request(rig: Rig) -> None:
    tracing = Tracing(f"http://127.0.0.1:{free_port()}", 1.0, "specdec-coordinator")
    coordinator = await rig.coordinator(tracing=tracing)
    output = await coordinator.generate(request())
    assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
    await coordinator.stop()  # the call has ended on both sides
    await asyncio.to_thread(tracing.close)


async def test_log_records_of_a_request_carry_the_ids_of_its_trace(
    rig: Rig, collector: TraceCollector, stream: io.StringIO
) -> None:
    configure_logging("json", "info", service="coordinator", stream=stream)
    tracing = Tracing(collector.endpoint, 1.0, "specdec-coordinator")
    coordinator = await rig.coordinator(tracing=tracing)
    await traced(coordinator, tracing, collector, request())
    tracing.close()
    logging.getLogger("specdec.test").info("outside")
    (call,) = collector.named(CALL)
    (finished,) = [line for line in lines(stream) if line["message"] == "request finished"]
    assert (finished["trace_id"], finished["span_id"]) == (call.trace_id, call.span_id)
    assert "trace_id" not in lines(stream)[-1]


async def test_an_http_request_is_one_trace_through_gateway_and_coordinator(
    rig: Rig, collector: TraceCollector
) -> None:
    gateways = Tracing(collector.endpoint, 1.0, "specdec-gateway")
    coordinators = Tracing(collector.endpoint, 1.0, "specdec-coordinator")
    coordinator = await rig.coordinator(tracing=coordinators)
    async with running_gateway(coordinator.server.address, tracing=gateways) as gateway:
        body = {"prompt": list(PROMPT), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"}
        answer = await gateway.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    await coordinator.stop()  # the call has ended on both sides
    for tracing in (gateways, coordinators):
        await asyncio.to_thread(tracing.close)

    (received,) = collector.named("POST /v1/completions")
    assert (received.service, received.parent_id) == ("specdec-gateway", CALLER_ID)
    (call,) = collector.children(received)
    assert (call.service, call.name) == ("specdec-coordinator", CALL)
    (whole,) = collector.children(call)
    assert total(collector.children(whole), "output_tokens") == 12
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    assert {span.service for span in collector.spans} == {
        "specdec-gateway", "specdec-coordinator", DRAFT_SERVICE, TARGET_SERVICE
    }  # fmt: skip


@pytest.mark.parametrize("bad", ["", "00-1-2-01", f"00-{TRACE_ID.upper()}-{CALLER_ID}-01", 7])
async def test_the_client_refuses_a_malformed_trace_context_by_name(rig: Rig, bad: object) -> None:
    coordinator = await rig.coordinator()
    async with AsyncClient(coordinator.server.address) as client:
        with pytest.raises(InvalidRequest, match=r"traceparent must be") as refused:
            client.generate("w5", traceparent=bad)
    assert refused.value.field == "traceparent"


async def test_the_trace_context_of_the_client_reaches_the_coordinator(rig: Rig, collector: TraceCollector) -> None:
    tracing = Tracing(collector.endpoint, 1.0, "specdec-coordinator")
    coordinator = await rig.coordinator(tracing=tracing)
    async with AsyncClient(coordinator.server.address) as client:
        await client.generate("w5 w6", max_new_tokens=4, traceparent=f"00-{TRACE_ID}-{CALLER_ID}-01")
        await asyncio.to_thread(_generate_blocking, coordinator.server.address)
    await coordinator.stop()  # the calls have ended on both sides
    await asyncio.to_thread(tracing.close)
    assert [(call.trace_id, call.parent_id) for call in collector.named(CALL)] == [(TRACE_ID, CALLER_ID)] * 2


def _generate_blocking(address: str) -> None:
    with Client(address) as client:
        client.generate("w5 w6", max_new_tokens=4, traceparent=f"00-{TRACE_ID}-{CALLER_ID}-01")
