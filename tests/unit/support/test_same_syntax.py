"""The comparison of code without prose sees changes of behaviour, and no others."""

from __future__ import annotations

from tests.support.same_syntax import code_of

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
