"""Hold the numbers of rooms, floors and arrows under the ceilings in layers.toml, which says how they are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest

from tests.support.import_graph import (
    DIVIDED,
    LAYERS,
    PRODUCT,
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


def counts(graph: Graph) -> dict[str, int]:
    return {
        "rooms": len(graph),
        "floors": max(floors(graph).values()),
        "arrows": sum(map(len, graph.values())),
        "upward_arrows": len(upward_arrows(graph)),
        "circles": len(circles(graph)),
    }


def excess(graph: Graph, ceilings: Mapping[str, int]) -> dict[str, str]:
    """Return what a graph has more of than its ceilings allow."""
    counted = counts(graph)
    return {name: f"{counted[name]} > {most}" for name, most in ceilings.items() if counted[name] > most}


def told(graph: Graph) -> str:
    return f"upward: {sorted(upward_arrows(graph))}; circles: {circles(graph)}; floors: {floors(graph)}"


def house(*, with_starts: bool = False) -> Graph:
    return graph_of_rooms(house_room_of, python_files(PRODUCT), with_starts=with_starts)


def inside(package: str) -> Graph:
    return inner_rooms(graph_of_rooms(room_of, python_files()), package)


GRAPHS: dict[str, Callable[[], Graph]] = {
    "house": house,
    "house_with_starts": partial(house, with_starts=True),
    **{package: partial(inside, package) for package in DIVIDED},
}


@pytest.mark.parametrize("name", GRAPHS)
def test_there_are_no_more_rooms_floors_arrows_and_circles_than_the_ceilings_allow(name: str) -> None:
    graph = GRAPHS[name]()
    assert not excess(graph, LAYERS["ceilings"][name]), f"{excess(graph, LAYERS['ceilings'][name])}; {told(graph)}"


def test_the_floors_are_those_in_the_layers() -> None:
    graphs = [house(), *(inside(package) for package in DIVIDED)]
    assert {room: floor for graph in graphs for room, floor in floors(graph).items()} == LAYERS["floors"]


def test_the_rooms_are_packages_and_services() -> None:
    graph = house()
    assert {"specdec.contract", "specdec.engine", "specdec.v1", "coordinator", "bench"} <= set(graph)
    assert not {"specdec", "specdec.engine.loop"} & set(graph)
    assert "specdec.engine" in graph["specdec.service"]


def test_the_count_sees_another_arrow_another_floor_and_a_circle() -> None:
    """Negative control."""
    stairs: dict[str, set[str]] = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    now = counts(stairs)
    assert now == {"rooms": 3, "floors": 3, "arrows": 3, "upward_arrows": 0, "circles": 0}
    assert excess({**stairs, "d": {"a"}}, now) == {"rooms": "4 > 3", "floors": "4 > 3", "arrows": "4 > 3"}
    assert excess({**stairs, "c": {"a"}}, now) == {"arrows": "4 > 3", "upward_arrows": "1 > 0", "circles": "1 > 0"}
    assert not excess(stairs, now)
