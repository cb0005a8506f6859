"""Suite `elastic`: replicas that come and go, models over several ranks, KV and prefixes found again.

Each part is a file of its own of this folder, which says what it measures and against what.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

from bench.harness.rows import Origin, Row
from bench.systems.simulated import write_tokenizer

SUITE = "elastic"
NUM_RUNS, NUM_QUICK_RUNS = 9, 2
#: Each part is a method of the suite and a file.
FIGURES = ["pools", "recovery", "ranks", "prefixes", "tier", "zero"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the choice of parts."""
    parser.add_argument("--rows", nargs="+", choices=FIGURES, default=FIGURES, help="only these parts")


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; prints nothing but progress."""
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        suite = _Suite(write_tokenizer(Path(folder)), arguments.quick)
        return [row for name in arguments.rows for row in getattr(suite, name)()]


class _Suite:
    """The parts, each with processes of its own; a part is imported when it is run."""

    def __init__(self, tokenizer_dir: Path, quick: bool) -> None:
        self._tokenizer_dir, self._quick = tokenizer_dir, quick
        self._num_runs = NUM_QUICK_RUNS if quick else NUM_RUNS
        self._row = partial(Row, suite=SUITE, origin=Origin(), quick=quick)

    def pools(self) -> list[Row]:
        """A second pair is added under load, and the first one leaves."""
        from bench.suites.elastic.pools import measure_pools

        return measure_pools(self._tokenizer_dir, partial(self._row, simulated=True), quick=self._quick)

    def recovery(self) -> list[Row]:
        """A part of the target is lost for good."""
        from bench.suites.elastic.recovery import measure_recovery

        return measure_recovery(self._row, quick=self._quick)

    def ranks(self) -> list[Row]:
        """Measure the cost of a step's message for a model that is divided among processes."""
        from bench.suites.elastic.ranks import measure_ranks

        return measure_ranks(self._row, quick=self._quick)

    def prefixes(self) -> list[Row]:
        """Measure what coordinators learn of each other."""
        from bench.suites.elastic.prefixes import measure_prefixes

        return measure_prefixes(self._tokenizer_dir, self._num_runs, partial(self._row, simulated=True))

    def tier(self) -> list[Row]:
        """Sessions that return on a replica that never saw them."""
        from bench.suites.elastic.tier import measure_tier

        return measure_tier(self._num_runs, self._row)

    def zero(self) -> list[Row]:
        """The draft pool is scaled to none and back by its own signals."""
        from bench.suites.elastic.zero import measure_zero

        return measure_zero(self._tokenizer_dir, partial(self._row, simulated=True))
