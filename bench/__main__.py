"""`python -m bench SUITE --json FILE --plot DIR [--quick]`: run a suite, print its table, keep its rows and plots.

`python -m bench --list` says what each suite shows and how long it takes, and `python -m bench compare OLD NEW` which
figures moved between two kept runs. The exit code is 1 when a row falls short of what it must reach, so that a script
can hold a result; with `--quick` it never is, because its intervals are too wide to judge by.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import compare
from bench.harness.plots import write_plots
from bench.harness.report import print_suites, print_table
from bench.harness.rows import write_json

#: The module of each suite, and about how many minutes it takes on two idle cores.
SUITES = {
    "latency": ("bench.suites.latency.suite", 12),
    "crowd": ("bench.suites.crowd.suite", 25),
    "orchestration": ("bench.suites.orchestration.suite", 12),
    "wire": ("bench.suites.wire", 2),
    "drafts": ("bench.suites.drafts.suite", 60),
    "elastic": ("bench.suites.elastic.suite", 30),
    "faults": ("bench.suites.faults.suite", 20),
    "gateway": ("bench.suites.gateway.suite", 6),
    "observability": ("bench.suites.observability.suite", 12),
    "structured": ("bench.suites.structured", 3),
    "hybrids": ("bench.suites.hybrids", 15),
    "planning": ("bench.suites.planning", 6),
    "autoscaling": ("k8s.simulation.suite", 3),
    "gpu": ("bench.suites.gpu.suite", 10),
    "real": ("bench.suites.real.suite", 15),
    "peers": ("bench.suites.peers.suite", 60),
    "engines": ("bench.suites.engines.suite", 60),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite that the command line names."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure against peers in the same run.")
    parser.add_argument("--list", action="store_true", help="say what each suite shows and how long it takes")
    if "--list" in argv:
        print_suites((name, suite_of(name).__doc__ or "", minutes) for name, (_, minutes) in SUITES.items())
        return 0
    commands = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name in SUITES:
        _add_suite(commands.add_parser(name), name if name in argv else "")
    compare.add_arguments(commands.add_parser("compare", help="say what moved between two files of rows"))
    arguments = parser.parse_args(argv)
    if arguments.suite == "compare":
        return compare.run(arguments)
    return _run(arguments)


def suite_of(name: str) -> Any:
    """Return the module of a suite, which has `run`, and `add_arguments` if it has flags."""
    return importlib.import_module(SUITES[name][0])


def _add_suite(command: argparse.ArgumentParser, suite: str) -> None:
    """Add the options of every suite, and those of one if it is the one that runs."""
    command.add_argument("--json", type=Path, help="write the rows to this file")
    command.add_argument("--plot", type=Path, help="write PNG plots into this folder (needs the bench extra)")
    command.add_argument("--quick", action="store_true", help="a few pairs only: a smoke test, not a figure to keep")
    if suite and hasattr(module := suite_of(suite), "add_arguments"):
        module.add_arguments(command)


def _run(arguments: argparse.Namespace) -> int:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    rows = suite_of(arguments.suite).run(arguments)
    if not rows:
        return 0
    print_table(rows)
    if arguments.json:
        write_json(rows, arguments.json)
    if arguments.plot:
        for path in write_plots(rows, arguments.plot):
            print(path)
    return int(not arguments.quick and any(row.falls_short for row in rows))


if __name__ == "__main__":
    # An interrupted suite stops the processes it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    raise SystemExit(main())
