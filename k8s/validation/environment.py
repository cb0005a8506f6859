"""Environment variables of containers as their processes will see them, as far as the manifests tell.

Values that only a cluster knows, such as a pod's address, are replaced by examples. A value from an object that the
operator makes stays unknown.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .documents import Container, Document, Problem, at, of_kind
from .quantities import number_of

UNKNOWN = "unknown"
"""Stands for a value that the operator's own objects have."""

_REFERENCE = re.compile(r"\$\(([A-Za-z_]\w*)\)")
_EXAMPLES = {
    "status.podIP": "10.0.0.1",
    "status.podIPs": "10.0.0.1",
    "status.hostIP": "10.0.0.2",
    "metadata.name": "pod-0",
    "metadata.namespace": "specdec",
    "metadata.uid": "00000000-0000-0000-0000-000000000000",
    "spec.nodeName": "node-0",
    "spec.serviceAccountName": "default",
}
_GROUP_VARIABLES = {
    "LWS_LEADER_ADDRESS": "target-0.target.specdec",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
}
#: Variables that the controller of a kind puts before all others of each container.
_INJECTED = {"LeaderWorkerSet": _GROUP_VARIABLES, "DisaggregatedSet": _GROUP_VARIABLES}


@dataclass(frozen=True)
class Variable:
    """One environment variable."""

    field: str
    """Path of its entry within the document."""
    value: str
    is_known: bool = True
    source: str = ""
    """Kind, name and key of the object that the value comes from; empty where the entry has it."""


@dataclass
class Environment:
    """Variables of one container, by name."""

    variables: dict[str, Variable] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def known(self) -> dict[str, str]:
        return {name: variable.value for name, variable in self.variables.items() if variable.is_known}


def environment_of(container: Container, documents: list[Document]) -> Environment:
    """Return the variables of a container, with the problems of references between them."""
    injected = _INJECTED.get(container.template.document.kind, {})
    found = Environment({name: Variable(container.path, value) for name, value in injected.items()})
    for index, entry in enumerate(container.body.get("envFrom") or ()):
        for name, text in _from_object(entry, documents):
            found.variables[f"{entry.get('prefix', '')}{name}"] = Variable(f"{container.path}.envFrom[{index}]", text)
    for entry in container.body.get("env") or ():
        path = f"env[{entry['name']}]"
        value = _value(entry, container, documents)
        is_known = value is not None
        text = UNKNOWN if value is None else value
        for name in _REFERENCE.findall(text if "valueFrom" not in entry else ""):
            if name not in found.variables:
                message = f"refers to $({name}), which no variable before it sets"
                found.problems.append(container.problem(path, message))
        text = _REFERENCE.sub(lambda match: _text_of(found.variables.get(match[1]), match[0]), text)
        found.variables[entry["name"]] = Variable(f"{container.path}.{path}", text, is_known, _source(entry))
    return found


def command_problems(container: Container, environment: Environment) -> Iterator[Problem]:
    """Yield references of a command to variables that the container does not have; they stay as they are written."""
    for field_name in ("command", "args"):
        for index, word in enumerate(container.body.get(field_name) or ()):
            for name in _REFERENCE.findall(str(word)):
                if name not in environment.variables:
                    yield container.problem(f"{field_name}[{index}]", f"refers to $({name}), which no variable sets")


def data_of(kind: str, name: str, documents: list[Document]) -> Mapping[str, str] | None:
    """Return the contents of a ConfigMap or Secret; None where the overlay has none of this name."""
    for document in of_kind(documents, kind):
        if document.name == name:
            plain = {**(document.body.get("data") or {}), **(document.body.get("stringData") or {})}
            if kind == "Secret":
                encoded = document.body.get("data") or {}
                plain |= {key: base64.b64decode(value).decode(errors="replace") for key, value in encoded.items()}
            return plain
    return None


def _text_of(variable: Variable | None, reference: str) -> str:
    return reference if variable is None else variable.value


def _from_object(entry: dict[str, Any], documents: list[Document]) -> Iterator[tuple[str, str]]:
    for source, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
        if source in entry:
            yield from (data_of(kind, entry[source].get("name", ""), documents) or {}).items()


def _source(entry: dict[str, Any]) -> str:
    for name, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if reference := at(entry, "valueFrom", name):
            return f"{kind} {reference.get('name', '')} key {reference['key']}"
    return ""


def _value(entry: dict[str, Any], container: Container, documents: list[Document]) -> str | None:
    """Return the value of an entry; None where it is unknown."""
    source = entry.get("valueFrom")
    if not source:
        return str(entry.get("value", ""))
    for name, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if reference := source.get(name):
            return (data_of(kind, reference.get("name", ""), documents) or {}).get(reference["key"])
    if reference := source.get("fieldRef"):
        return _field_value(reference["fieldPath"], container)
    reference = source.get("resourceFieldRef") or {}
    return _resource_value(container, reference.get("resource", ""), reference.get("divisor", "1"))


def _field_value(path: str, container: Container) -> str:
    if found := re.fullmatch(r"metadata\.(?:labels|annotations)\['(.+)'\]", path):
        return container.template.labels.get(found[1], "example")
    return _EXAMPLES.get(path, "example")


def _resource_value(container: Container, resource: str, divisor: str) -> str:
    """Return a resource in whole units of the divisor, rounded up as Kubernetes does."""
    quantity = at(container.body, "resources", *resource.split("."))
    return str(math.ceil((number_of(quantity) or 1.0) / (number_of(divisor) or 1.0)) or 1)
