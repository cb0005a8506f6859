"""The committed dashboards are those that `make dashboards` writes, and show no series that does not exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from monitoring.dashboards import FOLDER, written
from tests.support.prometheus import queries_of, rules, selectors_of
from tools.public_names import SNAPSHOT

NAMES = ("users", "speculation", "pools", "state")
_SUFFIX = r"(_bucket|_sum|_count|_total)?$"


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return written()


def dashboard(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def test_the_four_dashboards_are_committed_as_they_are_generated(texts: dict[str, str]) -> None:
    assert sorted(texts) == sorted(f"{name}.json" for name in NAMES)
    assert sorted(path.name for path in FOLDER.glob("*.json")) == sorted(texts)
    for name, text in texts.items():
        assert (FOLDER / name).read_text() == text, f"{name} differs from the code: run make dashboards"


def test_every_dashboard_is_a_config_map_that_kubectl_can_apply() -> None:
    component = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    files = [file for generator in component["configMapGenerator"] for file in generator["files"]]
    assert sorted(files) == sorted(f"{name}.json" for name in NAMES)
    for generator in component["configMapGenerator"]:
        assert sum((FOLDER / file).stat().st_size for file in generator["files"]) < 200_000, generator["name"]


@pytest.mark.parametrize("name", NAMES)
def test_every_query_can_be_limited_to_a_cluster_and_a_namespace(name: str) -> None:
    for query in queries_of(dashboard(name)):
        for selector in selectors_of(query):
            assert 'cluster=~"$cluster", namespace=~"$namespace"' in selector, query


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_says_what_it_shows_and_lies_inside_the_grid_without_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard(name)["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, panel["title"]
        assert all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"], panel["title"]


def test_dashboards_and_rules_read_series_that_services_or_rules_make() -> None:
    served = {name for metrics in json.loads(SNAPSHOT.read_text())["metrics"].values() for name in metrics}
    made = served | {rule["record"] for rule in rules() if "record" in rule}
    expressions = [rule["expr"] for rule in rules()]
    expressions += [query for name in NAMES for query in queries_of(dashboard(name))]
    read = {name for text in expressions for name in re.findall(r"(?:specdec|vllm):[\w:]+", text)}
    assert len(read) > 60
    assert {name for name in read if not {name, re.sub(_SUFFIX, "", name)} & made} == set()
