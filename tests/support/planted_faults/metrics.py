"""Metrics and labels that no service exports."""

from __future__ import annotations

from k8s.validation.documents import Document
from tests.support.planted_faults.overlay import Overlay, Place, fault


@fault
def unknown_metric_of_an_autoscaler(overlay: Overlay) -> Place:
    document = overlay.one("HorizontalPodAutoscaler")
    document.body["spec"]["metrics"] = [{
        "type": "Pods",
        "pods": {
            "metric": {"name": "specdec:num_requests_wating"}, "target": {"type": "AverageValue", "averageValue": "4"},
        },
    }]  # fmt: skip
    return Place(document, "spec.metrics[0].pods.metric.name")


@fault
def unknown_metric_of_a_rule(overlay: Overlay) -> Place:
    document = overlay.one("PrometheusRule")
    document.body["spec"]["groups"][0]["rules"][0]["expr"] = "rate(specdec:draft_lat_total[5m]) > 1"
    return Place(document, "rules[0].expr")


@fault
def unknown_label_of_a_rule(overlay: Overlay) -> Place:
    document = overlay.one("PrometheusRule")
    document.body["spec"]["groups"][0]["rules"][0]["expr"] = 'sum by (pol) (specdec:kv_blocks{state="active"}) > 1'
    return Place(document, "rules[0].expr")


def scaled_object(overlay: Overlay) -> Document:
    """Put a ScaledObject of KEDA in the place of an autoscaler."""
    old = overlay.one("HorizontalPodAutoscaler")
    metadata = {
        "serverAddress": "http://prometheus:9090",
        "threshold": "4",
        "query": "sum(specdec:num_requests_waiting)",
    }
    body = {
        "apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": old.name},
        "spec": {
            "scaleTargetRef": {"name": old.spec["scaleTargetRef"]["name"]},
            "triggers": [{"type": "prometheus", "metadata": metadata}],
        },
    }  # fmt: skip
    overlay.documents.remove(old)
    overlay.documents.append(Document(old.file, body))
    return overlay.documents[-1]


@fault
def unknown_metric_of_a_trigger(overlay: Overlay) -> Place:
    document = scaled_object(overlay)
    document.body["spec"]["triggers"][0]["metadata"]["query"] = "sum(specdec:kv_block)"
    return Place(document, "spec.triggers[0].metadata.query")
