"""The state of a replica as gauges and counters that are read at a scrape: loading, waiting calls, KV blocks, device.

The engine counts for itself and without a lock (`EngineStats`); nothing here costs a step. Before the engine exists,
while its model is loaded, every series is 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from specdec.contract.engine_api import EngineInfo, EngineStats
from specdec.observability.series import ServiceSeries

#: Phases of a replica's start, in their order.
PHASES = ("starting", "loading", "warming_up", "serving")


class LoadClock:
    """The phase of a replica's start, the share of its weights that are loaded, and the time that the start took."""

    def __init__(self, series: ServiceSeries) -> None:
        self._series = series
        self._began_s = time.monotonic()
        self._served_s: float | None = None
        self._phase = PHASES[0]
        self.progress = 0.0
        """Share of the weights that are loaded, 0..1; a replica that serves has loaded all."""
        series.read(self._collect)

    def note(self, phase: str) -> None:
        """Note that a phase begins."""
        self._phase = phase
        if phase == PHASES[-1]:
            self._served_s, self.progress = time.monotonic(), 1.0

    def _collect(self) -> Iterator[Metric]:
        end_s = time.monotonic() if self._served_s is None else self._served_s
        yield self._series.gauge_family(
            "load_phase",
            "1 for the phase that the replica is in: starting, loading, warming_up or serving.",
            [({"phase": phase}, float(phase == self._phase)) for phase in PHASES],
        )
        yield self._series.gauge_family(
            "load_progress", "Share of the model's weights that are loaded, 0..1.", [({}, self.progress)]
        )
        yield self._series.gauge_family(
            "load_seconds", "Time from the start to serving; rises until then.", [({}, end_s - self._began_s)]
        )


class EngineState:
    """The state of the engine at each scrape."""

    def __init__(self, series: ServiceSeries) -> None:
        self._series = series
        self._stats: Callable[[], EngineStats] | None = None
        self._describe: Callable[[], EngineInfo] | None = None
        series.read(self._collect)

    def watch(self, stats: Callable[[], EngineStats], describe: Callable[[], EngineInfo]) -> None:
        """Read this engine from now on."""
        self._stats, self._describe = stats, describe

    def _collect(self) -> Iterator[Metric]:
        stats = None if self._stats is None else self._stats()
        yield from self._load(stats)
        yield from self._kv(stats)
        yield from self._states(stats or EngineStats())
        yield from self._description(None if self._describe is None else self._describe())

    def _load(self, stats: EngineStats | None) -> Iterator[Metric]:
        gauge = self._series.gauge_family
        running, waiting, backlog, stalled = (0, 0, 0, False) if stats is None else (
            stats.num_running_calls, stats.num_waiting_calls, stats.num_backlog_tokens, stats.is_stalled
        )  # fmt: skip
        yield gauge("num_requests_running", "Calls that are in the steps of the device.", [({}, running)])
        yield gauge("num_requests_waiting", "Calls that no step has taken yet.", [({}, waiting)])
        yield gauge("prefill_backlog_tokens", "Tokens of admitted prompts that have not run.", [({}, backlog)])
        yield gauge("device_stalled", "1 while a step far exceeds its time limit.", [({}, float(stalled))])

    def _kv(self, stats: EngineStats | None) -> Iterator[Metric]:
        total, active, free = (0, 0, 0) if stats is None else (
            stats.num_kv_blocks, stats.num_active_kv_blocks, stats.num_free_kv_blocks
        )  # fmt: skip
        blocks = {"active": active, "idle": max(0, total - active - free), "free": free}
        yield self._series.gauge_family(
            "kv_blocks",
            "KV blocks: active (of sessions with a call now or within a second), idle (kept for later calls, and given "
            "up when blocks are needed) or free.",
            [({"state": state}, count) for state, count in blocks.items()],
        )
        yield self._series.gauge_family(
            "kv_cache_usage_perc", "Share of KV blocks that are active, 0..1.", [({}, active / total if total else 0.0)]
        )
        counter = self._series.counter_family
        exhausted, preempted = (0, 0) if stats is None else (stats.num_kv_exhausted, stats.num_preemptions)
        yield counter(
            "kv_exhausted",
            "Calls that were refused because the KV blocks or recurrent states were reserved for other turns, or too "
            "few.",
            [({}, exhausted)],
        )
        yield counter("num_preemptions", "Admitted calls that gave up their KV and ran it again.", [({}, preempted)])

    def _states(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._series.gauge_family(
            "recurrent_state_bytes",
            "Bytes of the recurrent states of a hybrid: of sessions, or snapshots for other sessions and later turns.",
            [({"of": "sessions"}, stats.session_state_bytes), ({"of": "snapshots"}, stats.snapshot_state_bytes)],
        )
        yield self._series.counter_family(
            "replayed_tokens",
            "Tokens of a hybrid that ran again, because a recurrent state cannot go back.",
            [({}, stats.num_replayed_tokens)],
        )
        yield self._series.counter_family(
            "withdrawn_snapshots",
            "Snapshots of a hybrid that are no longer used, because a session that began at one failed.",
            [({}, stats.num_withdrawn_snapshots)],
        )

    def _description(self, info: EngineInfo | None) -> Iterator[Metric]:
        num_sessions = 0 if info is None else info.num_sessions
        yield self._series.gauge_family("num_sessions", "Sessions with KV here.", [({}, num_sessions)])
        config = {} if info is None else {
            "block_size": str(info.kv_block_tokens), "num_gpu_blocks": str(info.num_kv_blocks),
            "cache_dtype": info.dtype,
        }  # fmt: skip
        yield self._series.gauge_family(
            "cache_config_info",
            "Layout of the KV cache, once the model is loaded; always 1.",
            [(config, 1)] if config else [],
            ("block_size", "num_gpu_blocks", "cache_dtype"),
        )
