"""Read who imports whom from the product's own source.

A module depends on what its import statements name, wherever they stand, and on modules that it starts by name: string
literals such as "specdec.service.rank" in the arguments of a process. Modules live in rooms, which
tests/architecture/layers.toml explains. `house_room_of` knows the rooms of the whole house; `room_of` divides the
engine and the coordinator into their own packages as well.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("draft_service", "target_service", "coordinator", "gateway")
PRODUCT = ("specdec", *SERVICES, "bench")

LAYERS: dict[str, Any] = tomllib.loads((ROOT / "tests" / "architecture" / "layers.toml").read_text(encoding="utf-8"))
#: Packages whose own modules and packages are rooms, too.
DIVIDED: tuple[str, ...] = tuple(LAYERS["divided"])

Graph = Mapping[str, set[str]]


def python_files(tops: Sequence[str] = ("specdec", *SERVICES)) -> list[Path]:
    """Return the written Python files of these packages; generated protobuf code is left out."""
    return [
        path
        for top in tops
        for path in sorted((ROOT / top).rglob("*.py"))
        if path.relative_to(ROOT).parts[:2] != ("specdec", "v1")
    ]


def module_of(path: Path) -> str:
    """Return the dotted name of a file; a package's `__init__` has the package's name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def house_room_of(module: str) -> str:
    """Return a top-level room: a package of `specdec`, or another top-level package."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "specdec" else 1])


def room_of(module: str) -> str:
    """Return a module's room; inside a divided package one level further down: `specdec.engine.loop`."""
    room = house_room_of(module)
    return ".".join(module.split(".")[: room.count(".") + 2]) if room in DIVIDED else room


@cache
def imported_modules(source: str, package: str = "") -> frozenset[str]:
    """Return the dotted modules that a file of `package` imports, those inside functions too."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            # `from specdec.contract import errors` names a module; `from specdec.contract.types import Draft` does not.
            names = [f"{base}.{alias.name}" for alias in node.names]
            modules.update(name if _is_module(name) else base for name in names)
    return frozenset(modules)


def imports_of(path: Path) -> frozenset[str]:
    """Return the dotted modules that a file imports."""
    return imported_modules(path.read_text(encoding="utf-8"), module_of(path).rpartition(".")[0])


@cache
def started_modules(source: str) -> frozenset[str]:
    """Return the product's modules that a file starts by name.

    These are the string after "-m" in a list of arguments, and every string that is the dotted name of a module or of
    a package with a `__main__`. A name without a dot that does not follow "-m" is not counted: "coordinator" is also a
    word, and whole services are programs that depend on nobody's imports.
    """
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            modules.add(node.value)
        elif isinstance(node, ast.List | ast.Tuple | ast.Call):
            words = node.args if isinstance(node, ast.Call) else node.elts
            values = [word.value if isinstance(word, ast.Constant) else None for word in words]
            modules.update(name for flag, name in pairwise(values) if flag == "-m" and isinstance(name, str))
    return frozenset(module for module in modules if _is_runnable(module))


def is_product(module: str) -> bool:
    return module.split(".")[0] in PRODUCT


def graph_of_rooms(
    room: Callable[[str], str], files: Iterable[Path], *, with_starts: bool = False
) -> dict[str, set[str]]:
    """Return each room with the other rooms that its files depend on.

    The root package `specdec` is no room: it holds the version and names of the public interface.

    Args:
        room: `room_of` or `house_room_of`.
        files: the files to read.
        with_starts: count modules that are started by name as imports.
    """
    graph: dict[str, set[str]] = {}
    for path in files:
        module, modules = module_of(path), imports_of(path)
        modules |= started_modules(path.read_text(encoding="utf-8")) if with_starts else frozenset()
        reached = {room(name) for name in modules if is_product(name)}
        graph.setdefault(room(module), set()).update(reached)
    for other in set().union(*graph.values()):
        graph.setdefault(other, set())
    graph.pop("specdec", None)
    return {name: reached - {name, "specdec"} for name, reached in graph.items()}


def inner_rooms(graph: Graph, package: str) -> dict[str, set[str]]:
    """Return the part of a graph that lies inside a divided package."""
    rooms = {room for room in graph if room.startswith(f"{package}.")}
    return {room: graph[room] & rooms for room in rooms}


def upward_arrows(graph: Graph) -> set[tuple[str, str]]:
    """Return the arrows that lead back up: those that close a circle, as a walk in the order of names meets them."""
    upward: set[tuple[str, str]] = set()
    done: set[str] = set()

    def walk(room: str, path: tuple[str, ...]) -> None:
        for other in sorted(graph[room]):
            if other in path:
                upward.add((room, other))
            elif other not in done:
                walk(other, (*path, other))
        done.add(room)

    for room in sorted(graph):
        if room not in done:
            walk(room, (room,))
    return upward


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of rooms that all depend on each other, directly or through others."""

    @cache
    def reached(room: str) -> frozenset[str]:
        found, new = set[str](), [room]
        while new:
            new = [other for one in new for other in graph[one] if other not in found]
            found.update(new)
        return frozenset(found)

    groups = {tuple(sorted(o for o in reached(room) if room in reached(o))) for room in graph if room in reached(room)}
    return sorted(map(list, groups))


def floors(graph: Graph) -> dict[str, int]:
    """Return each room's floor: one above the highest room it depends on. Upward arrows are left out."""
    upward = upward_arrows(graph)

    @cache
    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in graph[room] if (room, other) not in upward), default=0)

    return {room: floor(room) for room in graph}


@cache
def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _is_runnable(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return is_product(name) and (path.with_suffix(".py").exists() or (path / "__main__.py").exists())
