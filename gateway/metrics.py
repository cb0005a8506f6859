"""Prometheus series of the gateway: requests over HTTP, and speculation as clients of this gateway saw it.

The second kind has vLLM's names and meaning, so that `vllm bench serve` reads acceptance from /metrics. It is counted
from the statistics of finished outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter, Gauge, Histogram, generate_latest

from gateway.usage import accepted_per_position, num_drafts_of
from specdec.client import Completion
from specdec.observability.series import ServiceSeries

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: Positions that exist from the start, so that a rate has a first value.
_FIRST_POSITIONS = 8
#: Statuses whose series exist from the start, so that an alert sees the first error.
_FIRST_STATUSES = ("200", "500", "503")


class GatewayMetrics:
    """All series of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = ServiceSeries({}).registry
        self._in_flight = Gauge(
            "specdec:http_requests_in_flight", "Requests that are being answered.", registry=self.registry
        )
        self._requests = Counter(
            "specdec:http_requests", "Answers, by route and status.", ("route", "status"), registry=self.registry
        )
        self._duration_s = Histogram(
            "specdec:http_request_duration_seconds", "Arrival to the last byte of the answer.", ("route",),
            buckets=_LATENCY_S, registry=self.registry,
        )  # fmt: skip
        self._ttft_s = Histogram(
            "specdec:http_time_to_first_token_seconds", "Start of the outputs to the first token, at the gateway.",
            buckets=_LATENCY_S, registry=self.registry,
        )  # fmt: skip
        self._disconnects = Counter(
            "specdec:http_disconnects", "Requests whose client went away before the end.", registry=self.registry
        )
        self._resumed = Counter(
            "specdec:http_resumed_streams", "Streams that a client resumed by Last-Event-ID.", registry=self.registry
        )
        self._drafts = self._vllm("spec_decode_num_drafts", "Rounds with a draft.")
        self._draft_tokens = self._vllm("spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted = self._vllm("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens, by their position in the draft.",
            ("position",), registry=self.registry,
        )  # fmt: skip
        for position in range(_FIRST_POSITIONS):
            self._per_position.labels(str(position))

    def begin_at_zero(self, routes: Iterable[str]) -> None:
        """Make the series of the answers of these routes."""
        for route in routes:
            for status in _FIRST_STATUSES:
                self._requests.labels(route, status)

    def request_began(self) -> None:
        self._in_flight.inc()

    def request_ended(self, route: str, status: int, duration_s: float) -> None:
        """Count an answer; `status` is 499 for a client that went away before it began."""
        self._in_flight.dec()
        self._requests.labels(route, str(status)).inc()
        self._duration_s.labels(route).observe(duration_s)

    def observe_first_token(self, ttft_s: float) -> None:
        self._ttft_s.observe(ttft_s)

    def observe_disconnect(self) -> None:
        self._disconnects.inc()

    def observe_resumed(self) -> None:
        self._resumed.inc()

    def observe_finished(self, completion: Completion) -> None:
        """Add the speculation counters of an output that has ended."""
        stats = completion.stats
        self._drafts.inc(num_drafts_of(stats))
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted.inc(stats.num_accepted_tokens)
        for position, count in enumerate(accepted_per_position([stats])):
            self._per_position.labels(str(position)).inc(count)

    def exposition(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        lines = generate_latest(self.registry).splitlines(keepends=True)
        # `vllm bench serve` adds up all lines with the name of a counter, also those with the time of its creation.
        return b"".join(line for line in lines if b"_created" not in line)

    def _vllm(self, name: str, documentation: str) -> Counter:
        return Counter(f"vllm:{name}", documentation, registry=self.registry)
