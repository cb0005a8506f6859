"""A copy of rendered documents that one fault is planted in, and where the fault is."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from k8s.validation.documents import Container, Document, PodTemplate, of_kind

Fault = Callable[["Overlay"], "Place"]
"""Plants itself; returns the object and a part of the field that the problem must name."""
FAULTS: dict[str, Fault] = {}
SERVICES = ("coordinator", "draft", "target")


def fault(plant: Fault) -> Fault:
    """Add a fault to `FAULTS` under its name."""
    FAULTS[plant.__name__] = plant
    return plant


class Place(NamedTuple):
    """Where a fault is, as the problem must name it."""

    document: Document
    field: str


class Overlay:
    """A copy of an overlay's documents, and the choices of one fault."""

    def __init__(self, documents: list[Document], seed: str, kind: str = "") -> None:
        """`kind`: kind of the workloads that get the fault; "" for those of Kubernetes."""
        self.documents = [Document(one.file, copy.deepcopy(one.body)) for one in documents]
        self.random = random.Random(seed)
        self._kind = kind

    def one(self, *kinds: str) -> Document:
        return self.random.choice(of_kind(self.documents, *kinds))

    def named(self, kind: str, name: str) -> Document:
        return next(one for one in of_kind(self.documents, kind) if one.name == name)

    def template(self) -> PodTemplate:
        """Return a pod template of a workload."""
        kinds = (self._kind,) if self._kind else ("Deployment", "StatefulSet")
        return self.random.choice([template for one in of_kind(self.documents, *kinds) for template in one.templates])

    def service(self) -> Container:
        """Return the container of one of our services, one with ports in a workload of an operator."""
        if self._kind:
            templates = [template for one in of_kind(self.documents, self._kind) for template in one.templates]
            return self.random.choice([one for template in templates for one in template.containers if one.ports])
        name = self.random.choice(SERVICES)
        return self.named("Deployment", name).templates[0].containers[0]

    def copy_of(self, document: Document, name: str) -> Document:
        """Add a copy of a document under another name."""
        other = Document(document.file, copy.deepcopy(document.body))
        other.body["metadata"]["name"] = name
        self.documents.append(other)
        return other


def prefix_of(container: Container) -> str:
    return f"SPECDEC_{container.name.upper()}__"


def entry_of(container: Container, setting: str) -> dict[str, Any]:
    name = prefix_of(container) + setting
    entries: list[dict[str, Any]] = container.body["env"]
    for entry in entries:
        if entry["name"] == name:
            return entry
    entries.append({"name": name})
    return entries[-1]


def set_value(container: Container, setting: str, value: str) -> Place:
    entry = entry_of(container, setting)
    entry.pop("valueFrom", None)
    entry["value"] = value
    return at_env(container, entry["name"])


def at_env(container: Container, name: str) -> Place:
    return Place(container.template.document, f"containers[{container.name}].env[{name}]")


def at_field(container: Container, field: str) -> Place:
    return Place(container.template.document, f"containers[{container.name}].{field}")
