"""Faults of probes: what they ask, where, and for how long."""

from __future__ import annotations

from tests.support.planted_faults.overlay import Overlay, Place, at_field
from tests.support.planted_faults.shared import changed, container_of, in_container, planted_in


@planted_in("rich")
def path_of_a_readiness_probe(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "gateway"), "readinessProbe.httpGet.path", "/readyz")


@planted_in("rich")
def liveness_that_asks_readiness(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "gateway"), "livenessProbe.httpGet.path", "/ready")


@planted_in("rich")
def readiness_that_asks_liveness(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "gateway"), "readinessProbe.httpGet.path", "/health")


@planted_in("rich")
def scheme_of_a_probe(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "gateway"), "livenessProbe.httpGet.scheme", "HTTPS")


@planted_in("plain")
def service_of_a_health_probe(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "target"), "livenessProbe.grpc.service", "livenes")


@planted_in("plain")
def service_name_of_readiness(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "coordinator"), "readinessProbe.grpc.service", "liveness")


@planted_in("plain")
def restart_of_what_is_not_ready(overlay: Overlay) -> Place:
    container = container_of(overlay, "draft")
    del container.body["livenessProbe"]["grpc"]["service"]
    return at_field(container, "livenessProbe.grpc.service")


@planted_in("plain")
def start_with_one_chance(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "draft"), "startupProbe.failureThreshold", 1)


@planted_in("plain")
def start_that_is_asked_too_fast(overlay: Overlay) -> Place:
    container = container_of(overlay, "target")
    container.body["startupProbe"] |= {"periodSeconds": 1, "failureThreshold": 10}
    return at_field(container, "startupProbe.failureThreshold")


@planted_in("plain")
def restart_after_one_late_answer(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "coordinator"), "livenessProbe.failureThreshold", 1)


@planted_in("plain")
def readiness_that_is_asked_once_an_hour(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "target"), "readinessProbe.periodSeconds", 3600)


@planted_in("plain")
def wait_longer_than_the_period(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "target"), "livenessProbe.timeoutSeconds", 60)


@planted_in("plain")
def command_of_a_probe(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "redis"), "livenessProbe.exec.command", ["redis-cli", "pin"])


@planted_in("plain")
def rollout_that_ends_before_a_start(overlay: Overlay) -> Place:
    document = container_of(overlay, "target").template.document
    return changed(document, "spec.progressDeadlineSeconds", document.spec, "progressDeadlineSeconds", 60)


@planted_in("plain")
def port_that_a_probe_asks_redis_at(overlay: Overlay) -> Place:
    command = ["redis-cli", "-p", "6380", "ping"]
    return in_container(container_of(overlay, "redis"), "readinessProbe.exec.command", command)


@planted_in("cloud")
def path_of_a_load_balancer(overlay: Overlay) -> Place:
    document = overlay.one("HealthCheckPolicy")
    check = document.spec["default"]["config"]["httpsHealthCheck"]
    return changed(document, "spec.default.config.httpsHealthCheck.requestPath", check, "requestPath", "/")


@planted_in("cloud")
def load_balancer_of_no_service(overlay: Overlay) -> Place:
    document = overlay.one("HealthCheckPolicy")
    return changed(document, "spec.targetRef.name", document.spec["targetRef"], "name", "gateways")


@planted_in("cloud")
def plaintext_probe_of_an_encrypted_port(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "gateway"), "readinessProbe.httpGet.scheme", "HTTP")
