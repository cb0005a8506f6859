"""Faults of workloads that operators run: groups of pods, sets of roles, and Ray clusters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k8s.validation.documents import Document
from tests.support.planted_faults import autoscalers, pods, references, settings
from tests.support.planted_faults.overlay import Fault, Overlay, Place

#: Workload of each overlay that an operator runs.
OPERATED = {"multi-node": "LeaderWorkerSet", "disaggregated": "DisaggregatedSet", "ray": "RayCluster"}

#: Faults in pods, which are found in the pods of every kind.
_OF_PODS: tuple[Fault, ...] = (
    references.missing_config_map, references.missing_key, references.missing_secret, references.missing_volume,
    references.probe_of_a_missing_port_name, references.scrape_of_a_missing_port_name, references.policy_for_no_pod,
    settings.setting_of_no_service, pods.missing_probe, pods.missing_resource, pods.weak_container,
    pods.pod_that_may_be_root, pods.mounted_token, autoscalers.two_disruption_budgets,
)  # fmt: skip
#: Faults in pods that run one of our services by themselves.
_OF_SERVICES: tuple[Fault, ...] = (
    settings.misspelt_setting, settings.malformed_address, settings.word_instead_of_number,
    settings.wrong_scheme_of_redis, settings.undefined_variable, settings.port_that_the_container_lacks,
    pods.grace_shorter_than_the_drain, pods.probe_of_another_port, pods.variable_twice,
)  # fmt: skip

OPERATOR_FAULTS: dict[tuple[str, str], Fault] = {
    (overlay, plant.__name__): plant
    for overlay in OPERATED
    for plant in (*_OF_PODS, *(() if overlay == "ray" else _OF_SERVICES))
}
"""Faults by the overlay that they are planted in, and their name."""


def _fault(overlay: str) -> Callable[[Fault], Fault]:
    def add(plant: Fault) -> Fault:
        OPERATOR_FAULTS[overlay, plant.__name__] = plant
        return plant

    return add


def _workload(overlay: Overlay, name: str) -> Document:
    return overlay.one(OPERATED[name])


@_fault("multi-node")
def misspelt_variable_of_the_controller(overlay: Overlay) -> Place:
    document = _workload(overlay, "multi-node")
    worker = document.spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    worker["command"][5] = "--world-size=$(LWS_GROUP_SIZ)"
    return Place(document, "workerTemplate.spec.containers[target].command[5]")


@_fault("multi-node")
def misspelt_setting_of_a_worker(overlay: Overlay) -> Place:
    document = _workload(overlay, "multi-node")
    worker = document.spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    worker["env"].append({"name": "SPECDEC_TARGET__DTYP", "value": "int8"})
    return Place(document, "workerTemplate.spec.containers[target].env[SPECDEC_TARGET__DTYP]")


@_fault("multi-node")
def workers_that_nothing_restarts(overlay: Overlay) -> Place:
    document = _workload(overlay, "multi-node")
    document.spec["leaderWorkerTemplate"]["restartPolicy"] = "None"
    return Place(document, "workerTemplate.spec.containers[target].livenessProbe")


@_fault("multi-node")
def groups_that_nothing_counts(overlay: Overlay) -> Place:
    document = _workload(overlay, "multi-node")
    del document.spec["replicas"]
    return Place(document, "spec.replicas")


@_fault("multi-node")
def deployment_that_takes_pods_of_a_group(overlay: Overlay) -> Place:
    document = overlay.named("Deployment", "draft")
    labels = {"app.kubernetes.io/name": "target", "specdec.dev/pool": "default"}
    document.spec["selector"] = {"matchLabels": labels}
    document.spec["template"]["metadata"]["labels"] = labels
    return Place(document, "spec.selector")


@_fault("multi-node")
def scaler_of_another_api_group(overlay: Overlay) -> Place:
    """Kubernetes would look for a LeaderWorkerSet among the kinds of `apps`."""
    reference = {"apiVersion": "apps/v1", "kind": "LeaderWorkerSet", "name": "target"}
    del _workload(overlay, "multi-node").spec["replicas"]
    return _added_scaler(overlay, reference, "spec.scaleTargetRef.apiVersion")


def _added_scaler(overlay: Overlay, reference: dict[str, Any], field: str) -> Place:
    body = {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "added"},
        "spec": {"scaleTargetRef": reference, "minReplicas": 1, "maxReplicas": 4},
    }  # fmt: skip
    overlay.documents.append(Document("k8s/overlays/added.yaml", body))
    return Place(overlay.documents[-1], field)


@_fault("disaggregated")
def scaler_of_a_set(overlay: Overlay) -> Place:
    """A DisaggregatedSet has no scale subresource."""
    reference = {"apiVersion": "disaggregatedset.x-k8s.io/v1", "kind": "DisaggregatedSet", "name": "specdec"}
    return _added_scaler(overlay, reference, "spec.scaleTargetRef")


@_fault("disaggregated")
def scaler_of_a_missing_role(overlay: Overlay) -> Place:
    document = overlay.named("ScaledObject", "draft")
    document.spec["scaleTargetRef"]["name"] = "specdec-drafts"
    return Place(document, "spec.scaleTargetRef")


@_fault("disaggregated")
def role_that_nothing_scales(overlay: Overlay) -> Place:
    overlay.documents.remove(overlay.named("ScaledObject", "draft"))
    return Place(_workload(overlay, "disaggregated"), "spec.roles[draft].spec.replicas")


@_fault("disaggregated")
def replicas_of_a_scaled_role(overlay: Overlay) -> Place:
    document = _workload(overlay, "disaggregated")
    document.spec["roles"][0]["spec"]["replicas"] = 2
    return Place(document, "spec.roles[draft].spec.replicas")


@_fault("disaggregated")
def draft_pool_of_two_roles(overlay: Overlay) -> Place:
    document = _workload(overlay, "disaggregated")
    other = overlay.copy_of(document, "copy").spec["roles"][0]
    document.spec["roles"].append({**other, "name": "draft-large", "scaling": {"mode": "Static"}})
    document.spec["roles"][-1]["spec"]["replicas"] = 1
    del overlay.documents[-1]
    return Place(document, "spec.roles[draft-large].spec.leaderWorkerTemplate.workerTemplate.spec.containers[draft]")


@_fault("ray")
def group_without_replicas(overlay: Overlay) -> Place:
    document = _workload(overlay, "ray")
    del document.spec["workerGroupSpecs"][0]["replicas"]
    return Place(document, "spec.workerGroupSpecs[replicas].replicas")


@_fault("ray")
def replicas_beside_the_autoscaler_of_ray(overlay: Overlay) -> Place:
    document = _workload(overlay, "ray")
    document.spec["enableInTreeAutoscaling"] = True
    return Place(document, "spec.workerGroupSpecs[replicas].replicas")
