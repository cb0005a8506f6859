"""Services of an overlay: which pods a name in a URL leads to, and at which ports."""

from __future__ import annotations

from .container_settings import Configured
from .documents import Document, PodTemplate, of_kind
from .selectors import selector_of, selects


def is_whole(configured: list[Configured]) -> bool:
    """Return whether an overlay is a whole system, with coordinators, and not a pool to add to one."""
    return any(one.service.name == "coordinator" for one in configured)


class PodServices:
    """The pods of an overlay and the Services that lead to them."""

    def __init__(self, documents: list[Document]) -> None:
        self.templates: list[PodTemplate] = [template for document in documents for template in document.templates]
        self._services = {document.name: document for document in of_kind(documents, "Service")}
        # KubeRay makes a Service of the head of a cluster.
        self._heads = {
            f"{document.name}-head-svc": template
            for document in of_kind(documents, "RayCluster")
            for template in document.templates
            if template.path.startswith("spec.headGroupSpec")
        }

    def service_at(self, host: str) -> Document | None:
        return self._services.get(host.partition(".")[0])

    def services_of(self, template: PodTemplate) -> list[Document]:
        """Return the Services that select a pod."""
        return [one for one in self._services.values() if selects(selector_of(one)[1] or {}, template.labels)]

    def pods_at(self, host: str) -> list[PodTemplate]:
        """Return the pods that a host name leads to."""
        if head := self._heads.get(host.partition(".")[0]):
            return [head]
        service = self.service_at(host)
        selector = selector_of(service)[1] if service else None
        return [template for template in self.templates if selector and selects(selector, template.labels)]

    def address_problem(self, host: str, port: int) -> str:
        """Return what is wrong with an address of this namespace; "" for a good one, and for one elsewhere."""
        name, _, rest = host.partition(".")
        if rest and not rest.startswith(("svc", "specdec")):
            return ""
        if host in ("localhost", "127.0.0.1", "::1"):
            return f"{host} is the pod itself, which has no such server: give the name of a Service"
        if head := self._heads.get(name):
            ports = {entry["containerPort"] for one in head.containers for entry in one.body.get("ports") or ()}
        elif service := self._services.get(name):
            ports = {entry["port"] for entry in service.spec.get("ports") or ()}
        else:
            known = ", ".join(sorted({*self._services, *self._heads})) or "none"
            return f"there is no Service {name}; there are {known}"
        listed = ", ".join(map(str, sorted(ports)))
        return "" if port in ports else f"Service {name} has no port {port}; it has {listed}"
