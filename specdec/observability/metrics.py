"""Prometheus metrics of the services, under vLLM's names where vLLM has one (`specdec:` instead of `vllm:`).

Each service builds one object with its own registry; importing this module registers nothing. Every series has the
label `model_name`, as in vLLM. Counters are named without `_total`, which the exposition adds. The coordinator's round
loop and the servicers observe; `__main__` serves with `start_metrics_server`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.errors import Unavailable
from specdec.observability.kv_tier import KvTier, KvTierCollector
from specdec.observability.tallies import Count, CounterTally, HistogramTally

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REQUEST_LATENCY_S = (*_LATENCY_S[4:], 60.0, 120.0, 300.0, 600.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


class CoordinatorMetrics:
    """Metrics of the coordinator: requests, latencies as clients see them, and speculation."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._running = self._gauge("num_requests_running", "Requests that are generating.")
        self._waiting = self._gauge("num_requests_waiting", "Requests admitted but not started.")
        self._success = self._counter("request_success", "Requests that finished, by reason.", "finished_reason")
        self._failures = self._counter("request_failures", "Requests that failed, by error reason.", "reason")
        self._cancelled = self._counter("request_cancellations", "Requests that their clients ended early.", "cause")
        self._target_changes = self._counter(
            "target_changes", "Turns on another target model than their session's turn before."
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens that needed no forward pass.")
        self._output_tokens = self._counter_tally("generation_tokens", "Tokens emitted.")
        self._ttft_s = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _REQUEST_LATENCY_S)
        self._itl_s = self._histogram_tally("inter_token_latency_seconds", "Time between tokens.", _LATENCY_S)
        self._tpot_s = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, per request.", _LATENCY_S
        )
        self._e2el_s = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_LATENCY_S)
        self._request_output = self._histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._speculation = cache(_SpeculationSeries(self.registry, model_name).of_pool)
        self._target_only = self._counter("target_only_steps", "Rounds without a draft token.", "cause")
        self._draft_s = self._histogram_tally("draft_latency_seconds", "Propose calls, network included.", _LATENCY_S)
        self._verify_s = self._histogram_tally("verify_latency_seconds", "Verify calls, network included.", _LATENCY_S)
        self._logged = self._counter("learning_log_tokens", "Output tokens for the learning log.", "outcome")
        self._wire_bytes = self._counter_tally("wire_bytes", "Serialised messages of both links, both directions.")

    def request_waiting(self, change: int) -> None:
        """Add `change`: +1 when a request is admitted, -1 when it starts or is cancelled."""
        self._waiting.inc(change)

    def request_running(self, change: int) -> None:
        """Add `change`: +1 when a request starts, -1 when it ends in any way."""
        self._running.inc(change)

    def observe_target_change(self) -> None:
        """Count a turn that began on another target model than the session's previous turn."""
        self._target_changes.inc()

    def observe_tokens(self, num_tokens: int, since_last_s: float | None) -> None:
        """Record an emitted chunk, one interval as in vLLM, `since_last_s` after the previous one (None: the first)."""
        self._output_tokens.inc(num_tokens)
        if since_last_s is not None:
            self._itl_s.observe(since_last_s)

    def observe_first_token(self, ttft_s: float) -> None:
        self._ttft_s.observe(ttft_s)

    def observe_round(
        self, *, draft_pool: str, num_draft_tokens: int, num_accepted: int, wire_bytes: int, verify_s: float
    ) -> None:
        """Record a decided round with at least one draft token."""
        self._speculation(draft_pool).observe(num_draft_tokens, num_accepted)
        self._wire_bytes.inc(wire_bytes)
        self._verify_s.observe(verify_s)

    def observe_target_only_step(self, *, cause: str, wire_bytes: int, verify_s: float) -> None:
        """Record a decided round without a draft token; `cause` is a fixed word (off, late, unavailable, ...)."""
        self._target_only.labels(self._model_name, cause).inc()
        self._wire_bytes.inc(wire_bytes)
        self._verify_s.observe(verify_s)

    def observe_draft(self, draft_s: float) -> None:
        """Record a Propose call that was answered in time."""
        self._draft_s.observe(draft_s)

    def observe_finished(
        self,
        *,
        finish_reason: str,
        num_prompt_tokens: int,
        num_cached_prompt_tokens: int,
        num_output_tokens: int,
        ttft_s: float,
        e2el_s: float,
    ) -> None:
        """Record a request that succeeded; `finish_reason` is stop, length or stop_string."""
        self._success.labels(self._model_name, finish_reason).inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.inc(num_cached_prompt_tokens)
        self._request_output.observe(num_output_tokens)
        self._e2el_s.observe(e2el_s)
        if num_output_tokens > 1:
            self._tpot_s.observe((e2el_s - ttft_s) / (num_output_tokens - 1))

    def observe_logged(self, outcome: str, num_tokens: int) -> None:
        """Count output tokens that were written to the learning log, dropped or failed (`outcome`). From any thread."""
        self._logged.labels(self._model_name, outcome).inc(num_tokens)

    def observe_failed(self, reason: str) -> None:
        """A request ended with an error of this reason (`SpecdecError.reason`)."""
        self._failures.labels(self._model_name, reason).inc()

    def observe_cancelled(self, cause: str) -> None:
        """A client ended its request early; `cause` is client_left or session_deleted."""
        self._cancelled.labels(self._model_name, cause).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        """Return a counter, or its only series if it has no further labels, so that counting needs no look-up."""
        counter = _counter(self.registry, name, text, *labels)
        return counter if labels else counter.labels(self._model_name)

    def _counter_tally(self, name: str, text: str) -> Count:
        return CounterTally(self.registry, f"specdec:{name}", text, ("model_name",)).labels(self._model_name)

    def _histogram_tally(self, name: str, text: str, buckets: Sequence[float]) -> HistogramTally:
        return HistogramTally(self.registry, f"specdec:{name}", text, {"model_name": self._model_name}, buckets)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"specdec:{name}", text, ("model_name",), registry=self.registry)
        return gauge.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"specdec:{name}", text, ("model_name",), buckets=buckets, registry=self.registry)
        return histogram.labels(self._model_name)


