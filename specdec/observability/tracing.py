"""Traces of requests in OpenTelemetry's form, which a thread of their own sends to a collector over OTLP (gRPC).

    tracing = open_tracing(endpoint, share, service="specdec-coordinator", environ=os.environ)    # None: off
    span = tracing.begin(name, traceparent=..., kind="server")
    with span.active():                  # current_span() and the ids of log records; ends the span
        ...
        span.child("round", start_ns=..., end_ns=...)

OpenTelemetry is imported by `open_tracing` alone, so a process without traces does not load it. Ended spans wait in a
bounded queue; what does not fit, and what the collector does not accept, is lost with a warning. No request waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from specdec.contract.errors import SpecdecError, Unsupported
from specdec.contract.version import install_command
from specdec.observability.logging import bind, bound_request_id

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan

#: Metadata keys and HTTP headers of the W3C trace context.
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

#: Name of OpenTelemetry's conventions.
_REQUEST_ID_ATTRIBUTE = "http.request.header.x-request-id"

#: Channel arguments of the exporter: a collector is reached directly, also if http_proxy is set in the environment.
_NO_PROXY: tuple[Any] = (("grpc.enable_http_proxy", 0),)

#: Limit on spans that wait for the exporter, about 30 MB.
_MAX_WAITING_SPANS = 8192

#: Spans of one export. Encoding them holds the interpreter for a few milliseconds, which the event loop waits for.
_BATCH_SPANS = 128

_EXPORT_INTERVAL_MS = 1000.0

#: Time that the last spans have to reach the collector when the process ends.
_FLUSH_S = 3.0

Attributes = Mapping[str, str | int | float | bool | list[str]]
Kind = Literal["internal", "server"]

_current: ContextVar[Span | None] = ContextVar("specdec_span", default=None)

_log = logging.getLogger(__name__)


def current_span() -> Span | None:
    """Return the span that this context and the tasks started in it belong to; None without traces."""
    return _current.get()


def trace_headers(metadata: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return the W3C trace context among the metadata of a call or the headers of a request."""
    return {key: value for key, value in metadata if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str)}


def span_of_call(tracing: Tracing | None, name: str, context: Any) -> AbstractContextManager[None]:
    """Return what makes a span of a gRPC call the current one; it does nothing without traces."""
    if tracing is None:
        return nullcontext()
    headers = trace_headers(context.invocation_metadata() or ())
    return tracing.begin(name, headers, attributes=request_id_attributes()).active()


def request_id_attributes() -> Attributes:
    """Return the attribute of a span that names the HTTP request which this context serves, if that is known."""
    return {_REQUEST_ID_ATTRIBUTE: [request_id]} if (request_id := bound_request_id()) else {}


def open_tracing(endpoint: str, share: float, *, service: str, environ: Mapping[str, str]) -> Tracing | None:
    """Return what records traces, or None if no endpoint is set.

    Args:
        endpoint: URL of the collector (`--otlp-endpoint`); "": OpenTelemetry's own variables decide.
        share: share of the requests without a trace context that are recorded.
        service: `service.name` of this process.
        environ: environment, for OpenTelemetry's variables. The exporter itself reads those for headers and TLS.

    Raises:
        Unsupported: the endpoint is given and the packages of the extra `otel` are not installed.
    """
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    chosen = endpoint or next((environ[name] for name in names if environ.get(name)), "")
    if not chosen or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        tracing = Tracing(chosen, share, service)
    except ModuleNotFoundError as error:
        missing = f"package {error.name} is not installed: run {install_command('otel')}"
        if endpoint:
            raise Unsupported(f"otlp_endpoint: {missing}", field="otlp_endpoint") from error
        _log.warning("traces are off, although OTEL_EXPORTER_OTLP_ENDPOINT is set: %s", missing)
        return None
    _log.info("recording traces", extra={"otlp_endpoint": chosen, "trace_share": share})
    return tracing


