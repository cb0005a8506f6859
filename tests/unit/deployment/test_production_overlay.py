"""The overlay `production`, and components that go with each other in any order, as kubectl renders them."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.validation.documents import Container, Document, of_kind
from k8s.validation.rendering import Overlay, render
from tests.unit.deployment.test_k8s_validate import KUBECTL
from tests.unit.deployment.test_overlays import ROOT, named, rendered

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="no kubectl: `make k8s-tools` installs it")

SERVICES = ("coordinator", "draft", "gateway", "target")
#: Components that change what the gateway must agree with, and the gateway.
CHANGING = ("gateway", "tls", "redis-auth", "api-keys", "tenant-limits")
#: Components that replace Deployments, with those that they need.
REPLACING = {"multi-node": ["gpu"], "disaggregated": ["keda"], "ray": []}
_UNITS = {"": 1, "m": Fraction(1, 1000), "Mi": 2**20, "Gi": 2**30}


@pytest.fixture(scope="module")
def production() -> list[Document]:
    return rendered("k8s/overlays/production")


def composed(folder: Path, *components: str) -> list[Document]:
    """Return what an overlay of these components upon the base gives."""
    assert KUBECTL is not None
    up = Path(*[".."] * (len(folder.parts) - 1)) / ROOT.relative_to("/") / "k8s"
    body = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "specdec",
        "resources": [str(up / "base")],
        "components": [str(up / "components" / name) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(body))
    return render(Overlay("composed", (folder,)), ROOT, KUBECTL)


def container_of(documents: list[Document], service: str) -> Container:
    return named(documents, "Deployment")[service].templates[0].containers[0]


def variables(container: Container) -> dict[str, Any]:
    """Return values, or where they come from, by the name of the setting or variable."""
    prefix = f"SPECDEC_{container.name.upper()}__"
    entries = container.body["env"]
    return {one["name"].removeprefix(prefix): one.get("value", one.get("valueFrom")) for one in entries}


def number(quantity: Any) -> Fraction:
    digits = str(quantity).rstrip("mMGi")
    return Fraction(digits) * _UNITS[str(quantity)[len(digits) :]]


def test_every_connection_is_encrypted_and_every_service_has_the_key_of_services(production: list[Document]) -> None:
    for service in SERVICES:
        given = variables(container_of(production, service))
        assert (given["INSECURE"], given["TLS_CERT"], given["TLS_CA"]) == ("false", "/tls/tls.crt", "/tls/ca.crt")
        assert given["SERVICE_KEY"] == "/keys/service.key"
        assert given["REDIS_URL"] == {"secretKeyRef": {"name": "specdec-redis", "key": "url"}}
    assert {variables(container_of(production, name))["API_KEYS"] for name in ("gateway", "coordinator")} == {
        "/keys/keys.txt"
    }
    arguments = redis_of(production)["args"]
    assert arguments[arguments.index("--port") + 1] == "0"
    assert arguments[arguments.index("--requirepass") + 1] == "$(REDISCLI_AUTH)"
    assert [service.name for service in of_kind(production, "Secret")] == []


def redis_of(documents: list[Document]) -> dict[str, Any]:
    (container,) = named(documents, "StatefulSet")["redis"].templates[0].containers
    return container.body


def test_replicas_see_no_key_of_a_tenant(production: list[Document]) -> None:
    for service in ("draft", "target"):
        volumes = {one["name"]: one for one in container_of(production, service).template.spec["volumes"]}
        assert [item["key"] for item in volumes["keys"]["secret"]["items"]] == ["service.key"]


@pytest.mark.parametrize("overlay", ["k8s/base", "k8s/overlays/production"])
def test_redis_has_memory_and_disk_for_the_rewrite_of_its_log(overlay: str) -> None:
    documents = rendered(overlay)
    container = redis_of(documents)
    text = container["args"][container["args"].index("--maxmemory") + 1]
    most_bytes = int(text[:-2]) * {"mb": 2**20, "gb": 2**30}[text[-2:]]
    (claim,) = named(documents, "StatefulSet")["redis"].spec["volumeClaimTemplates"]
    assert number(container["resources"]["limits"]["memory"]) >= 3 * most_bytes
    assert number(claim["spec"]["resources"]["requests"]["storage"]) >= 8 * most_bytes


def test_all_images_have_one_registry_and_version_and_a_secret_that_pulls_them(production: list[Document]) -> None:
    assert_one_version(production)


@pytest.mark.parametrize("name", REPLACING)
def test_images_that_come_last_reach_the_pods_of_operators(name: str, tmp_path: Path) -> None:
    components = [*REPLACING[name], "redis-auth", "model-hub", "model-volume", name, "images"]
    assert_one_version(composed(tmp_path, *components))


def assert_one_version(documents: list[Document]) -> None:
    templates = [template for document in documents for template in document.templates]
    images = {one.body["image"] for template in templates for one in template.all_containers}
    ours = {image for image in images if "specdec" in image}
    assert {image.rpartition("/")[0] for image in ours} == {"registry.example.com/specdec"}
    assert len({image.rpartition(":")[2] for image in ours}) == 1
    for template in templates:
        assert template.spec["imagePullSecrets"] == [{"name": "specdec-registry"}], template.path


def test_the_quota_has_room_for_every_autoscaler_at_its_maximum_and_one_rollout(production: list[Document]) -> None:
    most = {one.name: one.spec["maxReplicas"] for one in of_kind(production, "HorizontalPodAutoscaler")}
    assert most.keys() == set(SERVICES)
    needed: dict[str, Fraction] = {}
    for document in of_kind(production, "Deployment", "StatefulSet"):
        resources = document.templates[0].containers[0].body["resources"]
        num_pods = most.get(document.name, 1) + (1 if document.name in most else 0)
        for part, name in (("requests", "cpu"), ("requests", "memory"), ("limits", "memory")):
            key = f"{part}.{name}"
            needed[key] = needed.get(key, Fraction(0)) + num_pods * number(resources[part][name])
        needed["pods"] = needed.get("pods", Fraction(0)) + num_pods
    quota = named(production, "ResourceQuota")["specdec"].spec["hard"]
    assert {name for name, least in needed.items() if number(quota[name]) < least} == set()


def test_only_the_gateway_of_the_cluster_gets_in(production: list[Document]) -> None:
    policies = named(production, "NetworkPolicy")
    for name in ("gateway", "coordinator"):
        namespaces = [
            each["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            for each in policies[name].spec["ingress"][0]["from"]
            if "namespaceSelector" in each
        ]
        assert namespaces == ["gateways"]


def test_clients_name_the_model_as_before_when_it_changes(production: list[Document]) -> None:
    assert variables(container_of(production, "gateway"))["SERVED_MODEL_NAME"] == "specdec"


def test_rollouts_wait_for_the_weights_of_a_large_model(production: list[Document]) -> None:
    """140 GB at 50 MB/s, the speed of a slow shared volume, are 47 minutes."""
    for deployment in of_kind(production, "Deployment"):
        assert deployment.spec["progressDeadlineSeconds"] >= 140e9 / 50e6


def test_pods_without_which_no_request_is_answered_outlive_drafts(production: list[Document]) -> None:
    values = {one.name: one.body["value"] for one in of_kind(production, "PriorityClass")}
    classes = {one.name: values[one.templates[0].spec["priorityClassName"]] for one in production if one.templates}
    draft = classes.pop("draft")
    assert classes.keys() == {"coordinator", "gateway", "redis", "target"}
    assert draft < min(classes.values())


def test_the_order_of_components_makes_no_difference(tmp_path: Path) -> None:
    """A gateway that is named after what changes the coordinators is changed as well."""
    orders = [CHANGING, CHANGING[::-1]]
    first, other = (
        {document.title: unordered(document.body) for document in composed(tmp_path, *order)} for order in orders
    )
    assert first == other


def unordered(value: Any) -> Any:
    """Return a value whose lists are sorted: patches add variables, volumes and flags in the order that they have."""
    if isinstance(value, dict):
        return {key: unordered(each) for key, each in value.items()}
    return sorted((unordered(each) for each in value), key=repr) if isinstance(value, list) else value


@pytest.mark.parametrize("before", [True, False])
def test_a_gateway_dials_encrypted_coordinators_with_tls_and_is_probed_so(before: bool, tmp_path: Path) -> None:
    documents = composed(tmp_path, *(("tls", "gateway") if before else ("gateway", "tls")))
    gateway = container_of(documents, "gateway")
    assert variables(gateway)["TLS_CA"] == "/tls/ca.crt"
    assert {gateway.body[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "readiness", "liveness")} == {
        "HTTPS"
    }
    protocols = {
        one.name: one.spec["ports"][0].get("appProtocol")
        for one in of_kind(documents, "Service")
        if one.name in ("gateway", "coordinator")
    }
    assert protocols == {"gateway": "https", "coordinator": "https"}


def test_openshift_gives_users_and_groups_of_its_own(tmp_path: Path) -> None:
    documents = composed(tmp_path, "gateway", "platform-openshift")
    for document in documents:
        for template in document.templates:
            assert not template.spec["securityContext"].keys() & {"runAsUser", "runAsGroup", "fsGroup"}, document.title
            assert template.spec["securityContext"]["runAsNonRoot"]


# ---- models of the hub -----------------------------------------------------------------------------------------------

#: Stands for the hub: it writes down what is asked for, and fails for one model.
_HUB = """\
import os, pathlib
def snapshot_download(model):
    with open(os.environ["ASKED"], "a") as file:
        file.write(model + "\\n")
    if "missing" in model:
        raise SystemExit(1)