class _SpeculationSeries:
    """The counters of draft tokens, by draft pool."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._drafts = _tally(registry, "spec_decode_num_drafts", "Rounds with draft tokens.", "draft_pool")
        self._draft_tokens = _tally(registry, "spec_decode_num_draft_tokens", "Draft tokens verified.", "draft_pool")
        self._accepted = _tally(registry, "spec_decode_num_accepted_tokens", "Draft tokens accepted.", "draft_pool")
        self._accepted_per_pos = _tally(
            registry,
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position.",
            "draft_pool",
            "position",
        )

    def of_pool(self, draft_pool: str) -> _PoolSeries:
        labels = (self._model_name, draft_pool)
        return _PoolSeries(
            drafts=self._drafts.labels(*labels),
            draft_tokens=self._draft_tokens.labels(*labels),
            accepted=self._accepted.labels(*labels),
            accepted_at=cache(lambda position: self._accepted_per_pos.labels(*labels, str(position))),
        )


@dataclass(frozen=True, slots=True)
class _PoolSeries:
    """The series of one pool, kept so that they are looked up once."""

    drafts: Count
    draft_tokens: Count
    accepted: Count
    accepted_at: Callable[[int], Count]

    def observe(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.drafts.inc()
        self.draft_tokens.inc(num_draft_tokens)
        self.accepted.inc(num_accepted)
        for position in range(num_accepted):
            self.accepted_at(position).inc()


def _tally(registry: CollectorRegistry, name: str, text: str, *labels: str) -> CounterTally:
    return CounterTally(registry, f"specdec:{name}", text, ("model_name", *labels))


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"specdec:{name}", text, ("model_name", *labels), registry=registry)


class _Load(Protocol):
    """The part of `specdec.types.EngineInfo` that is a gauge."""

    @property
    def kv_usage(self) -> float: ...
    @property
    def num_sessions(self) -> int: ...


class EngineMetrics:
    """Metrics of a draft or target replica: its calls, its steps and its KV cache."""

    def __init__(self, model_name: str, *, role: str) -> None:
        """`role`, draft or target, is a label of every series."""
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "role": role}
        self._running = self._bound(Gauge, "num_requests_running", "Calls being answered.")
        self._call_s = self._bound(Histogram, "call_latency_seconds", "Arrival of a call to its answer.", _LATENCY_S)
        self._cached_tokens = self._bound(Counter, "prefix_cache_hits", "Committed tokens that needed no forward pass.")
        self._asked_tokens = self._bound(Counter, "prefix_cache_queries", "Committed tokens of answered calls.")
        self._draft_tokens = self._bound(Counter, "draft_tokens", "Draft tokens made (draft) or verified (target).")
        self._step_sequences = self._bound(Histogram, "step_num_sequences", "Sequences in a forward pass.", _BATCH)
        self._step_tokens = self._bound(Histogram, "iteration_tokens_total", "Tokens in a forward pass.", _BATCH)
        self._busy_s = self._bound(Counter, "busy_seconds", "Time in steps; the rest of the time the device was idle.")
        self._failures = Counter(
            "specdec:call_failures", "Calls that failed, by reason.", (*self._labels, "reason"), registry=self.registry
        )
        self._predraft_rounds = Counter(
            "specdec:predraft_rounds",
            "Answered rounds with branches, by what the next call made of them: hit, extended, miss or unasked.",
            (*self._labels, "outcome"),
            registry=self.registry,
        )
        self._branches = self._bound(Counter, "predraft_branches", "Outcomes of rounds drafted before they were known.")
        self._wasted = self._bound(Counter, "predraft_branches_wasted", "Branches that no call wanted.")
        self._branch_tokens = self._bound(Counter, "predraft_tokens", "Draft tokens made in branches, wanted or not.")

    def watch_load(self, load: Callable[[], _Load]) -> None:
        """Read KV usage and session count from `load` at every scrape."""
        self.registry.register(_LoadCollector(load, self._labels))

    def watch_kv_tier(self, tier: KvTier) -> None:
        """Read the cold tier's counts and estimates at every scrape."""
        self.registry.register(KvTierCollector(tier, self._labels))

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call as running inside the context, and by its reason if it fails."""
        self._running.inc()
        try:
            yield
        except Exception as error:
            self._failures.labels(**self._labels, reason=getattr(error, "reason", "INTERNAL")).inc()
            raise
        finally:
            self._running.dec()

    def observe_call(
        self, *, duration_s: float, num_committed_tokens: int, num_cached_tokens: int, num_draft_tokens: int
    ) -> None:
        """Record an answered call."""
        self._call_s.observe(duration_s)
        self._asked_tokens.inc(num_committed_tokens)
        self._cached_tokens.inc(num_cached_tokens)
        self._draft_tokens.inc(num_draft_tokens)

    def observe_step(self, *, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Record a step that took `seconds`. From any thread."""
        self._step_sequences.observe(num_sequences)
        self._step_tokens.observe(num_tokens)
        self._busy_s.inc(seconds)

    def observe_predraft(self, *, outcome: str, num_branches: int, num_wasted: int, num_tokens: int) -> None:
        """Record the end of an answered round's branches. From any thread.

        Args:
            outcome: hit, extended (a hit that was drafted further), miss or unasked.
            num_branches: number of branches.
            num_wasted: number of branches that no call used.
            num_tokens: draft tokens made in the branches.
        """
        self._predraft_rounds.labels(**self._labels, outcome=outcome).inc()
        self._branches.inc(num_branches)
        self._wasted.inc(num_wasted)
        self._branch_tokens.inc(num_tokens)

    def _bound(self, kind: type[Any], name: str, text: str, buckets: Sequence[float] | None = None) -> Any:
        options = {} if buckets is None else {"buckets": buckets}
        metric = kind(f"specdec:{name}", text, tuple(self._labels), registry=self.registry, **options)
        return metric.labels(**self._labels)


class _LoadCollector(Collector):
    """Gauges that are read at every scrape and need no updates in between."""

    def __init__(self, load: Callable[[], _Load], labels: dict[str, str]) -> None:
        self._load = load
        self._labels = labels

    def collect(self) -> list[Metric]:
        load = self._load()
        values = {
            "specdec:kv_cache_usage_perc": ("Share of KV blocks held by sessions, 0..1.", load.kv_usage),
            "specdec:num_sessions": ("Sessions with KV here.", load.num_sessions),
        }
        return [self._gauge(name, text, value) for name, (text, value) in values.items()]

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge

    def describe(self) -> list[Metric]:
        return []


def start_metrics_server(registry: CollectorRegistry, host: str, port: int) -> Callable[[], None]:
    """Serve `/metrics` from a thread of its own; return a function that stops it.

    Raises:
        Unavailable: the address cannot be bound.
    """
    try:
        server, thread = start_http_server(port, addr=host or "0.0.0.0", registry=registry)
    except OSError as error:
        raise Unavailable(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