class Tracing:
    """The traces of one process. Spans may begin and end on any thread."""

    def __init__(self, endpoint: str, share: float, service: str) -> None:
        """Start the export thread; arguments are as in `open_tracing`.

        Raises ModuleNotFoundError if the packages are not installed.
        """
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._service = service
        self._resource = Resource.create()  # takes too long for an event loop that serves
        self._kinds = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER}
        self._extract = TraceContextTextMapPropagator().extract
        self._sampler = ParentBased(TraceIdRatioBased(share))
        self._exporter = OTLPSpanExporter(endpoint=endpoint, channel_options=_NO_PROXY)
        self._queue = BatchSpanProcessor(
            self._exporter,
            max_queue_size=_MAX_WAITING_SPANS,
            schedule_delay_millis=_EXPORT_INTERVAL_MS,
            max_export_batch_size=_BATCH_SPANS,
        )
        self._tracers: dict[str, Any] = {}
        self._lock = threading.Lock()

    def begin(
        self,
        name: str,
        headers: Mapping[str, str],
        *,
        kind: Kind = "server",
        attributes: Attributes | None = None,
    ) -> Span:
        """Begin a span: a child of the span that `headers` name, or else a trace of its own.

        Args:
            name: name of the span.
            headers: W3C trace context of the caller. A malformed one counts as absent.
            kind: server for a request that came over the network.
            attributes: attributes of the span.
        """
        return self.begin_in(self._extract(headers), name, kind=kind, attributes=attributes)

    def begin_in(
        self,
        context: Context,
        name: str,
        *,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        start_ns: int | None = None,
        service: str = "",
    ) -> Span:
        """Begin a span in a context; `service` is another service than this one, for which the span is recorded."""
        tracer = self._tracers.get(service or self._service) or self._tracer(service or self._service)
        span = tracer.start_span(
            name, context=context, kind=self._kinds[kind], attributes=attributes, start_time=start_ns
        )
        return Span(self, span)

    def flush(self) -> None:
        """Send the spans that wait, and return when the collector has answered. Blocks."""
        self._queue.force_flush()

    def close(self) -> None:
        """Send the last spans for a short time, then give up on them. Blocks; idempotent."""
        ending = threading.Thread(target=self._queue.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_FLUSH_S)
        if ending.is_alive():
            self._exporter.shutdown()  # breaks off a call to a collector that does not answer
        ending.join()

    def _tracer(self, service: str) -> Any:
        """Return the tracer of a service; spans of all services leave through one queue."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        with self._lock:
            if service not in self._tracers:
                resource = self._resource.merge(Resource({"service.name": service}))
                provider = TracerProvider(sampler=self._sampler, resource=resource, shutdown_on_exit=False)
                provider.add_span_processor(self._queue)
                self._tracers[service] = provider.get_tracer("specdec")
            return self._tracers[service]


class Span:
    """One span that has begun. All times are nanoseconds since the epoch."""

    __slots__ = ("_context", "_span", "_tracing")

    def __init__(self, tracing: Tracing, span: OtelSpan) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracing = tracing
        self._span = span
        self._context = set_span_in_context(span)

    @property
    def is_recorded(self) -> bool:
        """Return whether the trace is exported. Children of other spans need not be begun."""
        return self._span.is_recording()

    @property
    def ids(self) -> dict[str, str]:
        """Return the ids for log records."""
        context = self._span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    @property
    def headers(self) -> dict[str, str]:
        """Return the W3C trace context for calls that this span makes."""
        context = self._span.get_span_context()
        headers = {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
        if context.trace_state:
            headers[TRACESTATE] = context.trace_state.to_header()
        return headers

    def begin_child(
        self,
        name: str,
        *,
        start_ns: int | None = None,
        service: str = "",
        kind: Kind = "internal",
        attributes: Attributes | None = None,
    ) -> Span:
        """Begin a child; `service` as in `Tracing.begin_in`."""
        return self._tracing.begin_in(
            self._context, name, kind=kind, attributes=attributes, start_ns=start_ns, service=service
        )

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        """Change the name, if it is known only after the span began."""
        self._span.update_name(name)

    def add_event(self, name: str, at_ns: int) -> None:
        """Mark a time within the span."""
        self._span.add_event(name, timestamp=at_ns)

    def fail(self, reason: str, message: str = "") -> None:
        """Mark the span as failed; `reason` is one of the reasons of `specdec.contract.errors`."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", reason)
        self._span.set_status(StatusCode.ERROR, message or None)

    def end(self, end_ns: int | None = None) -> None:
        """End the span, now unless told otherwise. A further call does nothing."""
        if self._span.is_recording():
            self._span.end(end_ns)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the current span of the context and put its ids into log records; end it after the block.

        An error of the tree that leaves the block marks the span as failed.
        """
        token = _current.set(self)
        try:
            with bind(**self.ids):
                yield
        except SpecdecError as error:
            self.fail(error.reason, error.message)
            raise
        finally:
            _current.reset(token)
            self.end()
