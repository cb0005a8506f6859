"""Measure what is left of one tenant's stream while another tenant floods the system.

One `specdec up` on the demo pair. The tenant with one stream runs its requests one after another, alone first and then
beside a flood: four times the sustainable load of short requests, or 64 streams of long outputs at once. The ratio of
its tokens per second is the row. Part of the suite `faults`, which calls this.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.harness.report import waiting
from bench.harness.rows import Row
from bench.suites.faults.overload import DEMO_FLAGS, OVERLOAD
from bench.suites.faults.overload_client import Batch, LoadProcess, Outcome
from bench.systems.up import UpSystem

FLOOD_S, QUICK_FLOOD_S = 45.0, 10.0
ALONE_S, QUICK_ALONE_S = 15.0, 5.0
#: Time of the flood before the tenant with one stream comes.
LEAD_S = 5.0
LEAST_RATIO = 0.5
_NUM_STREAMS = 64
_LONG_TOKENS = 400


@dataclass(frozen=True)
class _Flood:
    """Load of the tenant that floods."""

    name: str
    make: Callable[[float, float], Batch]
    """Makes the load from its seconds and the rate of requests that the system sustains."""


_FLOODS = (
    _Flood("short requests, 4 x load", lambda seconds, rate: Batch(seconds, rate=OVERLOAD * rate, patience_s=1.0)),
    _Flood(
        f"{_NUM_STREAMS} streams of {_LONG_TOKENS} tokens",
        lambda seconds, rate: Batch(
            seconds, num_streams=_NUM_STREAMS, num_tokens=_LONG_TOKENS, first_prompt=10_000_000
        ),
    ),
)


def measure_fairness(row: Callable[..., Row], quick: bool) -> list[Row]:
    """Return the ratio of each flood."""
    rows = []
    for flood in _FLOODS:
        with waiting(f"fairness: {flood.name}"):
            rows.append(_measure(flood, partial(row, case=f"demo pair, {flood.name}", system="specdec up"), quick))
    return rows


def _measure(flood: _Flood, row: Callable[..., Row], quick: bool) -> Row:
    flood_s, alone_s = (QUICK_FLOOD_S, QUICK_ALONE_S) if quick else (FLOOD_S, ALONE_S)
    flags = [*DEMO_FLAGS, "--set", "coordinator.tenant_header=on"]
    with (
        UpSystem(flags) as system,
        LoadProcess(system.endpoint, "one") as one,
        LoadProcess(system.endpoint, "flood") as many,
    ):
        one.run(Batch(alone_s / 2, num_streams=1, first_prompt=1_000_000))  # warms the system up
        alone = _tokens_per_s(one.run(Batch(alone_s, num_streams=1, first_prompt=2_000_000)))
        peak = many.run(Batch(alone_s, num_streams=16, first_prompt=3_000_000))
        many.start(flood.make(flood_s + LEAD_S, len(peak) / alone_s))
        time.sleep(LEAD_S)
        beside = one.run(Batch(flood_s, num_streams=1, first_prompt=4_000_000))
        flooded = many.outcomes()
    refused = sum(outcome.is_refused for outcome in flooded)
    return row(
        metric="fairness", value=_tokens_per_s(beside) / alone, unit="x", required=LEAST_RATIO,
        ratio_to=f"alone ({alone:.0f} tokens/s)",
        note=f"{len(beside)} requests of the one stream, {sum(bool(outcome.error) for outcome in beside)} failed; "
        f"flood of {len(flooded)}, {refused} refused",
    )  # fmt: skip


def _tokens_per_s(outcomes: list[Outcome]) -> float:
    return sum(outcome.num_tokens for outcome in outcomes) / max(outcome.ended_s for outcome in outcomes)
