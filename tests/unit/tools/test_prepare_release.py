"""A release is prepared in a clean worktree only, and writes the version and the changelog."""

from __future__ import annotations

import subprocess
from datetime import date
from pathlib import Path

import pytest

from tools.prepare_release import CHANGELOG, COPIES, VERSION_FILE, main

TODAY = date(2026, 11, 28)
ENTRIES = "### Added\n\n- A draft source.\n"
BEFORE = f"# Changelog\n\n## Unreleased\n\n{ENTRIES}\n## 0.1.0 - 2026-01-02\n\n### Fixed\n\n- A fault.\n"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a repository whose version 0.1.0 is tagged."""
    (tmp_path / VERSION_FILE).parent.mkdir(parents=True)
    (tmp_path / VERSION_FILE).write_text('"""The version."""\n\n__version__ = "0.1.0"\n')
    (tmp_path / CHANGELOG).write_text(BEFORE)
    for name, field in COPIES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"format: 0.1.0\n{field}0.1.0\n{field}0.1.0\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "Begin")
    git(tmp_path, "tag", "v0.1.0")
    return tmp_path


def test_it_sets_the_version_dates_the_section_and_prints_the_commands(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["0.2.0"], clone, TODAY) == 0
    assert '__version__ = "0.2.0"\n' in (clone / VERSION_FILE).read_text()
    for name, field in COPIES.items():
        assert (clone / name).read_text() == f"format: 0.1.0\n{field}0.2.0\n{field}0.2.0\n"
    changelog = (clone / CHANGELOG).read_text()
    assert f"## Unreleased\n\n## 0.2.0 - 2026-11-28\n\n{ENTRIES}\n## 0.1.0 - 2026-01-02\n" in changelog
    printed = capsys.readouterr().out
    assert "git tag -a v0.2.0" in printed
    assert "twine upload dist/*0.2.0*" in printed
    assert set(git(clone, "status", "--porcelain").split()) == {"M", VERSION_FILE, CHANGELOG, *COPIES}
    assert git(clone, "tag").split() == ["v0.1.0"]


def test_the_next_release_finds_nothing_unreleased(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["0.2.0"], clone, TODAY) == 0
    git(clone, "commit", "-qam", "Release 0.2.0")
    assert main(["0.3.0"], clone, TODAY) == 2
    assert capsys.readouterr().err == "error: the section Unreleased of CHANGELOG.md has no entry\n"


@pytest.mark.parametrize("name", [CHANGELOG, "new.txt"])
def test_a_worktree_with_local_changes_is_refused(clone: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (clone / name).write_text("changed\n")
    assert main(["0.2.0"], clone, TODAY) == 2
    message = f"error: 1 files have local changes, the first is {name}; commit or remove them\n"
    assert capsys.readouterr().err == message
    assert '"0.1.0"' in (clone / VERSION_FILE).read_text()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.1.0", "the tag v0.1.0 exists"),
        ("0.0.9", "version 0.0.9 is not above the last one, 0.1.0"),
        ("v0.2.0", "version 'v0.2.0' is not of the form 1.2.3"),
        ("0.2", "version '0.2' is not of the form 1.2.3"),
    ],
)
def test_a_version_that_is_tagged_too_low_or_malformed_is_refused(
    clone: Path, version: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([version], clone, TODAY) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert git(clone, "status", "--porcelain") == ""


def test_versions_are_compared_by_their_numbers(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(clone, "tag", "v0.10.0")
    assert main(["0.9.0"], clone, TODAY) == 2
    assert "not above the last one, 0.10.0" in capsys.readouterr().err


def test_the_notes_of_a_tag_are_its_section(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--notes", "v0.1.0"], clone, TODAY) == 0
    assert capsys.readouterr().out == "### Fixed\n\n- A fault.\n"
    assert main(["--notes", "v0.2.0"], clone, TODAY) == 2
    assert capsys.readouterr().err == f"error: the tag is v0.2.0, and {VERSION_FILE} has version 0.1.0\n"


def test_a_version_without_a_section_has_no_notes(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clone / CHANGELOG).write_text("# Changelog\n\n## Unreleased\n")
    assert main(["--notes", "v0.1.0"], clone, TODAY) == 2
    assert capsys.readouterr().err == "error: CHANGELOG.md has no section for 0.1.0\n"
