"""Files that the map of the house names are there: a stranger who walks by docs/architecture.md finds each door."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("specdec", "coordinator", "gateway", "draft_service", "target_service", "bench", "tests", "tools")
FILES = [path.relative_to(ROOT).as_posix() for top in TOPS for path in (ROOT / top).rglob("*.py")]


def named_files() -> list[str]:
    return sorted(set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())))


@pytest.mark.parametrize("name", named_files())
def test_a_file_that_the_architecture_page_names_exists(name: str) -> None:
    assert any(f"/{path}".endswith(f"/{name}") for path in FILES)


def test_the_walk_is_read() -> None:
    assert {"generation/publisher.py", "front/wire.py"} <= set(named_files())


WALK = "## The path of a request"
REPLICA = "### Inside a replica"
#: Packages of the services before the replicas.
FRONT = ("coordinator/", "gateway/")
#: Sentences of a docstring that say where the way does not go on.
ASIDE = re.compile(r"(Not here|Not an?|Called by|Built by|Made by|Shared by|Read by)\b")


def walked_files() -> list[str]:
    """Paths of the files that the walk names, once each: the front services' and the core's, then a replica's."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    walk, replica = page[page.index(WALK) : page.index("## The packages")].split(REPLICA)
    paths = [
        path
        for part, is_replica in ((walk, False), (replica, True))
        for name in re.findall(r"`([\w/]+\.py)`", part)
        for path in FILES
        if f"/{path}".endswith(f"/{name}") and not path.startswith(("tests/", "bench/", "tools/"))
        if path.startswith(FRONT) != is_replica or path.startswith(("specdec/core/", "specdec/rpc/"))
    ]
    return list(dict.fromkeys(paths))


def named_next(docstring: str) -> list[str]:
    """Files of the walk that a docstring names outside of its asides."""
    sentences = [text for text in re.split(r"(?<=[.:])\s+(?=[A-Z])", docstring) if not ASIDE.match(text)]
    names = {name.replace(".", "/") for text in sentences for name in re.findall(r"`([\w./]+)`", text)}
    return [path for path in walked_files() if any(f"/{path}".endswith(f"/{name}.py") for name in names)]


@pytest.mark.parametrize("path", walked_files())
def test_a_file_of_the_walk_says_where_the_way_goes_on(path: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    assert set(named_next(docstring)) - {path}, f"{path} names no other file of the walk"


def test_the_walk_goes_from_the_front_door_to_the_device_and_back() -> None:
    assert {"coordinator/front/servicer.py", "specdec/core/block.py", "specdec/engine/model/attention.py",
            "target_service/servicer.py", "specdec/engine/simulated/device.py"} <= set(walked_files())  # fmt: skip


def test_what_a_file_is_not_is_no_way_on() -> None:
    """Negative control."""
    assert not named_next("Tokens. Not here: readers (`generation/stream`). Called by `runner`.")
    assert named_next("Tokens. They go to `generation/stream`.") == ["coordinator/generation/stream.py"]


def test_the_walk_names_at_most_fifty_files() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    walk = page[page.index(WALK) : page.index("## The packages")]
    assert len(set(re.findall(r"`([\w/]+\.py)`", walk))) <= 50
