"""The comparison of code without prose sees changes of behaviour, and no others."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.same_syntax import code_of, differing_files, first_difference

BEFORE = '''
"""A module."""
import logging

class Box:
    """A box."""
    size: int
    """Number of items."""

    def grow(self, by: int) -> None:
        # Add them.
        logging.info("the box grows by %d", by)
        raise ValueError(f"cannot grow by {by}")
'''
PROSE = BEFORE.replace("A box.", "Container of items.").replace("# Add them.", "# Items are counted once.")
MESSAGE = BEFORE.replace("the box grows by %d", "box grew by=%d").replace("cannot grow by", "the box is full at")
CODE = BEFORE.replace("by: int", "by: float")


def test_changed_docstrings_and_comments_are_the_same_code() -> None:
    assert code_of(BEFORE) == code_of(PROSE)


def test_changed_messages_are_other_code_unless_they_are_ignored() -> None:
    assert code_of(BEFORE) != code_of(MESSAGE)
    assert code_of(BEFORE, ignore_messages=True) == code_of(MESSAGE, ignore_messages=True)


def test_a_changed_annotation_or_expression_is_other_code() -> None:
    """Negative control."""
    assert code_of(BEFORE, ignore_messages=True) != code_of(CODE, ignore_messages=True)
    changed_expression = BEFORE.replace("{by}", "{by + 1}")
    assert code_of(BEFORE, ignore_messages=True) != code_of(changed_expression, ignore_messages=True)


def test_the_first_differing_definition_is_named() -> None:
    assert first_difference(BEFORE, PROSE) is None
    assert first_difference(BEFORE, CODE) == "Box"
    assert first_difference(BEFORE, f"{BEFORE}\nLIMIT = 3\n") == "line 15: LIMIT = 3"


def test_renamed_files_are_compared_with_what_they_were_and_new_files_are_named(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "box.py").write_text(BEFORE)
    git("add", ".")
    git("commit", "-m", "Add a box")
    git("mv", "box.py", "container.py")
    (tmp_path / "container.py").write_text(PROSE)
    assert not differing_files("HEAD", None, root=tmp_path)
    (tmp_path / "new.py").write_text("SIZE = 1\n")
    git("add", ".")
    git("commit", "-m", "Move the box")
    assert differing_files("HEAD~1", "HEAD", root=tmp_path) == [("new.py", "added")]
    (tmp_path / "container.py").write_text(CODE)
    assert differing_files("HEAD", None, root=tmp_path) == [("container.py", "Box")]
