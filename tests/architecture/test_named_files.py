"""Files that the map of the house names are there: a stranger who walks by docs/architecture.md finds each door."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("specdec", "coordinator", "draft_service", "target_service", "bench", "tests")
FILES = [path.relative_to(ROOT).as_posix() for top in TOPS for path in (ROOT / top).rglob("*.py")]


def named_files() -> list[str]:
    return sorted(set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())))


@pytest.mark.parametrize("name", named_files())
def test_a_file_that_the_architecture_page_names_exists(name: str) -> None:
    assert any(f"/{path}".endswith(f"/{name}") for path in FILES)


def test_the_walk_is_read() -> None:
    assert {"generation/publisher.py", "front/wire.py"} <= set(named_files())
