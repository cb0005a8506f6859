"""Names of objects and ports that do not exist."""

from __future__ import annotations

from k8s.validation.documents import of_kind
from tests.support.planted_faults.overlay import Overlay, Place, at_env, at_field, fault


@fault
def missing_config_map(overlay: Overlay) -> Place:
    container = overlay.service()
    container.body["env"].append(
        {"name": "EXTRA", "valueFrom": {"configMapKeyRef": {"name": "specdec-modells", "key": "draft"}}}
    )
    return at_env(container, "EXTRA")


@fault
def missing_key(overlay: Overlay) -> Place:
    container, config_map = overlay.service(), overlay.one("ConfigMap")
    container.body["env"].append(
        {"name": "EXTRA", "valueFrom": {"configMapKeyRef": {"name": config_map.name, "key": "drafft"}}}
    )
    return at_env(container, "EXTRA")


@fault
def missing_secret(overlay: Overlay) -> Place:
    container = overlay.service()
    container.body["env"].append(
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-tokken", "key": "token"}}}
    )
    return at_env(container, "HF_TOKEN")


@fault
def missing_volume(overlay: Overlay) -> Place:
    container = overlay.service()
    container.body["volumeMounts"].append({"name": "spare", "mountPath": "/spare"})
    return at_field(container, "volumeMounts[spare]")


@fault
def probe_of_a_missing_port_name(overlay: Overlay) -> Place:
    container = overlay.service()
    container.body["livenessProbe"] = {"tcpSocket": {"port": "helth"}}
    return at_field(container, "livenessProbe")


@fault
def service_of_a_missing_port_name(overlay: Overlay) -> Place:
    document = overlay.one("Service")
    document.body["spec"]["ports"][0]["targetPort"] = "gprc"
    return Place(document, "spec.ports[0].targetPort")


@fault
def scrape_of_a_missing_port_name(overlay: Overlay) -> Place:
    document = overlay.one("PodMonitor")
    document.body["spec"]["podMetricsEndpoints"][0]["port"] = "metric"
    return Place(document, "spec.podMetricsEndpoints[0].port")


@fault
def policy_for_no_pod(overlay: Overlay) -> Place:
    document = overlay.random.choice(
        [one for one in of_kind(overlay.documents, "NetworkPolicy") if one.spec["podSelector"]]
    )
    document.body["spec"]["podSelector"] = {"matchLabels": {"app.kubernetes.io/name": "targets"}}
    return Place(document, "spec.podSelector")
