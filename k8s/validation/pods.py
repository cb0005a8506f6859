"""Fields that every pod of ours has: probes, resources, and what the namespace's security level asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .documents import Container, Document, PodTemplate, Problem, at

#: Kinds whose pods end by themselves; they have no probes.
_ENDING = ("Job", "CronJob")
_POD_FIELDS: dict[tuple[str, ...], Any] = {
    ("automountServiceAccountToken",): False,
    ("securityContext", "runAsNonRoot"): True,
    ("securityContext", "seccompProfile", "type"): "RuntimeDefault",
}
_CONTAINER_FIELDS: dict[tuple[str, ...], Any] = {
    ("securityContext", "allowPrivilegeEscalation"): False,
    ("securityContext", "readOnlyRootFilesystem"): True,
    ("securityContext", "capabilities", "drop"): ["ALL"],
}
#: Fields by which a pod or container gets more than the level allows, and the values that it may have.
_CLOSED: dict[str, tuple[Any, ...]] = {
    "hostNetwork": (None, False), "hostPID": (None, False), "hostIPC": (None, False),
    "shareProcessNamespace": (None, False),
}  # fmt: skip
_OVERRIDES: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("privileged",): (None, False), ("runAsNonRoot",): (None, True), ("procMount",): (None, "Default"),
    ("seccompProfile", "type"): (None, "RuntimeDefault", "Localhost"),
    ("capabilities", "add"): (None, [], ["NET_BIND_SERVICE"]),
}  # fmt: skip
_IDS = ("runAsUser", "runAsGroup", "fsGroup")
_RESOURCES = (("requests", "cpu"), ("requests", "memory"), ("limits", "memory"))


def pod_problems(document: Document) -> Iterator[Problem]:
    """Yield the required fields that pods of a workload lack."""
    for template in document.templates:
        yield from _pod(template)
        for container in template.all_containers:
            yield from _container(container)
        if document.kind not in _ENDING:
            for container in template.containers:
                # Workers of a group serve nothing. One that ends, or is lost by its leader, restarts the group.
                yield from _probes(container) if not template.follows_leader else ()


def _pod(template: PodTemplate) -> Iterator[Problem]:
    for path, wanted in _POD_FIELDS.items():
        if (value := at(template.spec, *path)) != wanted:
            yield template.problem(".".join(path), f"must be {_yaml(wanted)}, not {_yaml(value)}")
    for name, allowed in _CLOSED.items():
        if template.spec.get(name) not in allowed:
            yield template.problem(name, f"must be unset, not {_yaml(template.spec[name])}")
    for name in _IDS:
        if at(template.spec, "securityContext", name) == 0:
            message = f"0 is root{', which runAsNonRoot refuses' if name == 'runAsUser' else ''}: give another id"
            yield template.problem(f"securityContext.{name}", message)
    for volume in template.spec.get("volumes") or ():
        if "hostPath" in volume:
            yield template.problem(f"volumes[{volume['name']}].hostPath", "is refused: use a claim or an emptyDir")
    yield from _ports(template)
    names = [container.name for container in template.all_containers]
    for name in {name for name in names if names.count(name) > 1}:
        yield template.problem(f"containers[{name}]", "two containers have this name")


def _container(container: Container) -> Iterator[Problem]:
    for path, wanted in _CONTAINER_FIELDS.items():
        if (value := at(container.body, *path)) != wanted:
            yield container.problem(".".join(path), f"must be {_yaml(wanted)}, not {_yaml(value)}")
    for path, allowed in _OVERRIDES.items():
        if (value := at(container.body, "securityContext", *path)) not in allowed:
            yield container.problem(f"securityContext.{'.'.join(path)}", f"must be unset, not {_yaml(value)}")
    for name in _IDS[:2]:
        if at(container.body, "securityContext", name) == 0:
            yield container.problem(f"securityContext.{name}", "0 is root, which runAsNonRoot refuses: give another id")
    for part, name in _RESOURCES:
        if at(container.body, "resources", part, name) is None:
            yield container.problem(f"resources.{part}.{name}", "is required")
    yield from _twice(container, "env", "name")
    yield from _twice(container, "ports", "name")
    yield from _twice(container, "volumeMounts", "mountPath")


def _ports(template: PodTemplate) -> Iterator[Problem]:
    """Yield ports that two containers of a pod have, and ports of the node."""
    seen: dict[tuple[int, str], Container] = {}
    for container in template.containers:
        for port in container.body.get("ports") or ():
            where = f"ports[{port.get('name', port['containerPort'])}]"
            key = (port["containerPort"], port.get("protocol", "TCP"))
            if key in seen:
                yield container.problem(f"{where}.containerPort", f"{key[0]} is a port of {seen[key].name} already")
            seen.setdefault(key, container)
            if port.get("hostPort"):
                yield container.problem(f"{where}.hostPort", "must be unset: it takes a port of the node")


def _probes(container: Container) -> Iterator[Problem]:
    probes = ["readinessProbe", "livenessProbe"]
    if any(str(entry.get("name", "")).startswith("SPECDEC_") for entry in container.body.get("env") or ()):
        probes.append("startupProbe")  # loading a model takes minutes
    yield from (container.problem(probe, "is required") for probe in probes if not container.body.get(probe))


def _twice(container: Container, field: str, key: str) -> Iterator[Problem]:
    values = [entry.get(key) for entry in container.body.get(field) or () if entry.get(key)]
    for value in sorted({value for value in values if values.count(value) > 1}):
        yield container.problem(f"{field}[{value}]", "is there twice")


def _yaml(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)
