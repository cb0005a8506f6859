"""What the overlays give, as kubectl renders them: pools are apart, and each has one autoscaler at most."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from k8s.validation.documents import Document, of_kind
from k8s.validation.rendering import Overlay, find_overlays, render
from tests.unit.deployment.test_k8s_validate import KUBECTL

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(KUBECTL is None, reason="no kubectl: `make k8s-tools` installs it")


def rendered(name: str, root: Path = ROOT) -> list[Document]:
    assert KUBECTL is not None
    return render(Overlay(name, (root / name,)), root, KUBECTL)


def named(documents: list[Document], kind: str) -> dict[str, Document]:
    return {document.name: document for document in of_kind(documents, kind)}


def templates(root: Path) -> dict[str, Any]:
    return {
        name: deployment.spec["template"]
        for name, deployment in named(rendered("k8s/base", root), "Deployment").items()
    }


@pytest.mark.parametrize(("pool", "restarted"), [("draft", {"draft"}), ("target", {"target", "coordinator"})])
def test_a_changed_model_restarts_the_pods_that_load_it_and_no_others(
    pool: str, restarted: set[str], tmp_path: Path
) -> None:
    """Coordinators read the target's tokenizer."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s", ignore=shutil.ignore_patterns("__pycache__"))
    before = templates(tmp_path)
    path = tmp_path / "k8s" / "base" / pool / "kustomization.yaml"
    path.write_text(path.read_text().replace("model=/app/models/demo/", "model=example/other-"))
    after = templates(tmp_path)
    assert {name for name in before if before[name] != after[name]} == restarted


@pytest.mark.parametrize(("overlay", "pool"), [("two-pools", "draft-code"), ("canary-target", "target-canary")])
def test_a_second_pool_shares_no_pod_model_or_budget_with_the_first(overlay: str, pool: str) -> None:
    documents = rendered(f"k8s/overlays/{overlay}")
    first = pool.partition("-")[0]
    deployments, budgets = named(documents, "Deployment"), named(documents, "PodDisruptionBudget")
    selectors = [deployments[name].spec["selector"]["matchLabels"] for name in (first, pool)]
    assert selectors[0].keys() == selectors[1].keys()
    assert selectors[0] != selectors[1]
    assert [budgets[name].spec["selector"]["matchLabels"] for name in (first, pool)] == selectors
    models = [
        entry["valueFrom"]["configMapKeyRef"]["name"]
        for name in (first, pool)
        for entry in deployments[name].spec["template"]["spec"]["containers"][0]["env"]
        if entry["name"].endswith("__MODEL")
    ]
    assert len(set(models)) == 2
    assert set(models) <= named(documents, "ConfigMap").keys()


def test_autoscalers_own_the_numbers_of_replicas_where_there_are_any() -> None:
    documents = rendered("k8s/overlays/cpu")
    deployments, autoscalers = named(documents, "Deployment"), named(documents, "HorizontalPodAutoscaler")
    assert autoscalers.keys() == deployments.keys()
    assert not any("replicas" in deployment.spec for deployment in deployments.values())
    metrics = {name: [one["type"] for one in scaler.spec["metrics"]] for name, scaler in autoscalers.items()}
    assert all("Resource" not in types for types in metrics.values())  # no pool is bound by processor time


def test_replicas_on_gpus_ask_for_one_each_and_need_no_spare_one_to_roll_out() -> None:
    deployments = named(rendered("k8s/overlays/gpu"), "Deployment")
    for name in ("draft", "target"):
        spec = deployments[name].spec
        (container,) = spec["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    (coordinator,) = deployments["coordinator"].spec["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in coordinator["resources"]["limits"]


def test_every_overlay_is_listed_in_the_tutorial() -> None:
    page = (ROOT / "docs" / "tutorials" / "first-deployment.md").read_text()
    overlays = [overlay.name for overlay in find_overlays(ROOT) if overlay.name.startswith("k8s/overlays/")]
    assert len(overlays) >= 6
    assert [name for name in overlays if f"`{name}`" not in page] == []
