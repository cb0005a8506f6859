"""Names that objects refer to: ConfigMaps, Secrets, claims, services, scale targets and ports.

Objects that the operator makes, such as a Secret with a certificate, are listed with their keys in `k8s/outside.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .documents import Container, Document, PodTemplate, Problem, at, of_kind
from .environment import command_problems, environment_of
from .selectors import selector_of, selects

OUTSIDE = Path("k8s") / "outside.yaml"
#: Kinds that act on pods of their own namespace only.
_IN_THE_NAMESPACE = (
    "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "HorizontalPodAutoscaler", "ScaledObject",
)  # fmt: skip
#: Kinds with a scale subresource; a DisaggregatedSet and a RayCluster have none.
_WITH_SCALE = ("Deployment", "StatefulSet", "ReplicaSet", "LeaderWorkerSet")


@dataclass(frozen=True)
class Objects:
    """What can be referred to in an overlay."""

    documents: list[Document]
    outside: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """Keys of the objects that the operator makes, by kind and name."""

    def has(self, kind: str, name: str) -> bool:
        return (kind, name) in self.outside or any(document.name == name for document in of_kind(self.documents, kind))

    def keys(self, kind: str, name: str) -> frozenset[str] | None:
        """Return the keys of a ConfigMap or Secret; None where there is none of this name."""
        for document in of_kind(self.documents, kind):
            if document.name == name:
                parts = (document.body.get(part) or {} for part in ("data", "stringData", "binaryData"))
                return frozenset(key for part in parts for key in part)
        return self.outside.get((kind, name))


def read_outside(root: Path) -> dict[tuple[str, str], frozenset[str]]:
    """Return the objects that the operator makes; none where the file is missing."""
    path = root / OUTSIDE
    entries = (yaml.safe_load(path.read_text()) or []) if path.is_file() else []
    return {(entry["kind"], entry["name"]): frozenset(entry.get("keys") or ()) for entry in entries}


def reference_problems(objects: Objects) -> Iterator[Problem]:
    """Yield references to what does not exist."""
    for document in objects.documents:
        for template in document.templates:
            yield from _pod_references(template, objects)
        yield from _scale_target(document, objects)
        yield from _named_service(document, objects)
        yield from _target(document, objects)
    for document in of_kind(objects.documents, "Service", "PodMonitor", "NetworkPolicy"):
        yield from _selected_ports(document, objects)
    for document in of_kind(objects.documents, "HTTPRoute", "GRPCRoute", "TCPRoute"):
        yield from _parents(document, objects)
        yield from _backends(document, objects)
    for document in of_kind(objects.documents, "Service"):
        yield from _service(document, objects)
    yield from _namespaces(objects)


# ---- pods ------------------------------------------------------------------------------------------------------------


def _pod_references(template: PodTemplate, objects: Objects) -> Iterator[Problem]:
    claims = {at(claim, "metadata", "name") for claim in template.parent.get("volumeClaimTemplates") or ()}
    volumes = {volume["name"]: volume for volume in template.spec.get("volumes") or ()}
    for name, volume in volumes.items():
        yield from _volume(template, name, volume, objects)
    mounted = set()
    for container in template.all_containers:
        for mount in container.body.get("volumeMounts") or ():
            mounted.add(mount["name"])
            if mount["name"] not in volumes and mount["name"] not in claims:
                yield container.problem(f"volumeMounts[{mount['name']}]", "the pod has no volume of this name")
        yield from _environment(container, objects)
        yield from command_problems(container, environment_of(container, objects.documents))
        yield from _probe_ports(container)
    for name in volumes.keys() - mounted:
        yield template.problem(f"volumes[{name}]", "no container mounts it")
    for index, entry in enumerate(template.spec.get("imagePullSecrets") or ()):
        if not objects.has("Secret", entry.get("name", "")):
            message = f"there is no Secret {entry.get('name')}, and {OUTSIDE} lists none"
            yield template.problem(f"imagePullSecrets[{index}]", message)
    priority = template.spec.get("priorityClassName")
    classes = {document.name for document in of_kind(objects.documents, "PriorityClass")}
    if priority and classes and priority not in classes and not priority.startswith("system-"):
        message = f"there is no PriorityClass {priority}; there are {', '.join(sorted(classes))}"
        yield template.problem("priorityClassName", message)
    account = template.spec.get("serviceAccountName")
    if account and not objects.has("ServiceAccount", account):
        yield template.problem("serviceAccountName", f"there is no ServiceAccount {account}")


def _volume(template: PodTemplate, name: str, volume: dict[str, Any], objects: Objects) -> Iterator[Problem]:
    where = f"volumes[{name}]"
    for source, kind, key in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
        if source in volume and not volume[source].get("optional"):
            items = [item["key"] for item in volume[source].get("items") or ()]
            yield from (
                template.problem(f"{where}.{source}", message)
                for message in _missing(objects, kind, volume[source].get(key, ""), items)
            )
    claim = at(volume, "persistentVolumeClaim", "claimName")
    if claim and not objects.has("PersistentVolumeClaim", claim):
        yield template.problem(f"{where}.persistentVolumeClaim", f"there is no PersistentVolumeClaim {claim}")


def _environment(container: Container, objects: Objects) -> Iterator[Problem]:
    for entry in container.body.get("env") or ():
        for source, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
            reference = at(entry, "valueFrom", source)
            if reference and not reference.get("optional"):
                for message in _missing(objects, kind, reference.get("name", ""), [reference["key"]]):
                    yield container.problem(f"env[{entry['name']}].valueFrom.{source}", message)
    for index, entry in enumerate(container.body.get("envFrom") or ()):
        for source, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
            reference = entry.get(source)
            if reference and not reference.get("optional"):
                for message in _missing(objects, kind, reference.get("name", ""), []):
                    yield container.problem(f"envFrom[{index}].{source}", message)


def _missing(objects: Objects, kind: str, name: str, keys: list[str]) -> Iterator[str]:
    known = objects.keys(kind, name)
    if known is None:
        yield f"there is no {kind} {name}, and {OUTSIDE} lists none"
    else:
        yield from (f"{kind} {name} has no key {key}" for key in keys if key not in known)


def _probe_ports(container: Container) -> Iterator[Problem]:
    numbers = {port["containerPort"] for port in container.body.get("ports") or ()}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        for way in ("grpc", "tcpSocket", "httpGet"):
            port = at(container.body, probe, way, "port")
            if port is not None and port not in container.ports and port not in numbers:
                yield container.problem(f"{probe}.{way}.port", f"the container has no port {port}")
    for way in ("httpGet", "tcpSocket"):
        port = at(container.body, "lifecycle", "preStop", way, "port")
        if port is not None and port not in container.ports and port not in numbers:
            yield container.problem(f"lifecycle.preStop.{way}.port", f"the container has no port {port}")


# ---- objects ---------------------------------------------------------------------------------------------------------


def _scale_target(document: Document, objects: Objects) -> Iterator[Problem]:
    target = document.spec.get("scaleTargetRef")
    if not target:
        return
    kind, name = target.get("kind", "Deployment"), target.get("name", "")
    group = str(target.get("apiVersion", "apps/v1")).rpartition("/")[0]
    workload = scalable(objects.documents).get((kind, name))
    if workload is None:
        yield document.problem("spec.scaleTargetRef", f"there is no {kind} {name} that can be scaled")
    elif workload.group != group:
        yield document.problem("spec.scaleTargetRef.apiVersion", f"{kind} {name} is of the group {workload.group}")
    for index, trigger in enumerate(document.spec.get("triggers") or ()):
        reference = at(trigger, "authenticationRef", "name")
        kind = at(trigger, "authenticationRef", "kind") or "TriggerAuthentication"
        if reference and not objects.has(kind, reference):
            yield document.problem(f"spec.triggers[{index}].authenticationRef", f"there is no {kind} {reference}")


def scalable(documents: list[Document]) -> dict[tuple[str, str], Document]:
    """Return what an autoscaler can scale, by kind and name.

    The controller of a DisaggregatedSet makes a DisaggregatedSetRoleScaler SET-ROLE for each role that others scale.
    """
    found = {(document.kind, document.name): document for document in of_kind(documents, *_WITH_SCALE)}
    for document in of_kind(documents, "DisaggregatedSet"):
        for role in document.spec.get("roles") or ():
            if at(role, "scaling", "mode") == "External":
                found["DisaggregatedSetRoleScaler", f"{document.name}-{role['name']}"] = document
    return found


def _named_service(document: Document, objects: Objects) -> Iterator[Problem]:
    name = document.spec.get("serviceName") if document.kind == "StatefulSet" else None
    if name and not objects.has("Service", name):
        yield document.problem("spec.serviceName", f"there is no Service {name}")


def _selected_ports(document: Document, objects: Objects) -> Iterator[Problem]:
    """Yield ports of services, scrapes and policies that the pods they select do not have."""
    _, selector = selector_of(document)
    pods = [
        template
        for other in objects.documents
        for template in other.templates
        if selects(selector or {}, template.labels)
    ]
    if not pods:
        return  # `selectors` says so
    for where, port in _ports_of(document):
        for pod in pods:
            names = {name for container in pod.containers for name in container.ports}
            numbers = {
                entry["containerPort"] for container in pod.containers for entry in container.body.get("ports") or ()
            }
            if port not in names and port not in numbers:
                yield document.problem(where, f"{pod.document.title}, which it selects, has no port {port}")
                break


def _service(document: Document, objects: Objects) -> Iterator[Problem]:
    """Yield ports of a Service that lead to others than its clients think."""
    selector = selector_of(document)[1]
    pods = [
        template
        for other in objects.documents
        for template in other.templates
        if selector is not None and selects(selector, template.labels)
    ]
    owners = [template.document.name for template in pods]
    workloads = {other.name for other in objects.documents if other.templates}
    if pods and document.name in workloads and document.name not in owners:
        yield document.problem(
            "spec.selector", f"selects {', '.join(owners)}: must select {document.name}, its namesake"
        )
    for index, port in enumerate(document.spec.get("ports") or ()):
        target = port.get("targetPort", port["port"])
        for entry in (one for pod in pods for container in pod.containers for one in container.body.get("ports") or ()):
            if target not in (entry["containerPort"], entry.get("name")):
                continue
            if document.spec.get("clusterIP") == "None" and port["port"] != entry["containerPort"]:
                message = (
                    f"{port['port']} must be {entry['containerPort']}: clients of a headless Service dial the pods"
                )
                yield document.problem(f"spec.ports[{index}].port", message)
            if port.get("protocol", "TCP") != entry.get("protocol", "TCP"):
                message = f"must be {entry.get('protocol', 'TCP')}, as of the port of the container"
                yield document.problem(f"spec.ports[{index}].protocol", message)


def _target(document: Document, objects: Objects) -> Iterator[Problem]:
    """Yield a policy for a Service that is not there."""
    for name in ("targetRef", "targetReference"):
        service = at(document.spec, name, "name")
        if at(document.spec, name, "kind") == "Service" and not objects.has("Service", service):
            yield document.problem(f"spec.{name}.name", f"there is no Service {service}")


def _parents(document: Document, objects: Objects) -> Iterator[Problem]:
    for index, parent in enumerate(document.spec.get("parentRefs") or ()):
        where, kind = f"spec.parentRefs[{index}]", parent.get("kind", "Gateway")
        if not objects.has(kind, parent.get("name", "")):
            message = f"there is no {kind} {parent.get('name')}, and {OUTSIDE} lists none"
            yield document.problem(f"{where}.name", message)
        namespace = parent.get("namespace")
        if namespace and not objects.has("Namespace", namespace):
            message = f"there is no Namespace {namespace}, and {OUTSIDE} lists none"
            yield document.problem(f"{where}.namespace", message)


def _namespaces(objects: Objects) -> Iterator[Problem]:
    """Yield objects in another namespace than the one that the overlay makes."""
    made = {document.name for document in of_kind(objects.documents, "Namespace")}
    for document in objects.documents:
        namespace = at(document.body, "metadata", "namespace")
        if made and namespace and namespace not in made and not objects.has("Namespace", namespace):
            message = f"there is no Namespace {namespace}; the overlay makes {', '.join(sorted(made))}"
            yield document.problem("metadata.namespace", message)
        elif made and namespace not in made and (document.templates or document.kind in _IN_THE_NAMESPACE):
            message = f"{namespace} must be {', '.join(sorted(made))}: the pods are there"
            yield document.problem("metadata.namespace", message)


def _ports_of(document: Document) -> Iterator[tuple[str, Any]]:
    if document.kind == "Service":
        for index, port in enumerate(document.spec.get("ports") or ()):
            yield f"spec.ports[{index}].targetPort", port.get("targetPort", port["port"])
    elif document.kind == "PodMonitor":
        for index, endpoint in enumerate(document.spec.get("podMetricsEndpoints") or ()):
            yield f"spec.podMetricsEndpoints[{index}].port", endpoint.get("port", endpoint.get("portNumber"))
    else:
        for index, rule in enumerate(document.spec.get("ingress") or ()):
            for port in rule.get("ports") or ():
                yield f"spec.ingress[{index}].ports", port.get("port")


def _backends(document: Document, objects: Objects) -> Iterator[Problem]:
    services = {service.name: service for service in of_kind(objects.documents, "Service")}
    for index, rule in enumerate(document.spec.get("rules") or ()):
        for backend in rule.get("backendRefs") or ():
            where = f"spec.rules[{index}].backendRefs[{backend['name']}]"
            service = services.get(backend["name"])
            if service is None:
                yield document.problem(where, f"there is no Service {backend['name']}")
            elif backend.get("port") not in {port["port"] for port in service.spec.get("ports") or ()}:
                yield document.problem(f"{where}.port", f"Service {service.name} has no port {backend.get('port')}")
