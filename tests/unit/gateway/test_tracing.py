"""The gateway's layer of traces, around a small application."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from gateway.middleware import Traced, traceparent
from specdec.observability.tracing import Tracing
from tests.support.trace_collector import TraceCollector

TRACE_ID, CALLER_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[TraceCollector]:
    with TraceCollector() as collector:
        yield collector


async def answer(request: Request) -> Response:
    return PlainTextResponse(traceparent() or "", status_code=int(request.path_params.get("status", 200)))


def get(collector: TraceCollector, path: str, headers: dict[str, str] | None = None) -> str:
    """Return the body of a request to a traced application, whose spans are then exported."""
    tracing = Tracing(collector.endpoint, 1.0, "specdec-gateway")
    routes = [Route("/health", answer), Route("/answers/{status}", answer)]
    app = Starlette(routes=routes, middleware=[Middleware(Traced, tracing=tracing)])
    body = TestClient(app).get(path, headers=headers or {}).text
    tracing.close()
    return body


def test_a_request_continues_the_trace_of_its_headers_and_passes_it_on(collector: TraceCollector) -> None:
    sent = get(collector, "/answers/200", {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"})
    (span,) = collector.spans
    assert (span.service, span.name) == ("specdec-gateway", "GET /answers/{status}")
    assert (span.trace_id, span.parent_id) == (TRACE_ID, CALLER_ID)
    assert sent.startswith(f"00-{TRACE_ID}-{span.span_id}-")
    assert span.attributes["http.response.status_code"] == 200
    assert not span.is_failed


def test_an_answer_that_tells_of_a_fault_of_the_server_fails_the_span(collector: TraceCollector) -> None:
    get(collector, "/answers/503")
    (span,) = collector.spans
    assert span.is_failed
    assert span.attributes["error.type"] == "503"


def test_probes_leave_no_span(collector: TraceCollector) -> None:
    assert get(collector, "/health") == ""
    assert collector.spans == []


def test_without_traces_a_call_carries_no_trace_context() -> None:
    assert traceparent() is None
