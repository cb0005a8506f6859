"""Faults of network policies, Services and scrapes: ports, names and selectors of others."""

from __future__ import annotations

from typing import Any

from tests.support.planted_faults.overlay import Overlay, Place
from tests.support.planted_faults.shared import changed, container_of, planted_in


def _rule(overlay: Overlay, policy: str, direction: str, index: int = 0) -> tuple[Any, Any]:
    document = overlay.named("NetworkPolicy", policy)
    return document, document.spec[direction][index]


@planted_in("plain")
def port_of_health_in_a_policy(overlay: Overlay) -> Place:
    document, rule = _rule(overlay, "coordinator", "ingress")
    return changed(document, "spec.ingress[0].ports", rule, "ports", [{"port": 50052}])


@planted_in("plain")
def port_of_targets_towards_drafts(overlay: Overlay) -> Place:
    document, rule = _rule(overlay, "coordinator", "egress")
    return changed(document, "spec.egress[0].ports", rule, "ports", [{"port": 50071}])


@planted_in("plain")
def protocol_of_a_policy(overlay: Overlay) -> Place:
    document, rule = _rule(overlay, "draft", "ingress")
    return changed(document, "spec.ingress[0].ports", rule, "ports", [{"port": 50061, "protocol": "UDP"}])


@planted_in("plain")
def port_of_name_resolution(overlay: Overlay) -> Place:
    document, rule = _rule(overlay, "name-resolution", "egress")
    ports = [{"port": 54, "protocol": "UDP"}, {"port": 54, "protocol": "TCP"}]
    return changed(document, "spec.egress[0].ports", rule, "ports", ports)


@planted_in("plain")
def name_resolution_over_udp_alone(overlay: Overlay) -> Place:
    document, rule = _rule(overlay, "name-resolution", "egress")
    return changed(document, "spec.egress[0].ports", rule, "ports", [{"port": 53, "protocol": "UDP"}])


@planted_in("plain")
def client_of_redis_that_no_policy_selects(overlay: Overlay) -> Place:
    document = overlay.named("NetworkPolicy", "redis-clients")
    expression = document.spec["podSelector"]["matchExpressions"][0]
    return changed(document, "spec.podSelector", expression, "values", ["coordinator", "target"])


@planted_in("plain")
def client_that_redis_does_not_let_in(overlay: Overlay) -> Place:
    document, rule = _rule(overlay, "redis", "ingress")
    expression = rule["from"][0]["podSelector"]["matchExpressions"][0]
    return changed(document, "spec.ingress[0].from", expression, "values", ["coordinator", "draft"])


@planted_in("plain")
def policy_that_is_gone(overlay: Overlay) -> Place:
    overlay.documents.remove(overlay.named("NetworkPolicy", "target"))
    return Place(container_of(overlay, "target").template.document, "metadata.labels")


@planted_in("plain")
def missing_namespace_of_prometheus(overlay: Overlay) -> Place:
    document, rule = _rule(overlay, "metrics", "ingress")
    labels = rule["from"][0]["namespaceSelector"]["matchLabels"]
    return changed(document, "spec.ingress[0].from.namespaceSelector", labels, "kubernetes.io/metadata.name", "monitor")


@planted_in("plain")
def port_of_calls_for_prometheus(overlay: Overlay) -> Place:
    document, rule = _rule(overlay, "metrics", "ingress")
    return changed(document, "spec.ingress[0].ports", rule, "ports", [{"port": "grpc"}])


@planted_in("plain")
def policy_without_its_type(overlay: Overlay) -> Place:
    document = overlay.named("NetworkPolicy", "coordinator")
    return changed(document, "spec.policyTypes", document.spec, "policyTypes", ["Ingress"])


@planted_in("rich")
def policy_that_reaches_the_metadata_service(overlay: Overlay) -> Place:
    document, rule = _rule(overlay, "model-hub", "egress")
    block = rule["to"][0]["ipBlock"]
    return changed(document, "spec.egress[0].to.ipBlock", block, "except", ["10.0.0.0/8"])


@planted_in("rich")
def port_of_the_gateway_towards_coordinators(overlay: Overlay) -> Place:
    document, rule = _rule(overlay, "gateway", "egress")
    return changed(document, "spec.egress[0].ports", rule, "ports", [{"port": 50061}])


@planted_in("plain")
def port_of_a_headless_service(overlay: Overlay) -> Place:
    document = overlay.named("Service", "coordinator")
    return changed(document, "spec.ports[0].port", document.spec["ports"][0], "port", 80)


@planted_in("plain")
def service_that_selects_another_workload(overlay: Overlay) -> Place:
    document = overlay.named("Service", "coordinator")
    return changed(document, "spec.selector", document.spec, "selector", {"app.kubernetes.io/name": "target"})


@planted_in("plain")
def annotated_port_without_metrics(overlay: Overlay) -> Place:
    document = container_of(overlay, "draft").template.document
    annotations = document.spec["template"]["metadata"]["annotations"]
    return changed(document, "annotations[prometheus.io/port]", annotations, "prometheus.io/port", "9071")


@planted_in("plain")
def scrape_of_the_port_of_calls(overlay: Overlay) -> Place:
    document = overlay.named("PodMonitor", "specdec")
    endpoint = document.spec["podMetricsEndpoints"][0]
    return changed(document, "spec.podMetricsEndpoints[0].port", endpoint, "port", "grpc")


@planted_in("plain")
def scrape_of_another_path(overlay: Overlay) -> Place:
    document = overlay.named("PodMonitor", "specdec")
    endpoint = document.spec["podMetricsEndpoints"][0]
    return changed(document, "spec.podMetricsEndpoints[0].path", endpoint, "path", "/metric")


@planted_in("plain")
def service_that_nothing_scrapes(overlay: Overlay) -> Place:
    document = overlay.named("PodMonitor", "specdec")
    expression = document.spec["selector"]["matchExpressions"][0]
    return changed(document, "spec.selector", expression, "values", ["coordinator", "draft"])
