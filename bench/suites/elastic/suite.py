"""Suite `elastic`: replicas that come and go, models over several ranks, KV and prefixes found again.

Each part is a file of its own of this folder, which says what it measures and against what.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.harness.rows import Origin, Row
from bench.suites.elastic.pools import measure_pools
from bench.suites.elastic.prefixes import measure_prefixes
from bench.suites.elastic.ranks import measure_ranks
from bench.suites.elastic.recovery import measure_recovery
from bench.suites.elastic.tier import measure_tier
from bench.systems.simulated import write_tokenizer

SUITE = "elastic"


def _zero(tokenizer_dir: Path, row: Callable[..., Row], _quick: bool) -> list[Row]:
    from bench.suites.elastic.zero import measure_zero  # needs the bench extra

    return measure_zero(tokenizer_dir, row)


#: Each part accepts the folder of a tokenizer, what makes a row, and whether it is to be quick.
PARTS: dict[str, Callable[[Path, Callable[..., Row], bool], list[Row]]] = {
    "pools": measure_pools,
    "recovery": measure_recovery,
    "ranks": measure_ranks,
    "prefixes": measure_prefixes,
    "tier": measure_tier,
    "zero": _zero,
}
#: Parts around simulated engines.
_SIMULATED = ("pools", "prefixes", "zero")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the choice of parts."""
    parser.add_argument("--rows", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts")


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; print nothing but progress."""
    row = partial(Row, suite=SUITE, origin=Origin(), quick=arguments.quick)
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        tokenizer_dir = write_tokenizer(Path(folder))
        return [
            made
            for name in arguments.rows
            for made in PARTS[name](tokenizer_dir, partial(row, simulated=name in _SIMULATED), arguments.quick)
        ]
