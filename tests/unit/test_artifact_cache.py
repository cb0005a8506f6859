"""Kept machine code is used only if it is complete and no other user can write it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec.checkpoints import artifact_cache

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    built = tmp_path / "built"
    built.write_bytes(CONTENT)
    path = tmp_path / "below" / "cache" / "code.so"
    before = os.umask(0)
    try:
        artifact_cache.keep(built, path)
    finally:
        os.umask(before)
    return path


def test_a_kept_file_is_usable_and_starts_with_its_content(kept: Path) -> None:
    assert artifact_cache.is_usable(kept)
    assert kept.read_bytes()[: len(CONTENT)] == CONTENT
    assert list(kept.parent.iterdir()) == [kept]


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o666])
def test_a_file_that_others_may_write_is_not_usable(kept: Path, mode: int) -> None:
    kept.chmod(mode)
    assert not artifact_cache.is_usable(kept)
    kept.chmod(0o755)
    assert artifact_cache.is_usable(kept)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_not_usable(kept: Path) -> None:
    os.chown(kept, 12345, -1)
    assert not artifact_cache.is_usable(kept)


@pytest.mark.parametrize("at", [0, len(CONTENT) // 2, len(CONTENT) - 1, len(CONTENT), len(CONTENT) + 15])
def test_one_changed_byte_is_noticed(kept: Path, at: int) -> None:
    content = bytearray(kept.read_bytes())
    content[at] ^= 1
    kept.write_bytes(content)
    assert not artifact_cache.is_usable(kept)


@pytest.mark.parametrize("num_bytes", [0, 1, 15, len(CONTENT), len(CONTENT) + 15])
def test_a_file_cut_short_is_noticed(kept: Path, num_bytes: int) -> None:
    os.truncate(kept, num_bytes)
    assert not artifact_cache.is_usable(kept)


def test_a_missing_file_and_a_directory_are_not_usable(tmp_path: Path) -> None:
    assert not artifact_cache.is_usable(tmp_path / "nothing")
    assert not artifact_cache.is_usable(tmp_path)


def test_keeping_again_replaces_what_is_there(kept: Path, tmp_path: Path) -> None:
    kept.write_bytes(b"of someone else")
    artifact_cache.keep(tmp_path / "built", kept)
    assert artifact_cache.is_usable(kept)


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_a_folder_that_others_may_write_is_neither_usable_nor_kept(
    kept: Path, tmp_path: Path, below: str
) -> None:
    """Otherwise another user could replace the file between its check and its use."""
    folder = tmp_path / below if below else kept.parent
    folder.chmod(0o777)
    assert not artifact_cache.is_usable(kept)
    with pytest.raises(PermissionError):
        artifact_cache.keep(tmp_path / "built", kept)
    folder.chmod(0o1777)  # as the folder of temporary files: others' files cannot be moved
    assert artifact_cache.is_usable(kept)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_a_folder_of_another_user_is_not_usable(kept: Path, tmp_path: Path, below: str) -> None:
    os.chown(tmp_path / below if below else kept.parent, 12345, -1)
    assert not artifact_cache.is_usable(kept)


def test_folders_are_made_for_this_user_alone(kept: Path) -> None:
    assert [folder.stat().st_mode & 0o777 for folder in (kept.parent, kept.parent.parent)] == [0o700, 0o700]
