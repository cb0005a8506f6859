"""`make proto-breaking` compares the protocol with that of the last release."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def compare(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-s", "proto-breaking"], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a repository with the protocol and the Makefile, without a tag."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    for name in ("Makefile", "buf.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "Begin")
    return tmp_path


def test_without_a_release_the_comparison_is_left_out_with_the_reason(clone: Path) -> None:
    done = compare(clone)
    assert done.returncode == 0
    assert done.stdout == "buf breaking left out: this clone has no release\n"


@pytest.mark.skipif(shutil.which("npx") is None, reason="buf is started by npx, which is not on the PATH")
@pytest.mark.parametrize("release", [("tag", "v0.1.0"), ("commit", "--allow-empty", "-qm", "Release 0.1.0")], ids=min)
def test_a_changed_field_fails_and_an_added_one_passes(clone: Path, release: tuple[str, ...]) -> None:
    git(clone, *release)
    file = clone / "protos" / "specdec" / "v1" / "coordinator.proto"
    before = file.read_text()
    field = "string session_id = 1;"
    assert field in before
    file.write_text(before.replace(field, f"{field} string added_field = 999;", 1))
    added = compare(clone)
    assert added.returncode == 0, added.stdout + added.stderr
    file.write_text(before.replace(field, "uint32 session_id = 1;", 1))
    changed = compare(clone)
    assert changed.returncode != 0
    assert 'changed type from "string" to "uint32"' in changed.stdout + changed.stderr
