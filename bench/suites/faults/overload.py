"""Measure what a flood does: four times the load that the demo pair sustains, in an open loop.

Three settings, each a fresh `specdec up`: calls with a deadline of 10 s; calls without one; calls without one on a
target whose KV has 40 MB (406 blocks). Before the flood, closed loops of 16 and 32 streams give the peak goodput and
the time a token of 16 streams; after it, a single stream shows whether the system has recovered. Goodput is the tokens
a second of requests that ended well. Part of the suite `faults`, which calls this.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import numpy as np

from bench.harness.process_tree import pss_bytes
from bench.harness.report import waiting
from bench.harness.rows import Row
from bench.suites.faults.overload_client import Batch, LoadProcess, Outcome
from bench.systems.models import DEMO
from bench.systems.up import UpSystem

OVERLOAD = 4.0
FLOOD_S, QUICK_FLOOD_S = 60.0, 10.0
BASELINE_S, REST_S = 15.0, 5.0
_SMALL_KV_BYTES = 40_000_000
DEMO_FLAGS = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft"), "--device", "cpu"]


@dataclass(frozen=True)
class Setting:
    """Circumstances of one flood."""

    name: str
    deadline_s: float | None
    flags: tuple[str, ...] = ()


SETTINGS = (
    Setting("deadline 10 s", 10.0),
    Setting("no deadline", None),
    Setting("no deadline, KV of 40 MB", None, ("--kv-cache-bytes-target", str(_SMALL_KV_BYTES))),
)


@dataclass(frozen=True)
class Flood:
    """What was measured in one setting."""

    peak_tokens_per_s: float
    tpot_16_s: float
    """99th percentile of the time a token at 16 streams."""
    rate: float
    """Requests a second of the flood."""
    seconds: float
    """Duration of the flood, until its last request had ended."""
    outcomes: list[Outcome] = field(repr=False)
    memory_growth: float
    """Largest memory of the flood's second half over that of its first half."""
    honest_before_s: float
    """Duration of a single stream before the flood."""
    honest_after_s: float
    """The same, 5 s after the flood."""

    @property
    def goodput(self) -> float:
        """Tokens a second of requests that ended well."""
        return sum(outcome.num_tokens for outcome in self.outcomes if not outcome.error) / self.seconds

    @property
    def tpot_p99_s(self) -> float:
        """99th percentile of the time a token of the requests that got tokens."""
        return _p99([outcome.tpot_s for outcome in self.outcomes if outcome.num_tokens > 1])


def measure_overload(row: Callable[..., Row], quick: bool) -> list[Row]:
    """Return the rows of every setting."""
    rows = []
    for setting in SETTINGS:
        with waiting(f"flood: {setting.name}"):
            flood = measure_flood(setting, QUICK_FLOOD_S if quick else FLOOD_S)
        rows += _rows(flood, partial(row, case=f"demo pair, 4 x load: {setting.name}", system="specdec up"))
    return rows


def measure_flood(setting: Setting, seconds: float) -> Flood:
    """Measure one setting in a system of its own."""
    baseline_s = min(BASELINE_S, seconds)
    with UpSystem([*DEMO_FLAGS, *setting.flags]) as system, LoadProcess(system.endpoint) as load:
        load.run(Batch(baseline_s / 3, num_streams=16, first_prompt=3_000_000))  # warms the system up
        honest_before_s = _honest_s(load, 1_000_000)
        loops = {
            num_streams: load.run(Batch(baseline_s, num_streams=num_streams, first_prompt=num_streams * 10_000_000))
            for num_streams in (16, 32)
        }
        peak = max(map(_goodput, loops.values()))
        num_tokens = loops[16][0].num_tokens
        rate = OVERLOAD * peak / num_tokens
        with _MemoryWatch(system.pid) as memory:
            began_s = time.monotonic()
            outcomes = load.run(Batch(seconds, rate=rate, deadline_s=setting.deadline_s))
            took_s = time.monotonic() - began_s
        time.sleep(REST_S)
        return Flood(
            peak_tokens_per_s=peak,
            tpot_16_s=_p99([outcome.tpot_s for outcome in loops[16] if outcome.num_tokens > 1]),
            rate=rate,
            seconds=took_s,
            outcomes=outcomes,
            memory_growth=memory.growth,
            honest_before_s=honest_before_s,
            honest_after_s=_honest_s(load, 2_000_000),
        )


def _honest_s(load: LoadProcess, first_prompt: int) -> float:
    """Return the median duration of three requests, one after another."""
    runs = [load.run(Batch(1e-3, num_streams=1, first_prompt=first_prompt + index))[0] for index in range(3)]
    return float(np.median([run.ended_s - run.began_s if not run.error else np.inf for run in runs]))


def _goodput(outcomes: list[Outcome]) -> float:
    return sum(outcome.num_tokens for outcome in outcomes if not outcome.error) / max(
        outcome.ended_s for outcome in outcomes
    )


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99)) if values else float("inf")


def _rows(flood: Flood, row: Callable[..., Row]) -> list[Row]:
    outcomes = flood.outcomes
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    refused = [outcome for outcome in outcomes if outcome.is_refused]
    unexplained = [
        outcome for outcome in outcomes if outcome.error and not outcome.num_tokens and not outcome.is_refused
    ]
    in_stream = [outcome for outcome in outcomes if outcome.failed_in_stream]
    wasted = sum(outcome.num_tokens for outcome in in_stream)
    note = (
        f"{len(outcomes)} requests, {flood.rate:.1f}/s; {len(outcomes) - sum(errors.values())} ended well, "
        f"{len(refused)} refused with RetryInfo; errors {dict(errors)}; {wasted} tokens for nobody"
    )
    return [
        row(
            metric="goodput", value=flood.goodput / flood.peak_tokens_per_s, unit="x", required=0.9, note=note,
            ratio_to=f"peak ({flood.peak_tokens_per_s:.0f} tokens/s)",
        ),
        row(metric="refused_without_retry_info", value=float(len(unexplained)), unit="requests", at_most=0.0),
        row(metric="failed_in_stream", value=float(len(in_stream)), unit="requests", at_most=0.0),
        row(
            metric="tpot_p99", value=flood.tpot_p99_s / flood.tpot_16_s, unit="x", at_most=2.0,
            ratio_to=f"16 streams ({1e3 * flood.tpot_16_s:.0f} ms)",
        ),
        row(metric="memory", value=flood.memory_growth, unit="x", at_most=1.1, ratio_to="first half of the flood"),
        row(
            metric="honest_stream", value=flood.honest_after_s / flood.honest_before_s, unit="x", at_most=1.5,
            ratio_to=f"before the flood ({flood.honest_before_s:.2f} s)",
        ),
    ]  # fmt: skip


class _MemoryWatch:
    """Samples the memory of a process tree twice a second while the context is open."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> float:
        """Largest sample of the second half over the largest of the first half."""
        half = max(1, len(self._samples) // 2)
        return max(self._samples[half:] or self._samples) / max(self._samples[:half])

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            self._samples.append(pss_bytes(self._pid))
