"""Overlays as kubectl renders them: pools are apart, and each has one autoscaler at most."""

from __future__ import annotations

import shlex
import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.validation.compositions import Overlay, find_overlays
from k8s.validation.documents import Document, of_kind
from k8s.validation.rendering import render
from specdec.cli.planning.component import Threshold, write_overlay
from specdec.cli.up_parser import add_parser
from specdec.service.rank import parse_arguments
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


def rank_arguments(template: dict[str, Any]) -> Namespace:
    """Return what the program of a rank reads from the command of a pod."""
    (container,) = template["spec"]["containers"]
    words = [
        word.replace("$(LWS_GROUP_SIZE)", "2").replace("$(LWS_WORKER_INDEX)", "1") for word in container["command"]
    ]
    assert words[:3] == ["python", "-m", "specdec.service.rank"]
    return parse_arguments(words[3:])[0]


def test_pods_of_a_group_are_the_ranks_of_one_replica() -> None:
    group = named(rendered("k8s/overlays/multi-node"), "LeaderWorkerSet")["target"].spec["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    ranks = [rank_arguments(leader), rank_arguments(worker)]
    assert [rank.rank for rank in ranks] == [0, 1]
    assert len({(rank.role, rank.world_size, rank.store_port, rank.local_rank) for rank in ranks}) == 1
    assert [rank.store_host for rank in ranks] == ["$(POD_IP)", "$(LWS_LEADER_ADDRESS)"]
    settings = [
        {entry["name"]: entry for entry in template["spec"]["containers"][0]["env"]} for template in (leader, worker)
    ]
    assert settings[1].items() <= settings[0].items()
    alone = {name.removeprefix("SPECDEC_TARGET__") for name in settings[0].keys() - settings[1].keys()}
    assert alone == {"POD_IP", "LISTEN", "ADVERTISE", "INSECURE", "HEALTH", "METRICS", "REDIS_URL"}


def test_roles_have_the_pods_of_the_deployments_that_they_replace() -> None:
    roles = named(rendered("k8s/overlays/disaggregated"), "DisaggregatedSet")["specdec"].spec["roles"]
    expected = named(rendered("k8s/base"), "Deployment")
    for role in roles:
        template = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        (container,) = template["spec"]["containers"]
        assert template["spec"].pop("imagePullSecrets")
        image = container["image"].rpartition("/")[2].partition(":")[0]
        container["image"] = f"localhost/specdec/{image}:latest"
        assert template == expected[role["name"]].spec["template"]
    assert not named(rendered("k8s/overlays/disaggregated"), "Deployment").keys() & {"draft", "target"}


def test_ray_has_room_for_all_replicas_that_are_asked_for() -> None:
    documents = rendered("k8s/overlays/ray")
    (group,) = named(documents, "RayCluster")["ray"].spec["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert group["rayStartParams"]["num-cpus"] == container["resources"]["requests"]["cpu"]
    (coordinator,) = named(documents, "Deployment")["coordinator"].spec["template"]["spec"]["containers"]
    words = shlex.split(coordinator["command"][2].partition("specdec up")[2].replace("$", ""))
    parser = ArgumentParser()
    add_parser(parser.add_subparsers())
    flags = parser.parse_args(["up", *words])
    assert flags.ray_address == "auto"
    num_threads = {role: flags.settings.value(role, "num_threads") for role in ("draft", "target")}
    assert max(num_threads.values()) <= int(group["rayStartParams"]["num-cpus"])
    assert flags.replicas_draft + flags.replicas_target <= group["replicas"]


@pytest.mark.parametrize("overlay", ["k8s/base", "k8s/overlays/gateway"])
def test_services_listen_on_addresses_of_both_families(overlay: str) -> None:
    listening = [
        entry["value"]
        for deployment in named(rendered(overlay), "Deployment").values()
        for entry in deployment.spec["template"]["spec"]["containers"][0]["env"]
        if entry["name"].endswith(("__LISTEN", "__HEALTH", "__METRICS"))
    ]
    assert len(listening) >= 9
    assert all(address.startswith("[::]:") for address in listening)


def test_every_overlay_is_listed_in_the_tutorial() -> None:
    page = (ROOT / "docs" / "tutorials" / "first-deployment.md").read_text()
    overlays = [overlay.name for overlay in find_overlays(ROOT) if overlay.name.startswith("k8s/overlays/")]
    assert len(overlays) >= 6
    assert [name for name in overlays if f"`{name}`" not in page] == []


@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_a_written_plan_sizes_the_autoscalers_of_an_overlay(scaler: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s", ignore=shutil.ignore_patterns("__pycache__"))
    overlay = tmp_path / "k8s" / "overlays" / "planned"
    signals = {
        "target": Threshold(5.25, 0, "specdec_calls_root", 0, "calls"),
        "draft": Threshold(30.0, 0, "specdec_calls", 1, "calls"),
        "coordinator": Threshold(150.0, 1, "specdec_num_requests_running", 1, "streams"),
    }
    write_overlay(overlay / "plan", {"target": 14, "draft": 3, "coordinator": 5}, {}, signals, {})
    names = [f"../../components/{scaler}", "plan"]
    body = {"resources": ["../../base"], "components": names, "kind": "Kustomization"}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(body))
    documents = rendered("k8s/overlays/planned", tmp_path)
    if scaler == "hpa":
        specs = {name: each.spec for name, each in named(documents, "HorizontalPodAutoscaler").items()}
        limits = {name: (spec["minReplicas"], spec["maxReplicas"]) for name, spec in specs.items()}
        assert limits == {"target": (14, 28), "draft": (3, 6), "coordinator": (5, 10)}
        assert specs["target"]["metrics"][0]["pods"]["target"]["averageValue"] == "5250m"
        assert specs["coordinator"]["metrics"][1]["pods"]["target"]["averageValue"] == "150000m"
        return
    specs = {name: each.spec for name, each in named(documents, "ScaledObject").items()}
    limits = {name: (spec["minReplicaCount"], spec["maxReplicaCount"]) for name, spec in specs.items()}
    assert limits == {"target": (14, 28), "draft": (0, 6), "coordinator": (5, 10)}
    thresholds = {name: [one["metadata"]["threshold"] for one in spec["triggers"]] for name, spec in specs.items()}
    assert thresholds["target"][0] == "5.250"
    assert thresholds["draft"][1] == "30.000"
    assert thresholds["coordinator"][1] == "150.000"
