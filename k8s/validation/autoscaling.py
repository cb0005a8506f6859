"""Checks who sets the number of replicas: one autoscaler, or the manifest, and never both or two autoscalers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .documents import Body, Document, PodTemplate, Problem, at, of_kind
from .references import scalable

AUTOSCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
_SCALED = ("Deployment", "StatefulSet", "LeaderWorkerSet")
_RAY = ("RayCluster", "RayService")
_GROUPS = "spec.workerGroupSpecs"
_ROLE_SCALER = "DisaggregatedSetRoleScaler"
#: Lowest and highest number of replicas, by the kind of autoscaler, with Kubernetes's and KEDA's defaults.
_LIMITS = {
    "HorizontalPodAutoscaler": ("minReplicas", 1, "maxReplicas", 1),
    "ScaledObject": ("minReplicaCount", 0, "maxReplicaCount", 100),
}


@dataclass(frozen=True)
class _Scaled:
    """A workload, or a part of one that has a number of replicas of its own."""

    field: str
    """Path of the object with `replicas`."""
    body: Body
    key: tuple[str, str] | None = None
    """Kind and name of what an autoscaler scales; None where none can."""
    scaler: str = ""
    """Name of the controller that always sets the number; empty for an autoscaler or the manifest."""


def autoscaling_problems(documents: list[Document]) -> Iterator[Problem]:
    """Yield workloads whose number of replicas nothing sets, or two things do."""
    owners: dict[tuple[str, str], Document] = {}
    for autoscaler in of_kind(documents, *AUTOSCALERS):
        target = autoscaler.spec.get("scaleTargetRef") or {}
        key = (target.get("kind", "Deployment"), target.get("name", ""))
        first = owners.setdefault(key, autoscaler)
        if first is not autoscaler:
            yield autoscaler.problem("spec.scaleTargetRef", f"{'/'.join(key)} is scaled by {first.title}, too")
        yield from _limits(autoscaler)
        yield from _cpu(autoscaler, scalable(documents).get(key))
    for workload in documents:
        for part in _scaled_parts(workload):
            owner = owners.get(part.key) if part.key else None
            yield from _replicas(workload, part, part.scaler or (owner.title if owner else ""))


def num_replicas(template: PodTemplate, documents: list[Document]) -> int:
    """Return the lowest number of pods of a template while it runs: its own number, or the autoscaler's minimum."""
    document = template.document
    size = template.parent.get("size", 1) if "workerTemplate" in template.parent else 1
    pods = 1 if template.path.endswith(".leaderTemplate") else size - ("leaderTemplate" in template.parent)
    if document.kind in ("Job", "CronJob"):
        return 0
    for part in _scaled_parts(document):
        if template.path.startswith(part.field) or part.field == "spec":
            for autoscaler in of_kind(documents, *AUTOSCALERS):
                target = autoscaler.spec.get("scaleTargetRef") or {}
                if part.key == (target.get("kind", "Deployment"), target.get("name", "")):
                    low_name, low, _, _ = _LIMITS[autoscaler.kind]
                    return int(pods * max(1, autoscaler.spec.get(low_name, low)))
            return int(pods * part.body.get("replicas", 1))
    return 1


def _replicas(workload: Document, part: _Scaled, scaler: str) -> Iterator[Problem]:
    where = f"{part.field}.replicas"
    is_external = part.key is not None and part.key[0] == _ROLE_SCALER  # its own number is ignored
    if not scaler and (is_external or "replicas" not in part.body):
        yield workload.problem(where, "is required: no autoscaler sets it")
    elif scaler and "replicas" in part.body:
        yield workload.problem(where, f"must be unset: each apply would undo what {scaler} has set")


def _scaled_parts(document: Document) -> Iterator[_Scaled]:
    """Yield what has a number of replicas: a workload, the roles of a set, or the groups of a Ray cluster."""
    if document.kind in _SCALED:
        yield _Scaled("spec", document.spec, (document.kind, document.name))
    for role in document.spec.get("roles") or () if document.kind == "DisaggregatedSet" else ():
        key = (_ROLE_SCALER, f"{document.name}-{role['name']}")
        is_external = at(role, "scaling", "mode") == "External"
        yield _Scaled(f"spec.roles[{role['name']}].spec", role.get("spec") or {}, key if is_external else None)
    if document.kind in _RAY:
        cluster = document.spec.get("rayClusterConfig") or document.spec
        scaler = "Ray's autoscaler" if cluster.get("enableInTreeAutoscaling") else ""
        path = "spec.rayClusterConfig.workerGroupSpecs" if "rayClusterConfig" in document.spec else _GROUPS
        for group in cluster.get("workerGroupSpecs") or ():
            yield _Scaled(f"{path}[{group['groupName']}]", group, scaler=scaler)


def _limits(autoscaler: Document) -> Iterator[Problem]:
    low_name, low_default, high_name, high_default = _LIMITS[autoscaler.kind]
    low = autoscaler.spec.get(low_name, low_default)
    high = autoscaler.spec.get(high_name, high_default)
    if low > high:
        yield autoscaler.problem(f"spec.{low_name}", f"{low} exceeds {high_name}, which is {high}")


def _cpu(autoscaler: Document, workload: Document | None) -> Iterator[Problem]:
    """Yield shares of a request of processor time that a container does not have."""
    for index, metric in enumerate(autoscaler.spec.get("metrics") or ()):
        resource = metric.get("resource") or {}
        if at(resource, "target", "type") != "Utilization" or workload is None:
            continue
        for template in workload.templates:
            for container in template.containers:
                if not at(container.body, "resources", "requests", resource["name"]):
                    yield autoscaler.problem(
                        f"spec.metrics[{index}].resource",
                        f"is a share of requests.{resource['name']}, which {container.name} of {workload.title} lacks",
                    )
