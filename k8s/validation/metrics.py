"""Metrics and labels that rules, scrapes and autoscalers name: services export each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .documents import Document, Problem, at, of_kind
from .queries import Labels, QueryError, labels_of_query
from .series import SCRAPE_LABELS, Series

RULE_FILES = "monitoring/prometheus/*.rules.yml"
_TEMPLATE_LABEL = re.compile(r"\$labels\.(\w+)")


def rule_file_problems(root: Path, series: Series) -> tuple[Series, list[Problem]]:
    """Return the series with those that the rule files record, and what is wrong with the rules."""
    known, problems = dict(series), []
    for path in sorted(root.glob(RULE_FILES), key=lambda path: ("recording" not in path.name, path.name)):
        body = yaml.safe_load(path.read_text()) or {}
        file = path.relative_to(root).as_posix()
        problems += [Problem(file, name, field, words) for name, field, words in _rules(body, known)]
    return known, problems


def metric_problems(documents: list[Document], series: Series) -> Iterator[Problem]:
    """Yield metrics and labels of an overlay's objects that no service exports."""
    known = dict(series)
    for document in of_kind(documents, "PrometheusRule"):
        for name, field, words in _rules(document.spec, known):
            yield document.problem(f"spec.{field} ({name})", words)
    for document in of_kind(documents, "ScaledObject"):
        yield from _triggers(document, known)
    adapted = _adapted_metrics(documents)
    for document in of_kind(documents, "HorizontalPodAutoscaler"):
        yield from _autoscaler(document, known, adapted)
    for document in of_kind(documents, "PodMonitor", "ServiceMonitor"):
        yield from _relabelling(document, known)
    for document in of_kind(documents, "ConfigMap"):
        for key, rule in adapter_rules(document):
            yield from _adapter_query(document, key, rule, known)


# ---- rules -----------------------------------------------------------------------------------------------------------


def _rules(body: dict[str, Any], known: Series) -> Iterator[tuple[str, str, str]]:
    """Yield name, field and problem of rules; add the recorded series to `known`. Records may be in any order."""
    rules = [
        (f"groups[{group['name']}].rules[{index}]", rule)
        for group in body.get("groups") or ()
        for index, rule in enumerate(group.get("rules") or ())
    ]
    pending = sorted(rules, key=lambda rule: "record" not in rule[1])
    for where, rule in pending:
        name = str(rule.get("record") or rule.get("alert"))
        try:
            labels = labels_of_query(str(rule["expr"]), known) | set(rule.get("labels") or ())
        except QueryError as error:
            yield name, f"{where}.expr", str(error)
            continue
        if "record" in rule:
            known[name] = labels
        yield from ((name, f"{where}.{field}", words) for field, words in _annotations(rule, labels))


def _annotations(rule: dict[str, Any], labels: Labels) -> Iterator[tuple[str, str]]:
    for field, text in (rule.get("annotations") or {}).items():
        for label in _TEMPLATE_LABEL.findall(text):
            if label not in labels and label != "alertname":
                yield f"annotations.{field}", f"the expression has no label {label}"


# ---- autoscalers -----------------------------------------------------------------------------------------------------


def _triggers(document: Document, known: Series) -> Iterator[Problem]:
    for index, trigger in enumerate(document.spec.get("triggers") or ()):
        where, metadata = f"spec.triggers[{index}].metadata", trigger.get("metadata") or {}
        if trigger.get("type") != "prometheus":
            continue
        for name in ("serverAddress", "query", "threshold"):
            if not metadata.get(name):
                yield document.problem(f"{where}.{name}", "is required")
        if query := metadata.get("query"):
            try:
                labels_of_query(str(query), known)
            except QueryError as error:
                yield document.problem(f"{where}.query", str(error))


def _autoscaler(document: Document, known: Series, adapted: dict[str, Labels]) -> Iterator[Problem]:
    """Yield metrics that neither services nor the rules of an adapter make, and selectors of labels they lack."""
    for index, entry in enumerate(document.spec.get("metrics") or ()):
        kind = str(entry.get("type", "")).lower()
        metric = at(entry, kind, "metric")
        if metric is None:
            continue
        where, name = f"spec.metrics[{index}].{kind}.metric", metric.get("name", "")
        labels = adapted.get(name, known.get(name))
        if labels is None:
            yield document.problem(f"{where}.name", f"no service exports {name}, and no rule of an adapter makes it")
            continue
        for label in at(metric, "selector", "matchLabels") or ():
            if label not in labels:
                yield document.problem(f"{where}.selector.matchLabels.{label}", f"{name} has no label {label}")


def adapter_rules(document: Document) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rules of prometheus-adapter's configuration in a ConfigMap, with their fields."""
    for key, text in (document.body.get("data") or {}).items():
        if "seriesQuery" not in text:
            continue
        body = yaml.safe_load(text) or {}
        for part in ("rules", "externalRules"):
            for index, rule in enumerate(body.get(part) or ()):
                yield f"data[{key}].{part}[{index}]", rule


def _adapted_metrics(documents: list[Document]) -> dict[str, Labels]:
    return {
        at(rule, "name", "as"): SCRAPE_LABELS | {"role", "pool", "model_name", "service"}
        for document in of_kind(documents, "ConfigMap")
        for _, rule in adapter_rules(document)
        if at(rule, "name", "as")
    }


def adapter_queries(rule: dict[str, Any]) -> dict[str, str]:
    """Return the queries of an adapter's rule by their fields, with examples in place of what the adapter fills in."""
    series, query = str(rule.get("seriesQuery", "")), str(rule.get("metricsQuery", ""))
    placeholders = {
        "<<.Series>>": series.partition("{")[0], "<<.LabelMatchers>>": "", "<<.GroupBy>>": "pod", "{,": "{", ",,": ",",
    }  # fmt: skip
    for placeholder, text in placeholders.items():
        query = query.replace(placeholder, text)
    return {field: text for field, text in (("seriesQuery", series), ("metricsQuery", query)) if text}


def _adapter_query(document: Document, where: str, rule: dict[str, Any], known: Series) -> Iterator[Problem]:
    for field, text in adapter_queries(rule).items():
        try:
            labels_of_query(text, known)
        except QueryError as error:
            yield document.problem(f"{where}.{field}", str(error))


# ---- scrapes ---------------------------------------------------------------------------------------------------------


def _relabelling(document: Document, known: Series) -> Iterator[Problem]:
    """Yield labels that a relabelling reads and no series has, and series that it keeps and no service exports."""
    labels = frozenset().union(*known.values())
    for index, endpoint in enumerate(document.spec.get("podMetricsEndpoints") or document.spec.get("endpoints") or ()):
        for number, step in enumerate(endpoint.get("metricRelabelings") or ()):
            where = f"spec.podMetricsEndpoints[{index}].metricRelabelings[{number}]"
            sources = step.get("sourceLabels") or []
            for label in sources:
                if label not in labels and label != "__name__":
                    yield document.problem(f"{where}.sourceLabels", f"no series has the label {label}")
            if sources == ["__name__"] and (pattern := step.get("regex")):
                for name in pattern.split("|"):
                    if re.fullmatch(r"[\w:]+", name) and name not in known:
                        yield document.problem(f"{where}.regex", f"no service exports {name}")
