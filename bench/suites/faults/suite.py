"""Suite `faults`: what clients feel when parts die, stop or are overloaded, and what keys and encryption cost.

Real processes, the demo pair and a real Redis. Outcomes (nothing lost, nothing doubled) are asserted by
`make test-failure`; this suite has the times and ratios. Run it on an idle machine.
"""

import argparse
from collections.abc import Callable
from functools import partial

from bench.harness.rows import Origin, Row
from bench.suites.faults.drafts import measure_drafts_gone
from bench.suites.faults.fairness import measure_fairness
from bench.suites.faults.outages import measure_outages
from bench.suites.faults.overload import measure_overload
from bench.suites.faults.secured import measure_security

SUITE = "faults"

#: Every measurement takes a function that makes a row of the suite, and whether it is a quick one; it returns its rows.
MEASUREMENTS: dict[str, Callable[[Callable[..., Row], bool], list[Row]]] = {
    "outages": measure_outages,
    "drafts": measure_drafts_gone,
    "overload": measure_overload,
    "fairness": measure_fairness,
    "security": measure_security,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the choice of measurements."""
    names = list(MEASUREMENTS)
    parser.add_argument("--rows", "--only", nargs="+", choices=names, default=names, help="only these measurements")


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; print nothing but progress."""
    row = partial(Row, suite=SUITE, origin=Origin(), quick=arguments.quick)
    return [each for name in arguments.rows for each in MEASUREMENTS[name](row, arguments.quick)]
