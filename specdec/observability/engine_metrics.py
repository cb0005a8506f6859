"""Metrics of a draft or target replica: loading, its calls, its steps and its KV cache.

Series have vLLM's names if, and only if, they have vLLM's meaning (`specdec:` instead of `vllm:`). Every series
has the labels `model_name`, `role` and `pool`. Counters are named without `_total`, which the exposition adds. The
servicers count calls, the engine reports its steps, and `engine_state` reads the rest at a scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.contract.engine_api import EngineInfo, EngineStats
from specdec.observability.engine_state import EngineState, LoadClock
from specdec.observability.series import BATCH_SIZE, LATENCY_S, MASK_S, PREFIX, ServiceSeries


class _Tally(Protocol):
    """The part of `specdec.state.kv_values.KvTally` that is read here."""

    @property
    def choices(self) -> Mapping[str, int]: ...
    @property
    def num_restored(self) -> int: ...
    @property
    def num_damaged(self) -> int: ...
    @property
    def num_bytes(self) -> Mapping[str, int]: ...
    @property
    def dropped(self) -> Mapping[str, int]: ...
    @property
    def replay_s_per_run(self) -> float: ...


class _Rule(Protocol):
    """The part of `specdec.core.restore_rule.RestoreRule` that is read here."""

    @property
    def latency_s(self) -> float: ...
    @property
    def bytes_per_s(self) -> float: ...


class MeasuredTier(Protocol):
    """The part of `specdec.state.kv_tier.KvTier` that is measured."""

    @property
    def tally(self) -> _Tally: ...
    @property
    def rule(self) -> _Rule: ...


class KvTierCollector(Collector):
    """Collects the series of one replica's tier."""

    def __init__(self, tier: MeasuredTier, labels: Mapping[str, str]) -> None:
        self._tier = tier
        self._labels = labels

    def collect(self) -> list[Metric]:
        return [*self._counters(), *self._gauges()]

    def describe(self) -> list[Metric]:
        return []

    def _counters(self) -> Iterator[Metric]:
        tally = self._tier.tally
        yield self._counter("choices", "Calls that lacked a whole run of KV, by choice.", tally.choices, "choice")
        yield self._counter("runs_restored", "Runs of KV fetched and copied in.", {"": tally.num_restored})
        yield self._counter("values_damaged", "Values that were not what their key says.", {"": tally.num_damaged})
        yield self._counter("bytes", "Bytes of KV read and written.", tally.num_bytes, "direction")
        yield self._counter("runs_dropped", "Runs of KV that were not written, by reason.", tally.dropped, "reason")

    def _counter(self, name: str, text: str, values: Mapping[str, int], label: str = "") -> Metric:
        names = [*self._labels, label] if label else list(self._labels)
        family = CounterMetricFamily(f"specdec:kv_tier_{name}", text, labels=names)
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key] if label else list(self._labels.values()), value)
        return family

    def _gauges(self) -> Iterator[Metric]:
        tier = self._tier
        values = {
            "latency_seconds": ("L: an answer of the KV tier, as measured.", tier.rule.latency_s),
            "bytes_per_second": ("W: from the KV tier into KV blocks, as measured.", tier.rule.bytes_per_s),
            "replay_seconds": ("What computing a run of KV takes, as estimated last.", tier.tally.replay_s_per_run),
        }
        for name, (text, value) in values.items():
            gauge = GaugeMetricFamily(f"specdec:kv_tier_{name}", text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge


#: Errors by which the coordinator and a replica find out what they share; the same round is then called again, or a
#: newer call has replaced this one. They are no failures.
_REPEATED = ("KV_MISS", "CONSTRAINT_MISS", "STALE_EPOCH")
#: Reasons of failures whose series exist from the start.
_FAILURES = ("DRAINING", "INTERNAL", "INVALID_REQUEST", "KV_EXHAUSTED", "REPLICA_UNAVAILABLE")


class EngineMetrics:
    """Metrics of one replica. Calls, steps and queue times are each counted from one thread."""

    def __init__(self, model_name: str, *, role: str, pool: str = "default") -> None:
        """`role` is draft or target; `pool` is the name of the replica's pool."""
        self._labels = {"model_name": model_name, "role": role, "pool": pool}
        self._series = series = ServiceSeries(self._labels)
        self.registry = series.registry
        self._load_clock = LoadClock(series)
        self._state = EngineState(series)
        self._call_s = series.histogram("call_latency_seconds", "Arrival of a call to its answer.", LATENCY_S)
        self._cached_tokens = series.counter(
            "committed_tokens_cached", "Committed tokens of answered calls that needed no forward pass."
        )
        self._committed_tokens = series.counter("committed_tokens", "Committed tokens of answered calls.")
        self._draft_tokens = series.counter("draft_tokens", "Draft tokens made (draft) or verified (target).")
        self._failures = self._by_reason("call_failures", "Calls that failed, by reason.", _FAILURES)
        self._repeats = self._by_reason(
            "call_repeats",
            "Calls that the caller sends again with more tokens (KV_MISS) or the text of the constraint "
            "(CONSTRAINT_MISS), or has replaced (STALE_EPOCH).",
            _REPEATED,
        )
        self._queue_s = series.histogram("queue_seconds", "Arrival of an answered call to its first step.", LATENCY_S)
        self._step_s = series.histogram("step_seconds", "Time of a step, logits processed.", LATENCY_S)
        self._mask_s = series.histogram(
            "constraint_mask_seconds", "Time of the masks of a constrained call in a step.", MASK_S
        )
        self._step_sequences = series.histogram("step_num_sequences", "Sequences in a forward pass.", BATCH_SIZE)
        self._step_tokens = series.histogram("iteration_tokens_total", "Tokens in a forward pass.", BATCH_SIZE)
        self._busy_s = series.counter("busy_seconds", "Time in steps; the rest of the time the device was idle.")
        self._backend_rows = series.counters(
            "backend_rows",
            "Positions that a backend's engine was asked for: answered, reasked (its first answer did not decide them "
            "or lacked them) or lost (lacked alone).",
            "outcome",
        )
        self._predraft_rounds = series.counters(
            "predraft_rounds",
            "Answered rounds with branches, by what the next call made of them: hit, extended, miss or unasked.",
            "outcome",
        )
        self._branches = series.counter("predraft_branches", "Outcomes of rounds drafted before they were known.")
        self._wasted = series.counter("predraft_branches_wasted", "Branches that no call wanted.")
        self._branch_tokens = series.counter("predraft_tokens", "Draft tokens made in branches, wanted or not.")

    def note_phase(self, phase: str) -> None:
        """Note that the replica is now loading, warming_up or serving."""
        self._load_clock.note(phase)

    def note_loaded(self, share: float) -> None:
        """Note the share of the model's weights that are loaded, 0..1. From any thread."""
        self._load_clock.progress = share

    def watch_engine(self, stats: Callable[[], EngineStats], describe: Callable[[], EngineInfo]) -> None:
        """Read the state of the engine and the description of the replica at every scrape from now on."""
        self._state.watch(stats, describe)

    def watch_kv_tier(self, tier: MeasuredTier) -> None:
        """Read the cold tier's counts and estimates at every scrape."""
        self.registry.register(KvTierCollector(tier, self._labels))

    def observe_failure(self, error: Exception) -> None:
        """Count a call that ended with an error, by its reason. From one thread."""
        reason = getattr(error, "reason", "INTERNAL")
        counter = self._repeats if reason in _REPEATED else self._failures
        counter.labels(**self._labels, reason=reason).inc()

    def observe_call(
        self, *, duration_s: float, num_committed_tokens: int, num_cached_tokens: int, num_draft_tokens: int
    ) -> None:
        """Record an answered call. From one thread."""
        self._call_s.observe(duration_s)
        self._committed_tokens.inc(num_committed_tokens)
        self._cached_tokens.inc(num_cached_tokens)
        self._draft_tokens.inc(num_draft_tokens)

    def observe_queue(self, seconds: float) -> None:
        """Record how long an answered call waited for its first step. From one thread."""
        self._queue_s.observe(seconds)

    def observe_masks(self, seconds: float) -> None:
        """See `StepObserver`."""
        self._mask_s.observe(seconds)

    def observe_step(self, *, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Record a step that took `seconds`. From one thread."""
        self._step_s.observe(seconds)
        self._step_sequences.observe(num_sequences)
        self._step_tokens.observe(num_tokens)
        self._busy_s.inc(seconds)

    def observe_backend(self, *, num_rows: int, num_reasked: int, num_lost: int) -> None:
        """Record the positions of a question to a backend. From one thread.

        Args:
            num_rows: number of positions.
            num_reasked: number of positions for which the engine was asked again.
            num_lost: number of those that its first answer lacked.
        """
        self._backend_rows("answered").inc(num_rows)
        self._backend_rows("reasked").inc(num_reasked)
        self._backend_rows("lost").inc(num_lost)

    def observe_predraft(self, *, outcome: str, num_branches: int, num_wasted: int, num_tokens: int) -> None:
        """Record the end of an answered round's branches. From one thread.

        Args:
            outcome: hit, extended (a hit that was drafted further), miss or unasked.
            num_branches: number of branches.
            num_wasted: number of branches that no call used.
            num_tokens: draft tokens made in the branches.
        """
        self._predraft_rounds(outcome).inc()
        self._branches.inc(num_branches)
        self._wasted.inc(num_wasted)
        self._branch_tokens.inc(num_tokens)

    def _by_reason(self, name: str, text: str, start: Sequence[str]) -> Counter:
        counter = Counter(PREFIX + name, text, (*self._labels, "reason"), registry=self.registry)
        for reason in start:
            counter.labels(**self._labels, reason=reason)
        return counter
