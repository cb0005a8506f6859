"""Values of labels in queries: those that the services and the scrapes of an overlay give.

tests/integration/test_asked_manifests.py holds the queries of the manifests against the metrics of running services.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from .container_settings import Configured
from .documents import Document, Problem, at, of_kind
from .queries import QueryError, Selector, selectors_of_query
from .references import scalable
from .selectors import selector_of, selects
from .series import SCRAPE_LABELS, Series

Values = Mapping[str, frozenset[str]]
"""Values of each label that is checked; other labels may have any."""

#: Values that the services' code gives, "" for series without the label.
STATIC: Values = {
    "role": frozenset({"", "draft", "target"}),
    "phase": frozenset({"starting", "loading", "warming_up", "serving"}),
    "state": frozenset({"active", "idle", "free", "up", "late", "draining", "down", "refused"}),
    "cause": frozenset({
        "off", "paused", "no_replica", "draft_context", "late", "empty", "no_match", "not_drafted",
        "REPLICA_UNAVAILABLE", "client_left", "session_deleted",
    }),
}  # fmt: skip
_OWN = ("role", "pool", "container")


def values_of(configured: list[Configured], documents: list[Document]) -> Values:
    """Return the values of labels in an overlay: of its pools, containers and scrapes."""
    pools = {one.settings.pool for one in configured if hasattr(one.settings, "pool")}
    containers = {one.name for document in documents for template in document.templates for one in template.containers}
    found = {"pool": {"", "default", *pools}, "container": containers}
    namespaces = {str(at(document.body, "metadata", "namespace") or "") for document in documents} - {""}
    if namespaces:
        found["namespace"] = namespaces
    if monitors := of_kind(documents, "PodMonitor"):
        found["job"] = {job for monitor in monitors for job in _jobs(monitor, documents)}
        found["endpoint"] = {
            str(endpoint["port"])
            for monitor in monitors
            for endpoint in monitor.spec.get("podMetricsEndpoints") or ()
            if "port" in endpoint
        }
    return {**STATIC, **{name: frozenset(values) for name, values in found.items()}}


def _jobs(monitor: Document, documents: list[Document]) -> Iterator[str]:
    """Yield the jobs of a monitor's series: its own name, or what a relabelling makes of a label of the pods."""
    selector = selector_of(monitor)[1] or {}
    templates = [template for document in documents for template in document.templates]
    pods = [template.labels for template in templates if selects(selector, template.labels)]
    for endpoint in monitor.spec.get("podMetricsEndpoints") or ():
        steps = [step for step in endpoint.get("relabelings") or () if step.get("targetLabel") == "job"]
        if not steps:
            yield f"{at(monitor.body, 'metadata', 'namespace')}/{monitor.name}"
        for step in steps:
            sources = [source.removeprefix("__meta_kubernetes_pod_label_") for source in step.get("sourceLabels") or ()]
            for labels in pods:
                named = {re.sub(r"\W", "_", name): value for name, value in labels.items()}
                value = ";".join(named.get(source, "") for source in sources)
                yield str(step.get("replacement", "$1")).replace("$1", value)


def value_errors(query: str, values: Values) -> Iterator[str]:
    """Yield matchers of a query that no series fulfils."""
    for selector in _selectors(query):
        for matcher in selector.matchers:
            known = values.get(matcher.name)
            if known is None or not matcher.value:
                continue
            if matcher.is_regex:
                is_fulfilled = any(re.fullmatch(matcher.value, value) for value in known)
            else:
                is_fulfilled = matcher.value in known
            if not is_fulfilled:
                listed = ", ".join(sorted(filter(None, known))) or "none"
                yield f'{selector.series} has no {matcher.name} "{matcher.value}"; there are {listed}'


