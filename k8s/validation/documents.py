"""Rendered documents with their pod templates and containers, and the problems that checks find in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where."""

    file: str
    object: str
    """Kind/name, or the name of a service or rule; empty for a whole file."""
    field: str
    """Path of the field within the object; empty for the whole object."""
    message: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.file, self.object, self.field, self.message)))


@dataclass(frozen=True)
class Document:
    """One object as `kubectl apply` would send it."""

    file: str
    """File of the repository that the object comes from, before any patch."""
    body: Body

    @property
    def kind(self) -> str:
        return str(self.body.get("kind", ""))

    @property
    def name(self) -> str:
        return str(self.body.get("metadata", {}).get("name", ""))

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return str(self.body.get("apiVersion", "")).rpartition("/")[0]

    @property
    def spec(self) -> Body:
        """The spec; empty for kinds that have none."""
        return self.body.get("spec") or {}

    @property
    def title(self) -> str:
        return f"{self.kind}/{self.name}"

    def problem(self, field: str, message: str) -> Problem:
        return Problem(self.file, self.title, field, message)

    @cached_property
    def templates(self) -> list[PodTemplate]:
        """Pod templates, wherever they stand: in workloads of Kubernetes and in custom resources."""
        return list(_templates(self, self.body, "", {}))


@dataclass(frozen=True)
class PodTemplate:
    """The description of pods in a workload."""

    document: Document
    path: str
    """Path of the template within its document."""
    parent: Body
    """Object that the template is a field of."""
    body: Body
    """The template: metadata and spec."""

    @property
    def labels(self) -> Mapping[str, str]:
        return at(self.body, "metadata", "labels") or {}

    @property
    def spec(self) -> Body:
        spec: Body = self.body["spec"]
        return spec

    @property
    def replica(self) -> tuple[str, str]:
        """Return the document and the role that the pods are replicas of; leader and workers of a group share them."""
        return self.document.title, self.path.partition(".leaderWorkerTemplate")[0]

    @property
    def follows_leader(self) -> bool:
        """True for the workers of a group that starts again as a whole when one of its pods ends."""
        restarts = str(self.parent.get("restartPolicy", "RecreateGroupOnPodRestart")).startswith("RecreateGroup")
        return self.path.endswith(".workerTemplate") and "leaderTemplate" in self.parent and restarts

    @cached_property
    def containers(self) -> list[Container]:
        """Containers, without those that run before them."""
        return [self._container("containers", body) for body in self.spec["containers"]]

    @cached_property
    def init_containers(self) -> list[Container]:
        return [self._container("initContainers", body) for body in self.spec.get("initContainers") or ()]

    @property
    def all_containers(self) -> list[Container]:
        return [*self.init_containers, *self.containers]

    def field(self, name: str) -> str:
        """Return the path of a field of the pod."""
        return ".".join(filter(None, (self.path, "spec", name)))

    def problem(self, name: str, message: str) -> Problem:
        return self.document.problem(self.field(name), message)

    def _container(self, kind: str, body: Body) -> Container:
        return Container(self, self.field(f"{kind}[{body.get('name', '')}]"), body)


@dataclass(frozen=True)
class Container:
    """One container of a pod template."""

    template: PodTemplate
    path: str
    body: Body

    @property
    def name(self) -> str:
        return str(self.body.get("name", ""))

    @property
    def ports(self) -> dict[str, int]:
        """Number of each named port."""
        return {port["name"]: port["containerPort"] for port in self.body.get("ports") or () if "name" in port}

    def problem(self, name: str, message: str) -> Problem:
        return self.template.document.problem(f"{self.path}.{name}" if name else self.path, message)


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    """Return the documents of these kinds."""
    return [document for document in documents if document.kind in kinds]


def at(body: Any, *path: str) -> Any:
    """Return the value at a path of keys; None where it ends early."""
    for key in path:
        if not isinstance(body, dict):
            return None
        body = body.get(key)
    return body


def _templates(document: Document, node: Any, path: str, parent: Body) -> Iterator[PodTemplate]:
    if isinstance(node, list):
        for index, value in enumerate(node):
            yield from _templates(document, value, f"{path}[{_key(value, index)}]", parent)
    elif isinstance(node, dict):
        spec = node.get("spec")
        if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
            yield PodTemplate(document, path, parent, node)
            return
        for key, value in node.items():
            yield from _templates(document, value, f"{path}.{key}" if path else key, node)


def _key(value: Any, index: int) -> str:
    return str(value.get("name") or value.get("groupName") or index) if isinstance(value, dict) else str(index)
