"""The queue of ended spans: bounded, emptied by the SDK's export thread, with a count of what became of each span.

The only module that imports OpenTelemetry at its top; `tracing` imports it once traces are on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from specdec.observability.otlp import NO_PROXY


class _CountingExporter(SpanExporter):
    """The OTLP exporter, with counts. It is called by one thread at a time."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self._is_shut_down = False
        self.num_taken = 0
        """Number of spans taken from the queue."""
        self.num_exported = 0
        self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.num_exported += len(spans)
        else:
            self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()


class SpanQueue(BatchSpanProcessor):
    """A batch processor that refuses spans beyond its limit instead of losing older ones silently."""

    def __init__(self, endpoint: str, *, max_waiting: int, batch: int, interval_ms: float) -> None:
        """
        Args:
            endpoint: URL of the collector.
            max_waiting: limit on spans that wait.
            batch: limit on spans of one export.
            interval_ms: longest time that a span waits while the collector answers.
        """
        self._max_waiting = max_waiting
        self._num_accepted = 0
        self._num_dropped = 0
        self._exporter = _CountingExporter(OTLPSpanExporter(endpoint=endpoint, channel_options=NO_PROXY))
        super().__init__(
            self._exporter, max_queue_size=max_waiting, schedule_delay_millis=interval_ms, max_export_batch_size=batch
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span. Never blocks."""
        if self._num_accepted - self._exporter.num_taken >= self._max_waiting:
            self._num_dropped += 1
            return
        self._num_accepted += 1
        super().on_end(span)

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of spans by outcome."""
        exporter = self._exporter
        return {"exported": exporter.num_exported, "failed": exporter.num_failed, "dropped": self._num_dropped}

    def close(self, timeout_s: float) -> None:
        """Send what waits for at most `timeout_s`, then end the export thread. Idempotent."""
        ending = threading.Thread(target=self.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(timeout_s)
        self._exporter.shutdown()  # breaks off a call to a collector that does not answer
        ending.join()
