"""Metrics of the coordinator: requests from admission to their end, the session store, and the replicas that it sees.

Series have vLLM's names if, and only if, they have vLLM's meaning (`specdec:` instead of `vllm:`). Every series
has the label `model_name`. Counters are named without `_total`, which the exposition adds. `round_metrics` has the
series of the rounds. Tenants beyond a number share one series. Everything is updated from the coordinator's event loop,
except where a method says otherwise.
"""

from __future__ import annotations

from collections import Counter as Multiset
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Counter
from prometheus_client.core import Metric

from specdec.contract.constraint import ConstraintKind
from specdec.observability.round_metrics import RoundMetrics
from specdec.observability.series import LATENCY_S, NUM_TOKENS, PREFIX, REQUEST_LATENCY_S, ServiceSeries

#: Label of the tenants that came after the limit was reached.
OTHER = "other tenants"


class TenantMetrics:
    """The series of the first tenants that send requests, for one thread."""

    def __init__(self, series: ServiceSeries, max_tenants: int) -> None:
        """`max_tenants`: number of tenants with series of their own; 0: no tenant is counted."""
        self._max_tenants = max_tenants
        self._known: set[str] = set()
        self._requests = series.counters(
            "tenant_requests", "Requests that ended, by tenant and outcome: finished, cancelled or failed.",
            "tenant", "outcome",
        )  # fmt: skip
        self._prompt_tokens = series.counters("tenant_prompt_tokens", "Prompt tokens of those requests.", "tenant")
        self._output_tokens = series.counters("tenant_generation_tokens", "Output tokens of those requests.", "tenant")

    def observe_end(self, tenant: str, outcome: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count a request that ended."""
        if not self._max_tenants:
            return
        if tenant not in self._known:
            if len(self._known) < self._max_tenants:
                self._known.add(tenant)
            else:
                tenant = OTHER  # no tenant has a space in its name
        self._requests(tenant, outcome).inc()
        self._prompt_tokens(tenant).inc(num_prompt_tokens)
        self._output_tokens(tenant).inc(num_output_tokens)


#: States of a replica: it takes sessions; it missed a deadline and was not heard of since; it drains; it does not
#: answer, or does not fit.
REPLICA_STATES = ("up", "late", "draining", "down", "refused")

QueueState = tuple[int, int, float]
"""Number of waiting requests, number of slots, and the predicted wait of a request that arrives now."""

ReplicaPlace = tuple[str, str, str]
"""Role, pool and state of one replica."""

_LOST = ("DRAINING", "INTERNAL", "KV_EXHAUSTED", "LEASE_LOST", "REPLICA_UNAVAILABLE", "STORE_UNAVAILABLE")
_REFUSED = (
    "CONTEXT_TOO_LONG", "DRAINING", "INVALID_REQUEST", "KV_EXHAUSTED", "QUEUE_FULL", "QUOTA_EXCEEDED",
    "REPLICA_UNAVAILABLE", "SESSION_BUSY", "SESSION_LOST", "SESSION_NOT_FOUND", "STORE_UNAVAILABLE",
)  # fmt: skip


class CoordinatorMetrics:
    """Metrics of one coordinator."""

    def __init__(self, model_name: str, *, max_tenants: int = 0) -> None:
        """
        Args:
            model_name: name under which the target model is served.
            max_tenants: number of tenants with series of their own.
        """
        self._labels = {"model_name": model_name}
        self._series = series = ServiceSeries(self._labels)
        self.registry = series.registry
        self._list_replicas: Callable[[], Iterable[ReplicaPlace]] = tuple
        self._count_faults: Callable[[], Mapping[tuple[str, str], int]] = dict
        self._known_places = {("draft", ""), ("target", "")}
        """Roles with their pools that have been seen; their series stay."""
        self._list_pools: Callable[[], Iterable[str]] = tuple
        self._count_store_errors: Callable[[], int] = int
        self._read_queue: Callable[[], QueueState] = lambda: (0, 0, 0.0)
        series.read(self._replicas)
        series.read(self._queue)
        series.read(self._store_errors)
        self.rounds = RoundMetrics(series)
        self.tenants = TenantMetrics(series, max_tenants)
        self._request_series()
        self._latency_series()
        self._logged = Counter(
            f"{PREFIX}learning_log_tokens",
            "Output tokens for the learning log.",
            ("model_name", "outcome"),
            registry=self.registry,
        )

    def _request_series(self) -> None:
        counter, counters, gauge = self._series.counter, self._series.counters, self._series.gauge
        self._capacity = gauge("request_capacity", "Largest number of requests at once, waiting ones included.")
        self._running = gauge("num_requests_running", "Requests that are generating.")
        self._admitting = gauge("num_requests_admitting", "Requests that are taking their session and their prompt.")
        self._success = counters(
            "request_success", "Requests that finished, by reason.", "finished_reason",
            start=("stop", "length", "stop_string"),
        )  # fmt: skip
        self._failures = counters(
            "request_failures",
            "Requests that an error ended and that were not resumed in time, by error reason.",
            "reason",
            start=_LOST,
        )
        self._interruptions = counters(
            "request_interruptions", "Requests that an error ended, resumed later or not.", "reason", start=_LOST
        )
        self._cancelled = counters(
            "request_cancellations", "Requests that their clients ended early.", "cause",
            start=("client_left", "session_deleted"),
        )  # fmt: skip
        self._refusals = counters("request_refusals", "Requests that did not start, by reason.", "reason",
                                  start=_REFUSED)  # fmt: skip
        self._constrained = counters("constrained_requests", "Requests with a constraint, by its kind.", "kind",
                                     start=(kind.name.lower() for kind in ConstraintKind))  # fmt: skip
        self._resumed = counter("resumed_turns", "Unfinished turns that were continued here.")
        self._leases_lost = counter("leases_lost", "Turns whose session another coordinator has taken.")
        self._turns = counters("turns", "Turns that began, by the target model's fingerprint.", "model_fingerprint")
        self._target_changes = counter(
            "target_changes", "Turns on another target model than their session's turn before."
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens that needed no forward pass.")
        self._output_tokens = counter("generation_tokens", "Tokens emitted.")

    def _latency_series(self) -> None:
        histogram = self._series.histogram
        self._queue_s = histogram(
            "request_queue_time_seconds", "Arrival to the first round: lease, prompt, wait for a target.",
            REQUEST_LATENCY_S,
        )  # fmt: skip
        self._prefill_s = histogram(
            "request_prefill_time_seconds", "First round to first token, the replica's queue included.",
            REQUEST_LATENCY_S,
        )  # fmt: skip
        self._decode_s = histogram(
            "request_decode_time_seconds", "First token to last token of a finished request.", REQUEST_LATENCY_S
        )
        self._ttft_s = histogram("time_to_first_token_seconds", "Arrival to first token.", REQUEST_LATENCY_S)
        self._itl_s = histogram("inter_token_latency_seconds", "Time between tokens.", LATENCY_S)
        self._tpot_s = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, per request.", LATENCY_S
        )
        self._e2el_s = histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_LATENCY_S)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", NUM_TOKENS)
        self._request_output = histogram("request_generation_tokens", "Output tokens of a request.", NUM_TOKENS)
        self._commit_s = histogram("commit_seconds", "Commit of a round to the session store, retries included.",
                                   LATENCY_S)  # fmt: skip
        self._compile_s = histogram(
            "constraint_compile_seconds",
            "Compilation of a constraint that was not known, with the wait for it.",
            LATENCY_S,
        )
        self._loop_lag_s = histogram("event_loop_lag_seconds", "Lateness of a timer in the event loop.", LATENCY_S)

    # ---- what is read at a scrape --------------------------------------------------------------------------------

    def set_capacity(self, num_requests: int) -> None:
        """Set the largest number of requests at once."""
        self._capacity.set(num_requests)

    def watch_queue(self, read: Callable[[], QueueState]) -> None:
        """Read the state of the queue at every scrape, in its thread."""
        self._read_queue = read

    def watch_replicas(
        self,
        replicas: Callable[[], Iterable[ReplicaPlace]],
        pools: Callable[[], Iterable[str]],
        faults: Callable[[], Mapping[tuple[str, str], int]] = dict,
    ) -> None:
        """Read the replicas, the names of all draft pools, and the faults by role and pool at every scrape, in its
        thread."""
        self._list_replicas, self._list_pools, self._count_faults = replicas, pools, faults

    def watch_store(self, num_errors: Callable[[], int]) -> None:
        """Read the number of failed calls of the session store at every scrape, in its thread."""
        self._count_store_errors = num_errors

    # ---- admission -----------------------------------------------------------------------------------------------

    def request_admitting(self, change: int) -> None:
        """Add `change`: +1 when a request arrives, -1 when it starts, is refused or is cancelled."""
        self._admitting.inc(change)

    def request_running(self, change: int) -> None:
        """Add `change`: +1 when a request starts, -1 when it ends in any way."""
        self._running.inc(change)

    def observe_constrained(self, kind: str, compile_s: float | None) -> None:
        """Count a request with a constraint; `compile_s` is the time of its compilation, if it was not known."""
        self._constrained(kind).inc()
        if compile_s is not None:
            self._compile_s.observe(compile_s)

    def observe_refused(self, reason: str) -> None:
        """Count a request that did not start because of an error of this reason."""
        self._refusals(reason).inc()

    def observe_turn(self, model_fingerprint: str, *, target_changed: bool) -> None:
        """Count a turn that begins; `target_changed`: on another target model than the session's previous turn."""
        self._turns(model_fingerprint).inc()
        if target_changed:
            self._target_changes.inc()

    def observe_resumed(self) -> None:
        """Count an unfinished turn that is continued here."""
        self._resumed.inc()

    def observe_queue(self, seconds: float) -> None:
        """Record the time from a request's arrival to its first round."""
        self._queue_s.observe(seconds)

    # ---- tokens and ends -----------------------------------------------------------------------------------------

    def observe_tokens(self, num_tokens: int, since_last_s: float | None) -> None:
        """Record an emitted chunk, one interval as in vLLM, `since_last_s` after the previous one (None: the first)."""
        self._output_tokens.inc(num_tokens)
        if since_last_s is not None:
            self._itl_s.observe(since_last_s)

    def observe_first_token(self, ttft_s: float, prefill_s: float) -> None:
        """Record the first token, `ttft_s` after arrival and `prefill_s` after the begin of the first round."""
        self._ttft_s.observe(ttft_s)
        self._prefill_s.observe(prefill_s)

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
        self._success(finish_reason).inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.inc(num_cached_prompt_tokens)
        self._request_prompt.observe(num_prompt_tokens)
        self._request_output.observe(num_output_tokens)
        self._e2el_s.observe(e2el_s)
        self._decode_s.observe(e2el_s - ttft_s)
        if num_output_tokens > 1:
            self._tpot_s.observe((e2el_s - ttft_s) / (num_output_tokens - 1))

    def observe_interrupted(self, reason: str) -> None:
        """Count a request that an error of this reason ended; it may be resumed."""
        self._interruptions(reason).inc()
        if reason == "LEASE_LOST":
            self._leases_lost.inc()

    def observe_failed(self, reason: str) -> None:
        """Count a request that an error of this reason (`SpecdecError.reason`) ended for good."""
        self._failures(reason).inc()

    def observe_cancelled(self, cause: str) -> None:
        """Count a request that its client ended early; `cause` is client_left or session_deleted."""
        self._cancelled(cause).inc()

    # ---- parts of the coordinator --------------------------------------------------------------------------------

    def observe_commit(self, seconds: float) -> None:
        """Record a commit that succeeded."""
        self._commit_s.observe(seconds)

    def observe_loop_lag(self, seconds: float) -> None:
        """Record by how much a timer of the event loop was late."""
        self._loop_lag_s.observe(seconds)

    def observe_logged(self, outcome: str, num_tokens: int) -> None:
        """Count output tokens that were written to the learning log, dropped or failed (`outcome`). From any thread."""
        self._logged.labels(**self._labels, outcome=outcome).inc(num_tokens)

    def _replicas(self) -> Iterator[Metric]:
        counts = Multiset(self._list_replicas())
        for pool in self._list_pools():
            self.rounds.of_pool(pool)  # its series exist from now on
        self._known_places |= {(role, pool) for role, pool, _ in counts}
        yield self._series.gauge_family(
            "replicas",
            "Replicas by state: up, late (missed a deadline), draining, down, or refused (its vocabulary does not "
            "fit). One that never answered, or does not fit, has no pool.",
            [
                ({"role": role, "pool": pool, "state": state}, counts[role, pool, state])
                for role, pool in sorted(self._known_places)
                for state in REPLICA_STATES
            ],
        )

        faults = self._count_faults()
        yield self._series.counter_family(
            "replica_faults",
            "Calls of rounds that a replica answered with INTERNAL, or with an answer that was refused.",
            [
                ({"role": role, "pool": pool}, faults.get((role, pool), 0))
                for role, pool in sorted(self._known_places | set(faults))
            ],
        )

    def _queue(self) -> Iterator[Metric]:
        num_waiting, num_slots, wait_s = self._read_queue()
        gauge = self._series.gauge_family
        yield gauge("num_requests_queued", "Requests that wait for a slot.", [({}, num_waiting)])
        yield gauge("request_slots", "Largest number of requests that generate at once, now.", [({}, num_slots)])
        yield gauge("predicted_queue_time_seconds", "Predicted wait of a request that arrives now.", [({}, wait_s)])

    def _store_errors(self) -> Iterator[Metric]:
        yield self._series.counter_family(
            "store_errors",
            "Calls of the session store that failed after their retries.",
            [({}, self._count_store_errors())],
        )
