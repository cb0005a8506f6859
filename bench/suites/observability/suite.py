"""Suite `observability`: what metrics, the losslessness audit and traces cost.

Coordinators that differ in their audits or traces alone share one target and one draft of the deep pair and take turns,
so the ratio of a pair is the cost. Metrics are always counted, so their cost is the time inside the calls that count,
taken in the running services, as a share of the time of the same rounds. Scrapes are paired again. An audit of every
round and ten scrapes a second bound what one audited round in 500 and a scrape every 15 seconds cost, which is far
below the machine's noise. One stream has 128 greedy tokens, each of 16 streams 64, and no two prompts share KV. Run
it on an idle machine.
"""

import argparse
from functools import partial

from bench.harness.rows import Origin, Row
from bench.suites.observability.systems import measure_metrics, measure_systems
from bench.systems.models import DEMO, deep_target

SUITE = "observability"
#: Interleaved runs by the number of streams. They take four minutes on two idle cores.
NUM_RUNS = {1: 27, 16: 12}
NUM_QUICK_RUNS = 2


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; print nothing but progress."""
    row = partial(Row, suite=SUITE, origin=Origin(), quick=arguments.quick)
    num_runs = dict.fromkeys(NUM_RUNS, NUM_QUICK_RUNS) if arguments.quick else NUM_RUNS
    with deep_target() as deep_dir:
        rows = [
            each
            for pair, target in (("demo pair", DEMO / "target"), ("deep(18, 0.02)", deep_dir))
            for each in measure_metrics(pair, target, num_runs, row)
        ]
        return rows + measure_systems("deep(18, 0.02)", deep_dir, num_runs, row)