def scaling_problems(configured: list[Configured], documents: list[Document], series: Series) -> Iterator[Problem]:
    """Yield queries of autoscalers that read other pods than they scale, and malformed thresholds and addresses."""
    values = values_of(configured, documents)
    addresses = [
        str(at(trigger, "metadata", "serverAddress"))
        for document in of_kind(documents, "ScaledObject")
        for trigger in document.spec.get("triggers") or ()
        if at(trigger, "metadata", "serverAddress")
    ]
    for document in of_kind(documents, "ScaledObject"):
        scaled = _scaled(document, configured, documents)
        for index, trigger in enumerate(document.spec.get("triggers") or ()):
            metadata = trigger.get("metadata") or {}
            where = f"spec.triggers[{index}].metadata"
            if trigger.get("type") == "prometheus":
                query = str(metadata.get("query", ""))
                messages = [*value_errors(query, values), *_other_pods(query, scaled, series)]
                yield from (document.problem(f"{where}.query", message) for message in messages)
                yield from _numbers(document, where, metadata)
                yield from _address(document, where, str(metadata.get("serverAddress", "")), addresses)
    for document in of_kind(documents, "HorizontalPodAutoscaler"):
        yield from _metric(document, values)


def _scaled(autoscaler: Document, configured: list[Configured], documents: list[Document]) -> list[Configured]:
    """Return the containers of our services in the pods that an autoscaler scales."""
    target = autoscaler.spec.get("scaleTargetRef") or {}
    workload = scalable(documents).get((target.get("kind", "Deployment"), target.get("name", "")))
    found = [one for one in configured if one.variables.container.template.document is workload]
    role = str(target.get("name", "")).rpartition("-")[2]
    of_role = [one for one in found if f"roles[{role}]" in one.variables.container.template.path]
    return of_role or found


def _other_pods(query: str, scaled: list[Configured], series: Series) -> Iterator[str]:
    if len(scaled) != 1:
        return
    settings, container = scaled[0].settings, scaled[0].variables.container
    own = {
        "role": scaled[0].service.name, "pool": getattr(settings, "pool", None), "container": container.name,
    }  # fmt: skip
    for selector in _selectors(query):
        matched = {matcher.name: matcher for matcher in selector.matchers}
        for name in _OWN:
            matcher, wanted = matched.get(name), own[name]
            if matcher and matcher.value and wanted and matcher.is_equal and matcher.value != wanted:
                yield f'{name}="{matcher.value}" reads other pods than are scaled: must be "{wanted}"'
        labels = series.get(selector.series, frozenset())
        if "role" in labels and "role" not in matched:
            yield f"{selector.series} is of drafts, targets or coordinators alike: match role"
        elif labels <= SCRAPE_LABELS and labels and not matched.keys() & {"container", "job", "pod"}:
            yield f"{selector.series} is of every service alike: match container"


def _numbers(document: Document, where: str, metadata: dict[str, Any]) -> Iterator[Problem]:
    for name in ("threshold", "activationThreshold"):
        text = str(metadata.get(name, "1"))
        is_number = re.fullmatch(r"\d+(\.\d+)?", text) is not None
        if not is_number or (name == "threshold" and float(text) == 0):
            yield document.problem(f"{where}.{name}", f"{text} must be a number above 0")


def _address(document: Document, where: str, address: str, addresses: list[str]) -> Iterator[Problem]:
    if not address:
        return
    parts, usual = urlsplit(address), max(addresses, key=addresses.count)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield document.problem(f"{where}.serverAddress", f"{address} must be a URL such as {usual}")
    elif address != usual:
        message = f"{address} must be {usual}, which the other triggers ask"
        yield document.problem(f"{where}.serverAddress", message)


def _metric(document: Document, values: Values) -> Iterator[Problem]:
    for index, entry in enumerate(document.spec.get("metrics") or ()):
        kind = str(entry.get("type", ""))
        kind = kind[:1].lower() + kind[1:]
        for name, value in (at(entry, kind, "metric", "selector", "matchLabels") or {}).items():
            if name in values and value not in values[name]:
                where = f"spec.metrics[{index}].{kind}.metric.selector.matchLabels.{name}"
                yield document.problem(where, f"no series has the {name} {value}")
        container = at(entry, "containerResource", "container")
        if container and container not in values["container"]:
            where = f"spec.metrics[{index}].containerResource.container"
            yield document.problem(where, f"no pod has a container {container}")


def _selectors(query: str) -> list[Selector]:
    try:
        return selectors_of_query(query)
    except QueryError:
        return []  # `metrics` says so
