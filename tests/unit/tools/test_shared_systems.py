"""Which worker runs which files: those that share a running system are run by one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

from tools.shared_systems import SHARING, scope_of

ROOT = Path(__file__).parents[3]

NOTES_ITS_WORKER = """
import os
from pathlib import Path
def test_it(): Path("WORKER_OF_" + Path(__file__).stem).write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


def test_the_files_that_share_a_system_are_those_that_import_its_fixtures() -> None:
    texts = {path.stem: path.read_text() for path in (ROOT / "tests" / "e2e").glob("test_*.py")}
    files = {name for name, text in texts.items() if "gateway_system" in text or "playground_page" in text}
    assert {name for names in SHARING.values() for name in names} == files


def test_other_files_are_scopes_of_their_own() -> None:
    assert scope_of("tests/e2e/test_talk.py::test_a") == scope_of("tests/e2e/test_tmux.py::test_b")
    assert scope_of("tests/e2e/test_up.py::test_a") == "tests/e2e/test_up.py"


def test_one_worker_runs_the_files_that_share_a_system(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "e2e"
    folder.mkdir(parents=True)
    for name in (*itertools.chain.from_iterable(SHARING.values()), "test_other"):
        (folder / f"{name}.py").write_text(NOTES_ITS_WORKER)
    command = [
        sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tools.shared_systems", "-n", "3", "--dist", "loadfile",
        "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "tests",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)
    workers = {
        system: {(tmp_path / f"WORKER_OF_{name}").read_text() for name in names} for system, names in SHARING.items()
    }
    assert {system: len(found) for system, found in workers.items()} == dict.fromkeys(SHARING, 1)
    assert workers["system"] != workers["demo"]
