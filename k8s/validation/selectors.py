"""Label selectors: which pods they select, and which objects share pods that only one of them may have.

Two workloads that select the same pods count and delete each other's. A pod with two disruption budgets cannot be
evicted. Two draft pools of one name are one pool to the coordinators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from .documents import Document, PodTemplate, Problem, at, of_kind

WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")
_SELECTING = (*WORKLOADS, "PodDisruptionBudget", "PodMonitor", "NetworkPolicy", "Service")


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a selector with matchLabels and matchExpressions selects an object with these labels."""
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _fulfils(expression, labels) for expression in selector.get("matchExpressions") or ()
    )


def selector_problems(documents: list[Document]) -> Iterator[Problem]:
    """Yield selectors that select nothing, and those that select pods of another object."""
    templates = [template for document in documents for template in document.templates]
    for document in of_kind(documents, *WORKLOADS):
        yield from _own_pods(document)
    for document in of_kind(documents, *_SELECTING):
        field, selector = selector_of(document)
        if selector is not None and not any(selects(selector, template.labels) for template in templates):
            yield document.problem(field, f"selects no pod: {_shown(selector)}")
    yield from _shared_pods(documents, templates, WORKLOADS, "a workload")
    yield from _pods_of_controllers(documents, templates)
    yield from _shared_pods(documents, templates, ("PodDisruptionBudget",), "a disruption budget")


def selector_of(document: Document) -> tuple[str, dict[str, Any] | None]:
    """Return the field and the selector of an object; no selector where it has none or takes all pods."""
    if document.kind == "Service":
        labels = document.spec.get("selector")
        return "spec.selector", {"matchLabels": labels} if labels else None
    name = "podSelector" if document.kind == "NetworkPolicy" else "selector"
    return f"spec.{name}", document.spec.get(name) or None


def _fulfils(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case _:
            return value is None


def _own_pods(document: Document) -> Iterator[Problem]:
    field, selector = selector_of(document)
    labels = at(document.spec, "template", "metadata", "labels") or {}
    if selector is not None and not selects(selector, labels):
        yield document.problem(
            field, f"{_shown(selector)} does not select the workload's own pods, which have {_shown(labels)}"
        )


def _shared_pods(
    documents: list[Document], templates: list[PodTemplate], kinds: tuple[str, ...], what: str
) -> Iterator[Problem]:
    selecting = [(document, *selector_of(document)) for document in of_kind(documents, *kinds)]
    for template in templates:
        those = [
            (document, field)
            for document, field, selector in selecting
            if selector is not None and selects(selector, template.labels)
        ]
        for document, field in those[1:]:
            first = those[0][0]
            yield document.problem(
                field, f"selects pods of {template.document.title}, which {first.title} selects as {what}, too"
            )


def _pods_of_controllers(documents: list[Document], templates: list[PodTemplate]) -> Iterator[Problem]:
    """Yield workloads that select pods of a kind without a selector, whose controller owns them otherwise."""
    for document in of_kind(documents, *WORKLOADS):
        field, selector = selector_of(document)
        for template in templates:
            if template.document.kind not in WORKLOADS and selector and selects(selector, template.labels):
                yield document.problem(field, f"selects pods of {template.document.title}")


def draft_pool_problems(pools: list[tuple[PodTemplate, str, str]]) -> Iterator[Problem]:
    """Yield draft pools that two workloads have. `pools`: pod template, field and name of each pool."""
    by_name: dict[str, list[tuple[PodTemplate, str]]] = defaultdict(list)
    for template, field, name in pools:
        by_name[name].append((template, field))
    for name, members in by_name.items():
        first = members[0][0]
        for template, field in members[1:]:
            if template.replica != first.replica:
                message = f"draft pool {name!r} is the pool of {first.document.title}, too"
                yield template.document.problem(field, message)


def _shown(labels: Mapping[str, Any]) -> str:
    return ", ".join(_shown(value) if isinstance(value, dict) else f"{key}={value}" for key, value in labels.items())
