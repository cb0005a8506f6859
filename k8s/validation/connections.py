"""Connections that the services of an overlay need, from their settings: who calls whom, and at which port."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .container_settings import Configured
from .documents import Document, PodTemplate, of_kind
from .pod_services import PodServices, is_whole
from .redis_servers import is_redis, url_of

#: Sides outside the overlay.
DNS, PROMETHEUS, CLIENTS = "the resolver of the cluster", "Prometheus", "clients"
_CALLS = (("coordinator", "draft"), ("coordinator", "target"), ("gateway", "coordinator"))


@dataclass(frozen=True)
class Connection:
    """One connection that must get through. A side outside the overlay is a name."""

    source: PodTemplate | str
    destination: PodTemplate | str
    ports: tuple[int | str, ...]
    """Number and name of the port."""
    protocol: str = "TCP"

    def __str__(self) -> str:
        return f"{_title(self.source)} to {_title(self.destination)} at {self.shown_port}"

    @property
    def shown_port(self) -> str:
        return f"{self.ports[0]}/{self.protocol}"

    def shown(self, direction: str) -> str:
        """Return the name of the side that a rule of this direction must name as its peer."""
        return _title(self.destination if direction == "egress" else self.source)


def needed_connections(configured: list[Configured], documents: list[Document]) -> Iterator[Connection]:
    """Yield the connections without which a whole system does not work; none for a pool to add to one."""
    if not is_whole(configured):
        return
    templates = [template for document in documents for template in document.templates]
    for template in templates:
        for protocol in ("UDP", "TCP"):
            yield Connection(template, DNS, (53,), protocol)
    pods = PodServices(documents)
    for one in configured:
        template = one.variables.container.template
        if template.follows_leader:
            continue
        yield from _to_redis(one, pods)
        for other in configured:
            calls = (one.service.name, other.service.name)
            if calls in _CALLS and not other.variables.container.template.follows_leader:
                yield Connection(template, other.variables.container.template, _port(other, "listen"))
        yield from _from_outside(one, configured, documents)


def _to_redis(one: Configured, pods: PodServices) -> Iterator[Connection]:
    template = one.variables.container.template
    for setting in ("redis_url", "kv_tier_url"):
        url = url_of(one, setting)
        hosts = [host for host, _ in url.addresses] if url else []
        found = [pod for host in hosts for pod in pods.pods_at(host)]
        if url is None and setting == "redis_url":  # in an object of the operator: one of these
            found = [pod for pod in pods.templates if any(map(is_redis, pod.containers))]
        for pod in found:
            for container in filter(is_redis, pod.containers):
                for name, number in container.ports.items():
                    yield Connection(template, pod, (number, name))


def _from_outside(one: Configured, configured: list[Configured], documents: list[Document]) -> Iterator[Connection]:
    template = one.variables.container.template
    has_gateway = any(each.service.name == "gateway" for each in configured)
    is_routed = one.service.name == "coordinator" and (not has_gateway or of_kind(documents, "GRPCRoute"))
    if one.service.name == "gateway" or is_routed:
        yield Connection(CLIENTS, template, _port(one, "listen"))
    if getattr(one.settings, "metrics", ""):
        yield Connection(_prometheus(documents), template, _port(one, "metrics"))


def _prometheus(documents: list[Document]) -> str:
    """Return the namespace of the Prometheus that autoscalers ask; `PROMETHEUS` where none asks."""
    for document in of_kind(documents, "ScaledObject"):
        for trigger in document.spec.get("triggers") or ():
            host = str((trigger.get("metadata") or {}).get("serverAddress", "")).partition("://")[2].partition(":")[0]
            if "." in host:
                return host.split(".")[1]
    return PROMETHEUS


def _port(one: Configured, setting: str) -> tuple[int | str, ...]:
    number = int(str(getattr(one.settings, setting)).rpartition(":")[2])
    return (number, *(name for name, each in one.variables.container.ports.items() if each == number))


def _title(side: PodTemplate | str) -> str:
    return side if isinstance(side, str) else side.document.title
