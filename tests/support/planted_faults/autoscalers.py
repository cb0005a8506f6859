"""Faults of selectors, disruption budgets and autoscalers."""

from __future__ import annotations

from tests.support.planted_faults.overlay import Overlay, Place, fault


@fault
def service_for_no_pod(overlay: Overlay) -> Place:
    document = overlay.one("Service")
    document.body["spec"]["selector"] = {"app.kubernetes.io/name": f"{document.name}s"}
    return Place(document, "spec.selector")


@fault
def workload_that_selects_other_pods(overlay: Overlay) -> Place:
    document = overlay.one("Deployment")
    document.body["spec"]["selector"] = {"matchLabels": {"app.kubernetes.io/name": "other"}}
    return Place(document, "spec.selector")


@fault
def workloads_that_share_pods(overlay: Overlay) -> Place:
    other = overlay.copy_of(overlay.named("Deployment", "target"), "target-canary")
    other.body["spec"]["replicas"] = 1
    return Place(other, "spec.selector")


@fault
def two_disruption_budgets(overlay: Overlay) -> Place:
    document = overlay.one("PodDisruptionBudget")
    return Place(overlay.copy_of(document, f"{document.name}-second"), "spec.selector")


@fault
def two_autoscalers(overlay: Overlay) -> Place:
    document = overlay.one("HorizontalPodAutoscaler", "ScaledObject")
    return Place(overlay.copy_of(document, f"{document.name}-second"), "spec.scaleTargetRef")


@fault
def replicas_beside_an_autoscaler(overlay: Overlay) -> Place:
    target = overlay.one("HorizontalPodAutoscaler").spec["scaleTargetRef"]
    document = overlay.named(target["kind"], target["name"])
    document.body["spec"]["replicas"] = overlay.random.randint(1, 9)
    return Place(document, "spec.replicas")


@fault
def replicas_that_nothing_sets(overlay: Overlay) -> Place:
    document = overlay.one("StatefulSet")
    del document.body["spec"]["replicas"]
    return Place(document, "spec.replicas")


@fault
def missing_scale_target(overlay: Overlay) -> Place:
    document = overlay.one("HorizontalPodAutoscaler", "ScaledObject")
    document.body["spec"]["scaleTargetRef"]["name"] += "s"
    return Place(document, "spec.scaleTargetRef")


@fault
def limits_of_an_autoscaler_reversed(overlay: Overlay) -> Place:
    document = overlay.one("HorizontalPodAutoscaler")
    document.body["spec"] |= {"minReplicas": 9, "maxReplicas": 2}
    return Place(document, "spec.minReplicas")
