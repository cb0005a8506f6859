"""`python -m k8s.validate` finds each name and number that two objects share and that differs in one of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from k8s.validate import TOOLS
from k8s.validation.checks import Surroundings, document_problems
from k8s.validation.compositions import compose_overlay
from k8s.validation.documents import Document
from k8s.validation.metrics import rule_file_problems
from k8s.validation.references import read_outside
from k8s.validation.rendering import render
from k8s.validation.series import exported_series
from tests.support.planted_faults import COMPOSITIONS, SHARED_FAULTS, Overlay

ROOT = Path(__file__).resolve().parents[3]
KUBECTL = next((path for path in (TOOLS / "kubectl", Path(shutil.which("kubectl") or "")) if path.is_file()), None)
#: Words by which a message says what to do.
REMEDY = re.compile(
    r"must|exceeds|needs?\b|\b(use|give|set|add|raise|lower|mount|select|name|match)\b|there (is|are)|has no"
)

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl (`make k8s-tools`)")


@pytest.fixture(scope="module")
def surroundings() -> Surroundings:
    series, _ = rule_file_problems(ROOT, exported_series(ROOT))
    return Surroundings(series, read_outside(ROOT))


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Document]]:
    """Documents of the compositions that faults are planted in."""
    assert KUBECTL is not None
    return {
        name: render(compose_overlay(ROOT, *components), ROOT, KUBECTL) for name, components in COMPOSITIONS.items()
    }


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composition_without_a_fault_has_no_problem(
    rendered: dict[str, list[Document]], surroundings: Surroundings, name: str
) -> None:
    assert list(map(str, document_problems(rendered[name], surroundings))) == []


@pytest.mark.parametrize(("composition", "name"), SHARED_FAULTS)
def test_a_planted_fault_is_found_with_object_field_and_remedy(
    rendered: dict[str, list[Document]], surroundings: Surroundings, composition: str, name: str
) -> None:
    overlay = Overlay(rendered[composition], name)
    place = SHARED_FAULTS[composition, name](overlay)
    problems = list(document_problems(overlay.documents, surroundings))
    named = [one for one in problems if one.object == place.document.title and place.field in one.field]
    assert named, list(map(str, problems))
    assert any(REMEDY.search(one.message) for one in named), list(map(str, named))


def test_the_table_has_at_least_sixty_faults() -> None:
    assert len(SHARED_FAULTS) >= 60
