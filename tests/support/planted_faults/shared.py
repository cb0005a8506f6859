"""Faults in names and numbers that two objects share, by the rendered documents that they are planted in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k8s.validation.documents import Container, Document
from tests.support.planted_faults.overlay import Fault, Overlay, Place, at_field

#: Components upon the base that faults are planted in, by the name that faults call them by.
COMPOSITIONS = {
    "plain": ("hpa", "monitoring", "images"),
    "cloud": ("gateway", "tls", "redis-auth", "quotas", "platform-gke", "images"),
    "rich": ("gateway", "model-hub", "model-volume", "redis-auth", "gpu", "monitoring", "keda", "images"),
}
SHARED_FAULTS: dict[tuple[str, str], Fault] = {}
"""Faults by composition and name."""


def planted_in(composition: str) -> Callable[[Fault], Fault]:
    """Add a fault to `SHARED_FAULTS`."""

    def add(plant: Fault) -> Fault:
        SHARED_FAULTS[composition, plant.__name__] = plant
        return plant

    return add


def container_of(overlay: Overlay, workload: str) -> Container:
    """Return the first container of a Deployment or StatefulSet."""
    documents = [one for one in overlay.documents if one.kind in ("Deployment", "StatefulSet")]
    return next(one for one in documents if one.name == workload).templates[0].containers[0]


def at_pod(container: Container, field: str) -> Place:
    return Place(container.template.document, f"spec.template.spec.{field}")


def changed(document: Document, field: str, body: Any, key: Any, value: Any) -> Place:
    """Put a value into a part of a document; return the place of the field."""
    body[key] = value
    return Place(document, field)


def in_container(container: Container, field: str, value: Any) -> Place:
    """Put a value at a path of keys in a container; return its place."""
    *path, last = field.split(".")
    body: Any = container.body
    for key in path:
        body = body.setdefault(key, {})
    body[last] = value
    return at_field(container, field)


def argument(container: Container, option: str, value: str) -> Place:
    """Change the value of an option of a Redis server; return its place."""
    index = container.body["args"].index(option) + 1
    container.body["args"][index] = value
    return at_field(container, f"args[{index}]")
