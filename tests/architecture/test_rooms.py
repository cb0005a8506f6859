"""Hold the numbers of rooms, floors and arrows under the ceilings in layers.toml, which says how they are counted."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

import pytest

from tests.support.import_graph import (
    PRODUCT,
    ROOT,
    Graph,
    circles,
    floors,
    graph_of_rooms,
    house_room_of,
    inner_rooms,
    python_files,
    room_of,
    upward_arrows,
)

CEILINGS = tomllib.loads((ROOT / "tests" / "architecture" / "layers.toml").read_text(encoding="utf-8"))["ceilings"]


def counts(graph: Graph) -> dict[str, int]:
    return {
        "rooms": len(graph),
        "floors": max(floors(graph).values()),
        "arrows": sum(map(len, graph.values())),
        "upward": len(upward_arrows(graph)),
        "circles": len(circles(graph)),
    }


def excess(graph: Graph, ceilings: Mapping[str, int]) -> dict[str, str]:
    """Return what a graph has more of than its ceilings allow."""
    counted = counts(graph)
    return {name: f"{counted[name]} > {most}" for name, most in ceilings.items() if counted[name] > most}


def told(graph: Graph) -> str:
    return f"upward: {sorted(upward_arrows(graph))}; circles: {circles(graph)}; floors: {floors(graph)}"


@pytest.mark.parametrize(("name", "with_starts"), [("imports", False), ("imports_and_starts", True)])
def test_the_house_has_no_more_rooms_floors_and_arrows_than_its_ceilings(name: str, with_starts: bool) -> None:
    graph = graph_of_rooms(house_room_of, python_files(PRODUCT), with_starts=with_starts)
    assert not excess(graph, CEILINGS[name]), f"{excess(graph, CEILINGS[name])}; {told(graph)}"


@pytest.mark.parametrize(("name", "package"), [("engine", "specdec.engine"), ("coordinator", "coordinator")])
def test_a_divided_package_has_no_more_upward_arrows_and_circles_than_its_ceilings(name: str, package: str) -> None:
    graph = inner_rooms(graph_of_rooms(room_of, python_files()), package)
    assert not excess(graph, CEILINGS[name]), f"{excess(graph, CEILINGS[name])}; {told(graph)}"


def test_the_rooms_are_flat_modules_packages_and_services() -> None:
    graph = graph_of_rooms(house_room_of, python_files(PRODUCT))
    assert {"specdec.types", "specdec.engine", "specdec.v1", "coordinator", "bench"} <= set(graph)
    assert not {"specdec", "specdec.engine.loop"} & set(graph)
    assert "specdec.engine" in graph["specdec.service"]


def test_the_count_sees_another_arrow_another_floor_and_a_circle() -> None:
    """Negative control."""
    stairs: dict[str, set[str]] = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    now = counts(stairs)
    assert now == {"rooms": 3, "floors": 3, "arrows": 3, "upward": 0, "circles": 0}
    assert excess({**stairs, "d": {"a"}}, now) == {"rooms": "4 > 3", "floors": "4 > 3", "arrows": "4 > 3"}
    assert excess({**stairs, "c": {"a"}}, now) == {"arrows": "4 > 3", "upward": "1 > 0", "circles": "1 > 0"}
    assert not excess(stairs, now)
