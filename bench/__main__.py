"""`python -m bench SUITE --json FILE --plot DIR [--quick]`: run a suite, print its table, keep its rows and plots.

`python -m bench compare OLD NEW` prints which figures moved between two kept runs. The exit code is 1 when a row falls
short of what it must reach, so that a script can hold a result; with `--quick` it never is, because its intervals are
too wide to judge by.
"""

import argparse
import signal
import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from bench import (
    compare,
    drafts,
    elastic,
    faults,
    gateway,
    gpu,
    latency,
    observability,
    orchestration,
    planning,
    real,
    throughput,
    wire,
)
from bench.autoscaling import suite as autoscaling
from bench.engines import suite as engines
from bench.report import print_table, write_plots
from bench.rows import write_json
from bench.servers import suite as peers

_MODULES = (
    latency, throughput, orchestration, wire, drafts, elastic, faults, gateway, observability, planning, autoscaling,
    gpu, real, peers, engines,
)  # fmt: skip
SUITES = {suite.SUITE: suite for suite in _MODULES}


def main(argv: list[str] | None = None) -> int:
    """Run the suite that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure against peers in the same run.")
    commands = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, suite in SUITES.items():
        command = commands.add_parser(name, help=(suite.__doc__ or "").partition("\n")[0])
        command.add_argument("--json", type=Path, help="write the rows to this file")
        command.add_argument("--plot", type=Path, help="write PNG plots into this folder (needs the bench extra)")
        command.add_argument(
            "--quick", action="store_true", help="a few pairs only: a smoke test, not a figure to keep"
        )
        suite.add_arguments(command)
    compare.add_arguments(commands.add_parser("compare", help="say what moved between two files of rows"))
    arguments = parser.parse_args(argv)
    if arguments.suite == "compare":
        return compare.run(arguments)

    disable_progress_bar()
    rows = SUITES[arguments.suite].run(arguments)
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
