"""Disruption budgets and rollouts against the number of replicas: nodes can be drained, and pods are left meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .autoscaling import AUTOSCALERS, num_replicas
from .container_settings import Configured
from .documents import Document, PodTemplate, Problem, at, of_kind
from .selectors import selector_of, selects


def disruption_problems(documents: list[Document], configured: list[Configured]) -> Iterator[Problem]:
    """Yield budgets that stop every drain or none, workloads without a budget, and rollouts that cannot move."""
    templates = [template for document in documents for template in document.templates]
    budgets = of_kind(documents, "PodDisruptionBudget")
    for budget in budgets:
        selector = selector_of(budget)[1]
        if selector is None:
            message = "is empty and selects every pod of the namespace: give the labels of one workload"
            yield budget.problem("spec.selector", message)
            continue
        pods = [template for template in templates if selects(selector, template.labels)]
        yield from _budget(budget, sum(num_replicas(template, documents) for template in pods))
    for one in configured:
        template = one.variables.container.template
        is_scaled = template.document.kind in ("Deployment", "StatefulSet", "LeaderWorkerSet", "DisaggregatedSet")
        if is_scaled and num_replicas(template, documents) > 1 and not _has_budget(template, budgets):
            message = "has several replicas and no PodDisruptionBudget: a drain may end all at once: add one"
            yield template.problem("containers", message)
    for document in of_kind(documents, "Deployment"):
        yield from _rollout(document)
    for autoscaler in of_kind(documents, *AUTOSCALERS):
        yield from _to_zero(autoscaler)


def _budget(budget: Document, replicas: int) -> Iterator[Problem]:
    least, most = budget.spec.get("minAvailable"), budget.spec.get("maxUnavailable")
    if (least is None) == (most is None):
        yield budget.problem("spec.maxUnavailable", "give either maxUnavailable or minAvailable")
        return
    if most is not None:
        field, value, allowed = "maxUnavailable", most, _share(most, replicas)
    else:
        field, value, allowed = "minAvailable", least, replicas - _share(least, replicas)
    if replicas and allowed < 1:
        message = f"{value} lets no pod of {replicas} be evicted, so a drain of its node waits for ever"
        yield budget.problem(f"spec.{field}", f"{message}: use maxUnavailable 1")
    elif replicas > 1 and allowed >= replicas:
        message = f"{value} lets all {replicas} pods be evicted at once"
        yield budget.problem(f"spec.{field}", f"{message}: use maxUnavailable 1")


def _share(value: Any, replicas: int) -> int:
    """Return a number of pods, or the share of them that a percentage is, rounded up as Kubernetes does."""
    text = str(value)
    return math.ceil(float(text[:-1]) / 100 * replicas) if text.endswith("%") else int(text)


def _has_budget(template: PodTemplate, budgets: list[Document]) -> bool:
    return any(selects(selector_of(budget)[1] or {}, template.labels) for budget in budgets)


def _rollout(document: Document) -> Iterator[Problem]:
    strategy = document.spec.get("strategy") or {}
    rolling = strategy.get("rollingUpdate")
    if strategy.get("type") == "Recreate" and rolling is not None:
        yield document.problem("spec.strategy.rollingUpdate", "must be unset: the type Recreate refuses it")
    if rolling and not any(_is_some(rolling.get(name, "25%")) for name in ("maxUnavailable", "maxSurge")):
        message = "maxUnavailable 0 and maxSurge 0 let no rollout move: set one of them to 1"
        yield document.problem("spec.strategy.rollingUpdate", message)
    template = document.templates[0] if document.templates else None
    serves = template is not None and any("SPECDEC_" in str(one.body.get("env")) for one in template.containers)
    if serves and _share(at(rolling, "maxUnavailable") or 0, 100) >= 100:
        message = f"{at(rolling, 'maxUnavailable')} ends every pod before a new one is ready: use 0 or 1"
        yield document.problem("spec.strategy.rollingUpdate.maxUnavailable", message)


def _is_some(value: Any) -> bool:
    return str(value).rstrip("%") != "0"


def _to_zero(autoscaler: Document) -> Iterator[Problem]:
    """Yield autoscalers to zero for what must always run, and those that nothing wakes from zero."""
    if autoscaler.kind != "ScaledObject" or autoscaler.spec.get("minReplicaCount", 0) != 0:
        return
    name = str(at(autoscaler.spec, "scaleTargetRef", "name") or "")
    if "draft" not in name:
        message = f"0 stops {name}, without which nothing is served: must be 1 or more"
        yield autoscaler.problem("spec.minReplicaCount", message)
        return
    queries = [str(at(trigger, "metadata", "query") or "") for trigger in autoscaler.spec.get("triggers") or ()]
    if queries and all('role="draft"' in query for query in queries):
        message = (
            "every query reads the drafts themselves, so nothing starts the first one: add one of the coordinators"
        )
        yield autoscaler.problem("spec.triggers", message)
