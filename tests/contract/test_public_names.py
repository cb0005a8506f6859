"""Public names change on purpose or not at all: flags, metrics, Redis keys, Lua scripts, protos, the SDK."""

from __future__ import annotations

import difflib
import json

from tests.support.public_names import SNAPSHOT, as_text, collect


def difference(before: str, after: str) -> list[str]:
    """Return the lines of a snapshot that were added or removed."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def test_public_names_are_those_of_the_snapshot() -> None:
    changes = difference(SNAPSHOT.read_text(encoding="utf-8"), as_text(collect()))
    assert not changes, "run `python -m tests.support.public_names` if these are meant:\n" + "\n".join(changes)


def test_a_renamed_flag_is_a_difference() -> None:
    """Negative control."""
    text = SNAPSHOT.read_text(encoding="utf-8")
    names = json.loads(text)
    names["flags"]["coordinator"].remove("--listen")
    assert [line.strip('-", ') for line in difference(text, as_text(names))] == ["listen"]
