"""All checks of an overlay, and of the repository as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from .agreement import difference_of_services
from .autoscaling import autoscaling_problems
from .chart import CHART, find_chart_values, render_chart
from .compose import ComposeService, compose_problems, compose_services, difference_problems
from .compositions import Overlay, composition_problems, find_overlays, find_pairs
from .container_settings import agreement_problems, configured_containers
from .disruptions import disruption_problems
from .documents import Document, Problem
from .label_values import scaling_problems
from .metrics import metric_problems, rule_file_problems
from .network import network_problems
from .placement import placement_problems
from .pods import pod_problems
from .probes import balancer_problems, probe_problems
from .redis_servers import redis_problems
from .references import Objects, read_outside, reference_problems
from .rendering import RenderingError, render
from .resources import quota_problems, resource_problems
from .schemas import schema_problems
from .scrapes import scrape_problems
from .selectors import selector_problems
from .series import Series, exported_series
from .volumes import volume_problems

#: Overlays that serve what the compose file serves; the first that exists is compared with it.
_LIKE_COMPOSE = ("k8s/overlays/demo", "k8s/base")


@dataclass(frozen=True)
class Surroundings:
    """What the documents of every overlay are checked against."""

    series: Series
    outside: dict[tuple[str, str], frozenset[str]]
    compose: list[ComposeService] = field(default_factory=list)


@dataclass
class Report:
    """Problems of the repository, each with the overlays that have it."""

    overlays: dict[str, int] = field(default_factory=dict)
    """Number of documents of each overlay."""
    problems: dict[Problem, list[str]] = field(default_factory=dict)
    documents: dict[str, Document] = field(default_factory=dict)
    """All rendered documents, once each."""

    def add(self, problem: Problem, overlay: str = "") -> None:
        self.problems.setdefault(problem, []).append(overlay)


def check_repository(root: Path, kubectl: Path, helm: Path | None = None) -> Report:
    """Render and check every overlay below `root`/k8s, the compose and rule files, and the chart if there is helm."""
    report = Report()
    _, problems = _series(root)
    for problem in (*problems, *compose_problems(root), *composition_problems(root)):
        report.add(problem)
    _check_overlays(find_overlays(root), root, kubectl, report)
    if helm:
        charts = {f"{CHART.as_posix()}/ci/{values.name}": partial(render_chart, root, helm, "--values", str(values))
                  for values in find_chart_values(root)}  # fmt: skip
        _check(charts, Surroundings(_series(root)[0], read_outside(root)), report)
    return report


def check_pairs(root: Path, kubectl: Path, report: Report) -> int:
    """Render and check every pair of components; add what is wrong to the report. Return the number of pairs."""
    pairs = find_pairs(root)
    among = Report()
    _check_overlays(pairs, root, kubectl, among)
    for problem, names in among.problems.items():
        if problem not in report.problems:  # overlays have said so
            report.problems[problem] = names
    return len(pairs)


def document_problems(documents: list[Document], surroundings: Surroundings) -> Iterator[Problem]:
    """Yield the problems of an overlay's documents. Where a schema is violated, the other checks are left out."""
    violations = [problem for document in documents for problem in schema_problems(document)]
    yield from violations
    if violations:
        return
    objects = Objects(documents, surroundings.outside)
    configured, problems = configured_containers(objects)
    containers = [one for document in documents for template in document.templates for one in template.all_containers]
    yield from problems
    yield from agreement_problems(configured)
    for document in documents:
        yield from pod_problems(document)
    yield from probe_problems(containers, configured)
    yield from balancer_problems(documents)
    yield from resource_problems(containers, configured)
    yield from quota_problems(documents)
    yield from volume_problems(configured, documents)
    yield from redis_problems(configured, objects)
    yield from reference_problems(objects)
    yield from selector_problems(documents)
    yield from placement_problems(documents)
    yield from network_problems(configured, objects)
    yield from autoscaling_problems(documents)
    yield from disruption_problems(documents, configured)
    yield from metric_problems(documents, surroundings.series)
    yield from scaling_problems(configured, documents, surroundings.series)
    yield from scrape_problems(configured, documents)
    yield from difference_of_services(configured, documents)
    yield from difference_problems(surroundings.compose, configured)


def _check_overlays(overlays: list[Overlay], root: Path, kubectl: Path, report: Report) -> None:
    names = [overlay.name for overlay in overlays]
    alike = next((name for name in _LIKE_COMPOSE if name in names), None)
    surroundings = Surroundings(_series(root)[0], read_outside(root))
    renders = {overlay.name: partial(render, overlay, root, kubectl) for overlay in overlays}
    _check(renders, surroundings, report, alike=alike, compose=compose_services(root))


def _check(
    renders: Mapping[str, Callable[[], list[Document]]],
    surroundings: Surroundings,
    report: Report,
    *,
    alike: str | None = None,
    compose: list[ComposeService] | None = None,
) -> None:
    """Render and check what has a name; what is called `alike` is compared with compose services too."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # kubectl and helm are processes of their own
        for name, documents in zip(renders, threads.map(_rendered, renders.values()), strict=True):
            if isinstance(documents, Problem):
                report.add(documents, name)
                continue
            report.overlays[name] = len(documents)
            for document in documents:
                report.documents.setdefault(repr(document.body), document)
            compared = replace(surroundings, compose=compose or []) if name == alike else surroundings
            for problem in document_problems(documents, compared):
                report.add(problem, name)


def _rendered(render_documents: Callable[[], list[Document]]) -> list[Document] | Problem:
    try:
        return render_documents()
    except RenderingError as error:
        return error.problem


def _series(root: Path) -> tuple[Series, list[Problem]]:
    return rule_file_problems(root, exported_series(root))
