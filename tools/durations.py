"""Keep how long each file of tests takes, and hold the slowest to a budget.

    pytest -p tools.durations --durations-file FILE ...     write FILE; the files with the largest budgets begin first
    python -m tools.durations FILE                          print the slowest; fail if one exceeds its budget
    python -m tools.durations FILE --write                  give the slowest new budgets, of four times what they took

A budget is in seconds of processor time, of the tests and of every process that they start: a busy machine makes them
wait longer, but gives them little more to compute. `tests/durations.toml` has the budgets.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

BUDGETS = Path(__file__).resolve().parents[1] / "tests" / "durations.toml"
#: Number of files that have a budget of their own, and that the report names.
NUM_SHOWN = 20
#: Budget of a file over what it took: compilations that a machine has kept, and neighbours, make the difference.
FACTOR = 4
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Duration:
    """Time that one file of tests took, with its fixtures."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class Budgets:
    """Limits of the processor time that files of tests may use."""

    default_cpu_s: float
    """Limit of a file that has none of its own."""
    cpu_s: dict[str, float]

    def of(self, name: str) -> float:
        return self.cpu_s.get(name, self.default_cpu_s)


def read_budgets(path: Path = BUDGETS) -> Budgets:
    return Budgets(**tomllib.loads(path.read_text()))


class Recorder:
    """Plugin of one process that runs tests: it measures from file to file."""

    def __init__(self) -> None:
        self.durations: dict[str, Duration] = {}
        self._began = _used_until_now()

    def pytest_runtestloop(self) -> None:
        self._began = _used_until_now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        result = yield
        if nextitem is None or nextitem.path != item.path:
            now, name = _used_until_now(), item.path.relative_to(item.config.rootpath).as_posix()
            before = self.durations.get(name, Duration(0, 0))
            cpu_s = max(now.cpu_s - self._began.cpu_s, 0)  # a process that outlives its parent leaves the sum
            wall_s = now.wall_s - self._began.wall_s
            self.durations[name] = Duration(round(before.cpu_s + cpu_s, 1), round(before.wall_s + wall_s, 1))
            self._began = now
        return result


class Collector:
    """Plugin of the process that the user started: it writes what its workers, or it alone, measured."""

    def __init__(self, path: Path, recorder: Recorder) -> None:
        self._path = path
        self._durations = recorder.durations

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, duration in getattr(node, "workeroutput", {}).get("durations", {}).items():
            self._durations[name] = Duration(**duration)

    def pytest_unconfigure(self) -> None:
        slowest_first = dict(sorted(self._durations.items(), key=lambda pair: -pair[1].cpu_s))
        text = json.dumps({name: asdict(duration) for name, duration in slowest_first.items()}, indent=1)
        self._path.write_text(text + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, metavar="FILE", help="write how long each file of tests took")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--durations-file")
    if path is None or config.getoption("lf", False):  # of files whose failed tests run again, a part runs
        return
    recorder = Recorder()
    config.pluginmanager.register(recorder, "recorder of durations")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Collector(path, recorder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have the largest budgets, so that none of them is the last to end."""
    budgets = read_budgets().cpu_s
    items.sort(key=lambda item: -budgets.get(item.path.relative_to(item.config.rootpath).as_posix(), 0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    recorder = session.config.pluginmanager.get_plugin("recorder of durations")
    if recorder is not None and hasattr(session.config, "workeroutput"):
        durations = {name: asdict(duration) for name, duration in recorder.durations.items()}
        session.config.workeroutput["durations"] = durations


def _used_until_now() -> Duration:
    return Duration(_cpu_s_of_tree(os.getpid()), time.monotonic())


def _cpu_s_of_tree(root: int) -> float:
    """Return the processor time of a process, of those that it started, and of the ended ones that were waited for."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        process_id = int(path.parent.name)
        parents[process_id], ticks[process_id] = int(fields[1]), sum(map(int, fields[11:15]))

    def is_in_tree(process_id: int) -> bool:
        while process_id in parents and process_id != root:
            process_id = parents[process_id]
        return process_id == root

    return sum(number for process_id, number in ticks.items() if is_in_tree(process_id)) / _TICKS_PER_S


def report(durations: dict[str, Duration], budgets: Budgets) -> list[str]:
    """Print the files that computed most; return a line for each one that exceeds its budget."""
    print(f"{'file':<72}{'CPU s':>8}{'budget':>8}{'wall s':>8}")
    ranked = sorted(durations.items(), key=lambda pair: -pair[1].cpu_s)
    for name, took in ranked[:NUM_SHOWN]:
        print(f"{name:<72}{took.cpu_s:>8.1f}{budgets.of(name):>8.0f}{took.wall_s:>8.1f}")
    cpu_s, wall_s = (sum(took) for took in zip(*((t.cpu_s, t.wall_s) for _, t in ranked), strict=True))
    print(f"{f'all {len(ranked)} files':<72}{cpu_s:>8.0f}{'':>8}{wall_s:>8.0f}")
    return [
        f"{name} used {took.cpu_s:.0f} s of processor time, its budget is {budgets.of(name):.0f} s: "
        f"make it cheaper, or give it a larger budget in {BUDGETS.name}"
        for name, took in ranked
        if took.cpu_s > budgets.of(name)
    ]


def write_budgets(durations: dict[str, Duration], path: Path) -> None:
    """Write budgets for the files that computed most; the others have the smallest of these."""
    ranked = sorted(durations.items(), key=lambda pair: -pair[1].cpu_s)[:NUM_SHOWN]
    limits = {name: math.ceil(FACTOR * took.cpu_s / 10) * 10 for name, took in ranked}
    comments = "".join(f"{line}\n" for line in path.read_text().splitlines() if line.startswith("#"))
    lines = "".join(f'"{name}" = {limit}\n' for name, limit in limits.items())
    path.write_text(f"{comments}default_cpu_s = {min(limits.values())}\n\n[cpu_s]\n{lines}")


def main(path: str, *options: str, budgets_path: Path = BUDGETS) -> int:
    durations = {name: Duration(**took) for name, took in json.loads(Path(path).read_text()).items()}
    if "--write" in options:
        write_budgets(durations, budgets_path)
    exceeded = report(durations, read_budgets(budgets_path))
    print(*(f"error: {line}" for line in exceeded), sep="\n", end="\n" if exceeded else "", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
