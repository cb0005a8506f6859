"""What CI keeps about the time of tests: processor time of each file, and a budget that fails the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import durations
from tools.durations import Duration

ROOT = Path(__file__).parents[3]

IDLE = "def test_idle(): pass\n"
#: Its fixture computes in a process of its own until it has used a quarter of a second.
BUSY = """
import subprocess, sys
import pytest
@pytest.fixture(scope="module")
def part():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.25: pass"], check=True)
def test_busy(part): pass
def test_busy_too(part): pass
"""


def run(folder: Path, *arguments: str) -> dict[str, Duration]:
    """Run pytest in a folder; return what it kept."""
    kept = folder / "kept.json"
    command = [
        sys.executable, "-m", "pytest", "-p", "tools.durations", "-p", "no:cacheprovider", "--rootdir", str(folder),
        "--durations-file", str(kept), *arguments, str(folder),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return {name: Duration(**took) for name, took in json.loads(kept.read_text()).items()}


@pytest.mark.parametrize("arguments", [(), ("-p", "xdist", "-n", "2", "--dist", "loadfile")], ids=["alone", "workers"])
def test_a_file_is_charged_for_its_fixtures_and_their_processes(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "test_idle.py").write_text(IDLE)
    kept = run(tmp_path, *arguments)
    assert list(kept) == ["test_busy.py", "test_idle.py"]
    assert kept["test_busy.py"].cpu_s >= 0.2
    assert kept["test_busy.py"].wall_s >= 0.2


def check(folder: Path, budgets: str, *options: str, **cpu_s: float) -> int:
    """Return the exit code of the check of durations against budgets."""
    (folder / "kept.json").write_text(json.dumps({name: {"cpu_s": s, "wall_s": 9.0} for name, s in cpu_s.items()}))
    (folder / "budgets.toml").write_text(budgets)
    return durations.main(str(folder / "kept.json"), *options, budgets_path=folder / "budgets.toml")


BUDGETS = "default_cpu_s = 10\n[cpu_s]\nlarge = 40\n"


def test_files_within_their_budgets_pass_and_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, BUDGETS, small=10, large=40) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [["large", "40.0", "40", "9.0"], ["small", "10.0", "10", "9.0"], ["all", "2", "files", "50", "18"]]


def test_a_file_above_its_budget_fails_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, BUDGETS, small=11, large=41) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("error: large used 41 s of processor time, its budget is 40 s")
    assert errors[1].startswith("error: small used 11 s of processor time, its budget is 10 s")


def test_new_budgets_are_a_multiple_of_what_the_slowest_took(tmp_path: Path) -> None:
    cpu_s = {f"f{place}": 10.0 * place for place in range(1, 23)}
    assert check(tmp_path, f"# Why.\n{BUDGETS}", "--write", **cpu_s) == 0
    written = (tmp_path / "budgets.toml").read_text()
    assert written.startswith('# Why.\ndefault_cpu_s = 120\n\n[cpu_s]\n"f22" = 880\n')
    assert written.count(" = ") == 21


def test_every_file_with_a_budget_exists() -> None:
    budgets = durations.read_budgets()
    assert [name for name in budgets.cpu_s if not (ROOT / name).is_file()] == []
    assert all(limit >= budgets.default_cpu_s for limit in budgets.cpu_s.values())


def test_files_with_budgets_begin_first(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    class Item:
        def __init__(self, name: str) -> None:
            self.config, self.path = request.config, request.config.rootpath / name

    monkeypatch.setattr(durations, "read_budgets", lambda: durations.Budgets(10, {"b": 20, "d": 40}))
    items = [Item(name) for name in "abcd"]
    durations.pytest_collection_modifyitems(items)
    assert [item.path.name for item in items] == ["d", "b", "a", "c"]
