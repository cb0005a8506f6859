"""Traces are off unless an endpoint is set, and the SDK is then not loaded; a full queue drops and counts."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from specdec.contract.errors import NotFound
from specdec.observability.tracing import Tracing, current_span, open_tracing, trace_headers
from tests.support.trace_collector import TraceCollector

WITHOUT_PACKAGES = """
import sys
sys.modules["opentelemetry"] = None
import os
from specdec.contract.errors import Unsupported
from specdec.observability.tracing import open_tracing
"""


def test_without_an_endpoint_traces_are_off() -> None:
    assert open_tracing("", 1.0, service="a", environ={}) is None
    assert current_span() is None


def test_the_sdk_can_be_disabled_by_its_own_variable() -> None:
    environ = {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
    assert open_tracing("", 1.0, service="a", environ=environ) is None


def test_the_standard_variable_turns_traces_on() -> None:
    with TraceCollector() as collector:
        tracing = open_tracing("", 1.0, service="a", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint})
        assert tracing is not None
        tracing.begin("work", {}).end()
        tracing.close()
        assert [(span.service, span.name) for span in collector.spans] == [("a", "work")]


def test_a_coordinator_without_traces_does_not_load_the_sdk() -> None:
    code = "import sys, coordinator.__main__; sys.exit('opentelemetry.sdk.trace' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_packages_are_an_error_of_the_flag() -> None:
    code = f"""{WITHOUT_PACKAGES}
try:
    open_tracing("http://127.0.0.1:4317", 1.0, service="a", environ={{}})
except Unsupported as error:
    print(error.field, error.message)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("otlp_endpoint ")
    assert 'pip install "specdec-serving[otel]"' in shown


def test_missing_packages_are_a_warning_where_only_the_standard_variable_asks_for_traces() -> None:
    code = f"""{WITHOUT_PACKAGES}
print(open_tracing("", 1.0, service="a", environ={{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}}))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "None\n"
    assert "traces are off" in ended.stderr


def test_an_error_that_leaves_the_block_fails_the_span() -> None:
    def fail() -> None:
        with tracing.begin("work", {}).active():
            assert current_span() is not None
            raise NotFound("no such session", reason="SESSION_NOT_FOUND")

    with TraceCollector() as collector:
        tracing = Tracing(collector.endpoint, 1.0, "a")
        with pytest.raises(NotFound):
            fail()
        tracing.close()
        (span,) = collector.spans
    assert current_span() is None
    assert span.is_failed
    assert span.attributes["error.type"] == "SESSION_NOT_FOUND"


def test_the_headers_of_a_span_make_its_children_in_another_process() -> None:
    with TraceCollector() as collector:
        tracing = Tracing(collector.endpoint, 1.0, "a")
        parent = tracing.begin("parent", {"tracestate": "vendor=1", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
        headers = trace_headers([*parent.headers.items(), ("x-other", "y"), ("traceparent-bin", b"z")])
        tracing.begin("child", headers).end()
        parent.end()
        tracing.close()
        (outer,), (inner,) = collector.named("parent"), collector.named("child")
    assert headers["tracestate"] == "vendor=1"
    assert (outer.parent_id, inner.parent_id) == ("b" * 16, outer.span_id)
    assert outer.trace_id == inner.trace_id == "a" * 32


class _BlockedCollector(TraceCollector):
    """Answers nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.released.wait()
        return super().Export(request, context)


def test_a_process_ends_although_its_collector_does_not_answer() -> None:
    with _BlockedCollector() as collector:
        tracing = Tracing(collector.endpoint, 1.0, "a")
        tracing.begin("work", {}).end()
        tracing.close()
        assert not collector.spans
        collector.released.set()
