"""Suite `autoscaling`: simulated request traces under the autoscalers of the manifests, and what breaks at large loads.

Pods, scrapes and decisions are simulated; the queries, thresholds, windows and policies are those of k8s/components,
and the step times those of `specdec plan`. Only the processor time of Redis is measured here. A run takes under three
minutes, and gives the same simulated figures every time.
"""

import argparse
from functools import partial
from typing import Any

from bench.harness.rows import Origin, Row

SUITE = "autoscaling"


def run(arguments: argparse.Namespace) -> list[Row]:
    """Simulate and return the rows; print nothing but progress.

    What it needs (simpy, promql-parser) is imported here: a machine that runs another suite need not have it.
    """
    from bench.harness.report import progress
    from k8s.simulation.rows import goodput_rows, limit_rows, pause_rows, signal_rows, size_rows, trace_rows

    row: Any = partial(Row, suite=SUITE, origin=Origin(), quick=arguments.quick)
    parts = (goodput_rows, signal_rows, trace_rows, pause_rows, size_rows, limit_rows)
    rows: list[Row] = []
    with progress(SUITE, len(parts)) as advance:
        for part in parts:
            rows += part(row, arguments.quick)
            advance()
    return rows
