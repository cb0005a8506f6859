"""The runner of `make ci`: a test that fails once is listed and passes; what else goes wrong fails the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

GREEN = "def test_green(): pass\n"
FAILING = "def test_failing(): assert False\n"
FLAKY = """
from pathlib import Path
def test_flaky():
    been_here = Path("been_here")
    if not been_here.exists():
        been_here.touch()
        assert False
"""
BROKEN_ONCE = """
from pathlib import Path
import pytest
@pytest.fixture(scope="module", params=["a", "b"])
def part(request):
    been_here = Path("been_here_" + request.param)
    if not been_here.exists():
        been_here.touch()
        raise RuntimeError("the part did not start")
def test_with_part(part): pass
"""
SKIPPED_ALONE = """
from pathlib import Path
import pytest
def test_skipped_alone():
    been_here = Path("been_here_too")
    if been_here.exists():
        pytest.skip("nothing to see")
    been_here.touch()
    assert False
"""
CRASHING_ONCE = FLAKY.replace("assert False", "__import__('os')._exit(1)")
SLOW_ONCE = FLAKY.replace("assert False", "__import__('time').sleep(600)")


@dataclass
class Ran:
    """What one run of a suite left behind."""

    exit_code: int
    output: str
    listed: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of the last line."""
        last = self.output.splitlines()[-1]
        assert re.fullmatch(r"=+ .* =+", last), self.output
        return {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", last.partition(" in ")[0])}


@dataclass
class Suite:
    """Files of tests, and the list beside them."""

    folder: Path

    def run(self, *texts: str, timeout_s: int = 300, num_workers: int = 0) -> Ran:
        for index, text in enumerate(texts):
            (self.folder / f"test_{index}.py").write_text(text)
        # Without the plugins of the environment, each of the many interpreters starts in a second.
        command = [
            sys.executable, "-m", "tools.flaky", "flaky.txt", "-p", "xdist", "-p", "pytest_timeout",
            "-n", str(num_workers), "--dist", "loadfile", "--timeout", str(timeout_s),
            "--rootdir", str(self.folder), str(self.folder),
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=self.folder, env=environment, text=True, capture_output=True, check=False)
        return Ran(done.returncode, done.stderr + done.stdout, self.list.read_text().splitlines()[1:])

    @property
    def list(self) -> Path:
        return self.folder / "flaky.txt"


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    (tmp_path / "flaky.txt").write_text("# a comment\n")
    return Suite(tmp_path)


def test_a_green_suite_passes_and_runs_once(suite: Suite) -> None:
    ran = suite.run(GREEN)
    assert (ran.exit_code, ran.counts, ran.listed) == (0, {"passed": 1}, [])
    assert "once more" not in ran.output


def test_a_test_that_passes_alone_is_listed_and_the_run_passes(suite: Suite) -> None:
    ran = suite.run(GREEN, FLAKY, num_workers=2)
    assert (ran.exit_code, ran.counts) == (0, {"flaky": 1, "passed": 1}), ran.output
    assert ran.listed == ["test_1.py::test_flaky"]
    assert "flaky, passed alone:\n  test_1.py::test_flaky" in ran.output


def test_a_test_is_listed_once(suite: Suite) -> None:
    for _ in range(2):
        (suite.folder / "been_here").unlink(missing_ok=True)
        assert suite.run(FLAKY).listed == ["test_0.py::test_flaky"]


def test_a_part_that_does_not_start_once_makes_its_tests_flaky(suite: Suite) -> None:
    ran = suite.run(BROKEN_ONCE)
    assert (ran.exit_code, ran.counts) == (0, {"flaky": 2}), ran.output
    assert ran.listed == ["test_0.py::test_with_part[a]", "test_0.py::test_with_part[b]"]


def test_a_test_that_fails_again_fails_the_run_and_the_others_are_listed(suite: Suite) -> None:
    ran = suite.run(GREEN, FLAKY, FAILING)
    assert (ran.exit_code, ran.counts) == (1, {"failed": 1, "flaky": 1, "passed": 1}), ran.output
    assert ran.listed == ["test_1.py::test_flaky"]


def test_a_failed_test_that_is_skipped_alone_fails_the_run(suite: Suite) -> None:
    ran = suite.run(FLAKY, SKIPPED_ALONE)
    assert (ran.exit_code, ran.counts) == (1, {"failed": 1, "flaky": 1}), ran.output


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ((GREEN, "import no_such_module\n"), "test_1.py: cannot be collected"),
        ((GREEN, CRASHING_ONCE), "test_1.py::test_flaky: its worker crashed"),
    ],
)
def test_what_is_no_failed_test_does_not_run_again(suite: Suite, texts: tuple[str, ...], reason: str) -> None:
    ran = suite.run(*texts, FLAKY.replace("been_here", "been_here_as_well"), num_workers=2)
    assert ran.exit_code != 0
    assert reason in ran.output
    assert ran.listed == []


def test_a_test_that_times_out_does_not_run_again(suite: Suite) -> None:
    ran = suite.run(SLOW_ONCE, timeout_s=1)
    assert ran.exit_code == 1
    assert "test_0.py::test_flaky: timed out" in ran.output
    assert ran.listed == []


def test_a_run_without_tests_fails(suite: Suite) -> None:
    assert suite.run("").exit_code == pytest.ExitCode.NO_TESTS_COLLECTED
