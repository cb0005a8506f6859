"""An OpenTelemetry collector on a loopback port that keeps the spans and metrics that it gets, over real OTLP and gRPC.

with TraceCollector() as collector:
    tracing = Tracing(collector.endpoint, 1.0, "specdec-coordinator")
    ...
    collector.spans
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class ExportedSpan:
    """One span as the collector received it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """"" where the span has no parent."""
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_failed: bool

    def is_within(self, other: ExportedSpan) -> bool:
        """Return whether the span's time lies within the other's."""
        return other.start_ns <= self.start_ns <= self.end_ns <= other.end_ns


@dataclass(frozen=True, slots=True)
class ExportedHistogram:
    """One series of a histogram as the collector received it last."""

    service: str
    unit: str
    attributes: dict[str, Any]
    count: int
    total: float
    bounds: tuple[float, ...]


class _MetricsReceiver(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the last export of each service; values are cumulative."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def Export(  # noqa: N802
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Any
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        for resource in request.resource_metrics:
            self.last[_values(resource.resource.attributes).get("service.name", "")] = resource
        return metrics_service_pb2.ExportMetricsServiceResponse()


class TraceCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector; use it as a context manager."""

    def __init__(self) -> None:
        self._requests: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self._metrics = _MetricsReceiver()
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(self._metrics, self._server)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()

    @property
    def spans(self) -> list[ExportedSpan]:
        """All spans received so far, by the time at which they began."""
        spans = [
            _exported(_values(resource.resource.attributes).get("service.name", ""), span)
            for request in self._requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return sorted(spans, key=lambda span: span.start_ns)

    def histograms(self, name: str) -> list[ExportedHistogram]:
        """Return the series of a metric, one for each service and set of attributes."""
        return [
            ExportedHistogram(
                service, metric.unit, _values(point.attributes), point.count, point.sum, tuple(point.explicit_bounds)
            )
            for service, resource in self._metrics.last.items()
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.histogram.data_points
        ]

    def named(self, name: str) -> list[ExportedSpan]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: ExportedSpan) -> list[ExportedSpan]:
        return [span for span in self.spans if span.parent_id == parent.span_id]


def _exported(service: str, span: Any) -> ExportedSpan:
    return ExportedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        is_failed=span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@pytest.fixture
def collector() -> Iterator[TraceCollector]:
    """A collector for one test."""
    with TraceCollector() as collector:
        yield collector
