"""All checks of an overlay, and of the repository as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .autoscaling import autoscaling_problems
from .compose import ComposeService, compose_problems, compose_services, difference_problems
from .container_settings import agreement_problems, configured_containers
from .documents import Document, Problem
from .metrics import metric_problems, rule_file_problems
from .pods import pod_problems
from .references import Objects, read_outside, reference_problems
from .rendering import Overlay, RenderingError, find_overlays, render
from .schemas import schema_problems
from .selectors import selector_problems
from .series import Series, exported_series

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


def check_repository(root: Path, kubectl: Path) -> Report:
    """Render and check every overlay below `root`/k8s, the compose files and the rule files."""
    report = Report()
    series, problems = rule_file_problems(root, exported_series(root))
    for problem in (*problems, *compose_problems(root)):
        report.add(problem)
    overlays = find_overlays(root)
    names = [overlay.name for overlay in overlays]
    alike = next((name for name in _LIKE_COMPOSE if name in names), None)
    for overlay in overlays:
        compose = compose_services(root) if overlay.name == alike else []
        _check_overlay(overlay, root, kubectl, Surroundings(series, read_outside(root), compose), report)
    return report


def document_problems(documents: list[Document], surroundings: Surroundings) -> Iterator[Problem]:
    """Yield the problems of an overlay's documents. Where a schema is violated, the other checks are left out."""
    violations = [problem for document in documents for problem in schema_problems(document)]
    yield from violations
    if violations:
        return
    objects = Objects(documents, surroundings.outside)
    configured, problems = configured_containers(objects)
    yield from problems
    yield from agreement_problems(configured)
    for document in documents:
        yield from pod_problems(document)
    yield from reference_problems(objects)
    yield from selector_problems(documents)
    yield from autoscaling_problems(documents)
    yield from metric_problems(documents, surroundings.series)
    yield from difference_problems(surroundings.compose, configured)


def _check_overlay(overlay: Overlay, root: Path, kubectl: Path, surroundings: Surroundings, report: Report) -> None:
    try:
        documents = render(overlay, root, kubectl)
    except RenderingError as error:
        report.add(error.problem, overlay.name)
        return
    report.overlays[overlay.name] = len(documents)
    for document in documents:
        report.documents.setdefault(repr(document.body), document)
    for problem in document_problems(documents, surroundings):
        report.add(problem, overlay.name)
