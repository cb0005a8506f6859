"""Run pytest, and run the tests that failed once more, alone: what `make ci` does in place of pytest.

    python -m tools.flaky LIST ARGUMENTS_OF_PYTEST...

A test that passes then is flaky: it is printed, appended to LIST, and does not fail the run. Everything else does: a
test that fails again, one that timed out or whose worker crashed, files that cannot be collected, and a run without
tests. Both runs have this module as a plugin, which notes how each test ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

#: Words of pytest's summary, in its order, that are not of tests which failed.
_OTHER_COUNTS = ("passed", "skipped", "deselected", "xfailed", "xpassed", "warnings")


@dataclass
class Outcome:
    """End of a run of pytest."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Tests that may pass when they run again."""
    fatal: list[str] = field(default_factory=list)
    """Faults that another run cannot excuse, each with its reason."""
    counts: dict[str, int] = field(default_factory=dict)
    """Numbers of pytest's summary."""
    exit_code: int = 0
    """Code that pytest ended with."""


class Recorder:
    """Plugin that writes the outcome of its run; the workers of a run have none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcome = Outcome()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome, test = self._outcome, report.nodeid
        if report.failed and report.when not in ("setup", "call", "teardown"):
            outcome.fatal.append(f"{test}: its worker crashed")
        elif report.failed and "from pytest-timeout" in report.longreprtext:
            outcome.fatal.append(f"{test}: timed out")
        elif report.failed:
            outcome.failed.append(test)
        elif report.passed and report.when == "call":
            outcome.passed.append(test)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outcome.fatal.append(f"{report.nodeid}: cannot be collected")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object) -> None:
        if error:
            self._outcome.fatal.append(f"a worker of the tests ended: {error}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        self._outcome.counts = {word: len(found) for word, found in terminalreporter.stats.items() if word}

    def pytest_unconfigure(self) -> None:
        self._path.write_text(json.dumps(asdict(self._outcome)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcome", type=Path, metavar="FILE", help="write how each test ended to FILE")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcome")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


def main(flaky_list: str, *arguments: str) -> int:
    """Return 0 if every test passed, at the first or the second try."""
    with tempfile.TemporaryDirectory() as directory:
        # A cache that knows no failures of earlier runs.
        every = [*arguments, "-o", f"cache_dir={directory}/cache"]
        first = _run(every, Path(directory, "first"))
        if first.exit_code != pytest.ExitCode.TESTS_FAILED or first.fatal or not first.failed:
            return _refused(first)
        print("the tests that failed run once more, alone", flush=True)
        again = [*every, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
        second = _run(again, Path(directory, "second"))
    failed = sorted(set(first.failed))
    flaky = [test for test in failed if test in second.passed and test not in second.failed and not second.fatal]
    _append(Path(flaky_list), flaky)
    _print_summary(first.counts, flaky, num_failed=len(failed) - len(flaky))
    return 0 if flaky == failed else 1


def _run(arguments: Sequence[str], path: Path) -> Outcome:
    command = [sys.executable, "-m", "pytest", "-p", __spec__.name, "--outcome", str(path), *arguments]
    exit_code = subprocess.run(command, check=False).returncode
    outcome = Outcome(**json.loads(path.read_text())) if path.exists() else Outcome()
    outcome.exit_code = exit_code
    return outcome


def _refused(outcome: Outcome) -> int:
    """Return the exit code of a run that is not repeated; say why if pytest itself saw nothing wrong."""
    if outcome.fatal:
        print("no test runs again:", *outcome.fatal, sep="\n  ", file=sys.stderr)
    return outcome.exit_code or int(bool(outcome.fatal))


def _append(path: Path, tests: Sequence[str]) -> None:
    """Print flaky tests, and append those to the list that it does not have."""
    if not tests:
        return
    print("flaky, passed alone:", *tests, sep="\n  ")
    listed = path.read_text().splitlines() if path.exists() else []
    with path.open("a") as file:
        file.writelines(f"{test}\n" for test in tests if test not in listed)


def _print_summary(counts: Mapping[str, int], flaky: Sequence[str], num_failed: int) -> None:
    """Print the counts of both runs together, in the form of pytest's last line."""
    numbers = {"failed": num_failed, "flaky": len(flaky)} | {word: counts.get(word, 0) for word in _OTHER_COUNTS}
    line = ", ".join(f"{number} {word}" for word, number in numbers.items() if number)
    print(f" {line} ".center(100, "="), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
