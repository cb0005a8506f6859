"""Faults that a schema refuses."""

from __future__ import annotations

from k8s.validation.documents import Document
from tests.support.planted_faults.overlay import Overlay, Place, fault


@fault
def misspelt_field(overlay: Overlay) -> Place:
    container = overlay.service()
    old, new = overlay.random.choice(
        [("readinessProbe", "readyProbe"), ("resources", "resource"), ("volumeMounts", "volumeMount")]
    )
    container.body[new] = container.body.pop(old)
    return Place(container.template.document, "spec.template.spec.containers[0]")


@fault
def value_of_a_wrong_type(overlay: Overlay) -> Place:
    container = overlay.service()
    container.body["ports"][0]["containerPort"] = "grpc"
    return Place(container.template.document, "spec.template.spec.containers[0].ports[0].containerPort")


@fault
def removed_api_version(overlay: Overlay) -> Place:
    document = overlay.one("PodDisruptionBudget")
    document.body["apiVersion"] = "policy/v1beta1"
    return Place(document, "kind")


@fault
def kind_without_a_schema(overlay: Overlay) -> Place:
    document = Document(overlay.documents[0].file, {
        "apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": "w"}, "spec": {},
    })  # fmt: skip
    overlay.documents.append(document)
    return Place(document, "kind")


@fault
def misspelt_field_of_a_custom_resource(overlay: Overlay) -> Place:
    document = overlay.one("PodMonitor", "ScaledObject")
    document.body["spec"]["selektor"] = {}
    return Place(document, "spec")
