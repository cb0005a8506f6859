"""Histograms under OpenTelemetry's names for generative AI, which the SDK sends to a collector over OTLP (gRPC).

    genai = open_genai_metrics(endpoint, service="specdec-coordinator", environ=os.environ)
    genai.observe_served(Operation("chat", "llama"), Ended(duration_s=1.0, first_token_s=0.1, num_output_tokens=32))

The coordinator records the metrics of a model server, and the gateway those of a client of one, so that a backend that
adds up the services counts no token twice. Names, units and bucket boundaries are those of the conventions
(https://github.com/open-telemetry/semantic-conventions-genai). OpenTelemetry is imported by `open_genai_metrics` alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specdec.contract.errors import InvalidRequest
from specdec.observability.otlp import NO_PROXY, missing_package, of_service, otlp_endpoint, process_resource

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram

#: Value of `gen_ai.provider.name` in traces and metrics.
PROVIDER = "specdec"

_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_NUM_TOKENS = tuple(4**power for power in range(14))

#: Time that the last metrics have to reach the collector when the process ends.
_FLUSH_MS = 3000.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Operation:
    """Kind of output that a request asks for, and its model."""

    name: Literal["chat", "text_completion"]
    model: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Times, counts and outcome of a request that has ended."""

    duration_s: float
    first_token_s: float = 0.0
    """Time from the begin of the request to its first token."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""
    """Reason of the error, or cause of the cancellation, that ended the request; "" for a complete output."""


def open_genai_metrics(endpoint: str, *, service: str, environ: Mapping[str, str]) -> GenAiMetrics | None:
    """Return what records the metrics, or None where OTEL_SDK_DISABLED is set.

    Args:
        endpoint: URL of the collector (`--otlp-endpoint`); "": OpenTelemetry's own variables decide.
        service: `service.name` of this process.
        environ: environment, for OpenTelemetry's variables. The SDK itself reads those for headers, TLS and interval.

    Raises:
        InvalidRequest: no collector is named.
        Unsupported: the packages of the extra `otel` are not installed.
    """
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    chosen = otlp_endpoint(endpoint, "METRICS", environ)
    if not chosen:
        raise InvalidRequest(
            "otlp_metrics: no collector is named; set --otlp-endpoint or OTEL_EXPORTER_OTLP_ENDPOINT, or leave "
            "--otlp-metrics off",
            field="otlp_metrics",
        )
    try:
        metrics = GenAiMetrics(chosen, service)
    except ModuleNotFoundError as error:
        raise missing_package(error, "otlp_metrics") from error
    _log.info("sending metrics", extra={"otlp_endpoint": chosen})
    return metrics


class GenAiMetrics:
    """The GenAI metrics of one process. Values may be recorded on any thread; none waits for the collector."""

    def __init__(self, endpoint: str, service: str) -> None:
        """Start the export thread. Raises ModuleNotFoundError where the packages are not installed."""
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint, channel_options=NO_PROXY))
        self._provider = MeterProvider([reader], of_service(process_resource(), service), shutdown_on_exit=False)
        self._meter = self._provider.get_meter("specdec")
        self._is_closed = False
        self._served_s = self._histogram("server.request.duration", "s", "Arrival to the end.", _DURATION_S)
        self._first_token_s = self._histogram(
            "server.time_to_first_token", "s", "Arrival to the first token.", _FIRST_TOKEN_S
        )
        self._per_token_s = self._histogram(
            "server.time_per_output_token", "s", "Mean time per token after the first.", _PER_TOKEN_S
        )
        self._called_s = self._histogram("client.operation.duration", "s", "Call to its end.", _DURATION_S)
        self._num_tokens = self._histogram("client.token.usage", "{token}", "Tokens of a request.", _NUM_TOKENS)

    def observe_served(self, operation: Operation, ended: Ended) -> None:
        """Record a request that this process served as a model server."""
        attributes = _attributes(operation)
        self._served_s.record(ended.duration_s, _with_error(attributes, ended))
        if ended.error or not ended.num_output_tokens:
            return
        self._first_token_s.record(ended.first_token_s, attributes)
        if ended.num_output_tokens > 1:
            rest_s = ended.duration_s - ended.first_token_s
            self._per_token_s.record(rest_s / (ended.num_output_tokens - 1), attributes)

    def observe_called(self, operation: Operation, ended: Ended) -> None:
        """Record a request that this process made as a client of a model server."""
        attributes = _attributes(operation)
        self._called_s.record(ended.duration_s, _with_error(attributes, ended))
        if not ended.error:
            for kind, num_tokens in (("input", ended.num_input_tokens), ("output", ended.num_output_tokens)):
                self._num_tokens.record(num_tokens, {**attributes, "gen_ai.token.type": kind})

    def close(self) -> None:
        """Send the last values for a short time, then give up on them. Blocks; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._provider.shutdown(_FLUSH_MS)

    def _histogram(self, name: str, unit: str, description: str, bounds: tuple[float, ...]) -> Histogram:
        return self._meter.create_histogram(
            f"gen_ai.{name}", unit, description, explicit_bucket_boundaries_advisory=bounds
        )


def _attributes(operation: Operation) -> dict[str, str]:
    return {
        "gen_ai.operation.name": operation.name,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": operation.model,
        "gen_ai.response.model": operation.model,
    }


def _with_error(attributes: dict[str, str], ended: Ended) -> dict[str, str]:
    return {**attributes, "error.type": ended.error} if ended.error else attributes
