"""Checks who sets the number of replicas: one autoscaler, or the manifest, and never both or two autoscalers."""

from __future__ import annotations

from collections.abc import Iterator

from .documents import Document, Problem, at, of_kind
from .references import scalable

AUTOSCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
_SCALED = ("Deployment", "StatefulSet", "LeaderWorkerSet")
#: Lowest and highest number of replicas, by the kind of autoscaler, with Kubernetes's and KEDA's defaults.
_LIMITS = {
    "HorizontalPodAutoscaler": ("minReplicas", 1, "maxReplicas", 1),
    "ScaledObject": ("minReplicaCount", 0, "maxReplicaCount", 100),
}


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
    for workload in of_kind(documents, *_SCALED):
        owner = owners.get((workload.kind, workload.name))
        if owner is None and "replicas" not in workload.spec:
            yield workload.problem("spec.replicas", "is required: no autoscaler sets it")
        elif owner is not None and "replicas" in workload.spec:
            yield workload.problem("spec.replicas", f"must be unset: each apply would undo what {owner.title} has set")


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