"""


def test_pods_with_models_of_the_hub_wait_for_their_own_and_only_the_waiting_container_has_the_token() -> None:
    documents = rendered("k8s/overlays/hub-models")
    names = {one.name.rpartition("-")[0]: one.name for one in of_kind(documents, "ConfigMap")}
    for service, model in (("draft", "draft-model"), ("target", "target-model"), ("coordinator", "target-model")):
        template = named(documents, "Deployment")[service].templates[0]
        (waiting,) = template.init_containers
        assert variables(waiting)["MODEL"] == {"configMapKeyRef": {"name": names[model], "key": "model"}}
        assert waiting.body["image"] == template.containers[0].body["image"]
        assert "HF_TOKEN" in variables(waiting)
        serving = variables(template.containers[0])
        assert "HF_TOKEN" not in serving
        assert serving["HF_HUB_OFFLINE"] == "1"
        volumes = {one["name"]: one for one in template.spec["volumes"]}
        assert volumes["model-cache"] == {"name": "model-cache", "persistentVolumeClaim": {"claimName": "models"}}


def test_a_model_is_fetched_once_and_a_folder_of_the_image_never(tmp_path: Path) -> None:
    template = named(rendered("k8s/overlays/hub-models"), "Deployment")["target"].templates[0]
    (waiting,) = template.init_containers
    (tmp_path / "huggingface_hub.py").write_text(_HUB)
    asked = tmp_path / "asked"

    def start(model: str) -> int:
        environ = {"MODEL": model, "HF_HOME": str(tmp_path), "ASKED": str(asked), "PYTHONPATH": str(tmp_path)}
        return subprocess.run([sys.executable, *waiting.body["command"][1:]], env=environ, check=False).returncode

    statuses = [start(model) for model in ("a/b", "a/b", str(tmp_path), "a/missing", "a/missing")]
    assert statuses == [0, 0, 0, 1, 1]
    assert asked.read_text().split() == ["a/b", "a/missing", "a/missing"]
