"""`python -m k8s.validate` finds every planted fault by file, object and field, and nothing in the tree as it is."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from k8s.validate import TOOLS
from k8s.validation.chart import render_chart
from k8s.validation.checks import Surroundings, document_problems
from k8s.validation.compose import compose_problems, compose_services
from k8s.validation.compositions import Overlay as Rendered
from k8s.validation.compositions import find_overlays
from k8s.validation.documents import Document, Problem
from k8s.validation.metrics import rule_file_problems
from k8s.validation.queries import QueryError, labels_of_query
from k8s.validation.references import read_outside
from k8s.validation.rendering import RenderingError, render
from k8s.validation.series import exported_series
from tests.support.planted_faults import FAULTS, OPERATED, OPERATOR_FAULTS, Overlay
from tests.support.planted_faults.overlay import Place

ROOT = Path(__file__).resolve().parents[3]
KUBECTL = next((path for path in (TOOLS / "kubectl", Path(shutil.which("kubectl") or "")) if path.is_file()), None)
#: Faults of one run are at the same places in the next.
SEED = "31"

#: Objects of operators that the base does not have.
MONITORING = list(
    yaml.safe_load_all("""\
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata: { name: specdec }
spec:
  selector: { matchLabels: { app.kubernetes.io/name: target } }
  podMetricsEndpoints: [{ port: metrics }]
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: { name: specdec }
spec:
  groups:
    - name: specdec
      rules:
        - { alert: TargetsWait, expr: "sum by (pool) (specdec:num_requests_waiting{role='target'}) > 4" }
""")
)

needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl (`make k8s-tools`)")


@pytest.fixture(scope="module")
def surroundings() -> Surroundings:
    series, problems = rule_file_problems(ROOT, exported_series(ROOT))
    assert problems == []
    return Surroundings(series, read_outside(ROOT), compose_services(ROOT))


@pytest.fixture(scope="module")
def clean() -> list[Document]:
    """Documents of the overlay that faults are planted in."""
    assert KUBECTL is not None
    documents = render(Rendered("k8s/overlays/cpu", (ROOT / "k8s" / "overlays" / "cpu",)), ROOT, KUBECTL)
    return documents + [Document("k8s/components/monitoring/rules.yaml", body) for body in MONITORING]


def found(documents: list[Document], surroundings: Surroundings) -> list[Problem]:
    return list(document_problems(documents, surroundings))


@needs_kubectl
def test_the_overlay_without_a_fault_has_no_problem(clean: list[Document], surroundings: Surroundings) -> None:
    assert found(clean, surroundings) == []


@needs_kubectl
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_file_object_and_field(
    clean: list[Document], surroundings: Surroundings, name: str
) -> None:
    overlay = Overlay(clean, SEED + name)
    require_named(FAULTS[name](overlay), found(overlay.documents, surroundings))


@pytest.fixture(scope="module")
def operated() -> dict[str, list[Document]]:
    """Documents of the overlays with workloads that operators run."""
    assert KUBECTL is not None
    folders = {name: ROOT / "k8s" / "overlays" / name for name in OPERATED}
    return {name: render(Rendered(name, (folder,)), ROOT, KUBECTL) for name, folder in folders.items()}


@needs_kubectl
@pytest.mark.parametrize("name", OPERATED)
def test_an_overlay_for_an_operator_has_no_problem(
    operated: dict[str, list[Document]], surroundings: Surroundings, name: str
) -> None:
    assert found(operated[name], replace(surroundings, compose=[])) == []


@needs_kubectl
@pytest.mark.parametrize(("name", "fault"), OPERATOR_FAULTS)
def test_a_fault_is_found_in_a_workload_of_an_operator(
    operated: dict[str, list[Document]], surroundings: Surroundings, name: str, fault: str
) -> None:
    overlay = Overlay(operated[name], SEED + fault, OPERATED[name])
    place = OPERATOR_FAULTS[name, fault](overlay)
    require_named(place, found(overlay.documents, replace(surroundings, compose=[])))


def require_named(place: Place, problems: list[Problem]) -> None:
    assert any(
        (one.file, one.object) == (place.document.file, place.document.title)
        and place.field in one.field
        and one.message
        for one in problems
    ), [str(one) for one in problems]


def test_there_are_at_least_thirty_planted_faults() -> None:
    assert len(FAULTS) >= 30


@needs_kubectl
def test_an_overlay_that_does_not_render_is_named_with_the_reason(tmp_path: Path) -> None:
    assert KUBECTL is not None
    folder = tmp_path / "k8s" / "base"
    folder.mkdir(parents=True)
    (folder / "kustomization.yaml").write_text("resources: [draft.yaml]\n")
    (overlay,) = find_overlays(tmp_path)
    with pytest.raises(RenderingError) as caught:
        render(overlay, tmp_path, KUBECTL)
    assert caught.value.problem.file == "k8s/base/kustomization.yaml"
    assert "draft.yaml" in caught.value.problem.message


@pytest.mark.parametrize("as_chart", [False, True])
def test_a_renderer_does_not_see_variables_that_settings_are_read_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_chart: bool
) -> None:
    """It may be started while another thread changes them, which exec does not survive."""
    tool = tmp_path / "tool"
    shown = 'printf "# Source: specdec/templates/seen.yaml\\nkind: ConfigMap\\nmetadata: {name: n$SPECDEC_SEEN}\\n"'
    tool.write_text(f"#!/bin/sh\n{shown}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("SPECDEC_SEEN", "seen")
    overlay = next(overlay for overlay in find_overlays(ROOT) if overlay.name == "k8s/base")
    (document,) = render_chart(ROOT, tool) if as_chart else render(overlay, ROOT, tool)
    assert document.body["metadata"]["name"] == "n"


@needs_kubectl
def test_a_component_that_no_overlay_uses_is_rendered_upon_the_base(tmp_path: Path) -> None:
    assert KUBECTL is not None
    for name, text in {
        "base": "resources: [map.yaml]",
        "components/used": "kind: Component\nresources: [map.yaml]",
        "components/unused": "kind: Component\nresources: [map.yaml]",
        "overlays/small": "resources: [../../base]\ncomponents: [../../components/used]",
    }.items():
        folder = tmp_path / "k8s" / name
        folder.mkdir(parents=True)
        version = "apiVersion: kustomize.config.k8s.io/v1alpha1\n" if "kind" in text else ""
        (folder / "kustomization.yaml").write_text(version + text)
        (folder / "map.yaml").write_text(f"{{apiVersion: v1, kind: ConfigMap, metadata: {{name: {folder.name}}}}}")
    files = {
        overlay.name: [document.file for document in render(overlay, tmp_path, KUBECTL)]
        for overlay in find_overlays(tmp_path)
    }
    assert files == {
        "k8s/base": ["k8s/base/map.yaml"],
        "k8s/overlays/small": ["k8s/base/map.yaml", "k8s/components/used/map.yaml"],
        "k8s/components/unused": ["k8s/base/map.yaml", "k8s/components/unused/map.yaml"],
    }


def test_a_misspelt_setting_of_the_compose_file_is_named(tmp_path: Path) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    (tmp_path / "docker-compose.yml").write_text(text.replace("SPECDEC_DRAFT__METRICS", "SPECDEC_DRAFT__METRIC"))
    (problem,) = compose_problems(tmp_path)
    assert problem.file == "docker-compose.yml"
    assert (problem.object, problem.field) == ("draft", "services.draft.environment.SPECDEC_DRAFT__METRIC")


def test_an_unknown_metric_of_a_rule_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "monitoring" / "prometheus"
    folder.mkdir(parents=True)
    text = (ROOT / "monitoring" / "prometheus" / "recording.rules.yml").read_text()
    (folder / "recording.rules.yml").write_text(text.replace("specdec:busy_seconds_total", "specdec:busy_total"))
    _, (problem,) = rule_file_problems(tmp_path, exported_series(ROOT))
    assert problem.file == "monitoring/prometheus/recording.rules.yml"
    assert problem.object == "specdec:device_busy:ratio_5m"
    assert problem.field.endswith(".expr")
    assert "specdec:busy_total" in problem.message


@pytest.mark.parametrize(
    ("query", "labels"),
    [
        ("sum(specdec:num_requests_waiting)", set()),
        ("sum by (pool) (rate(specdec:queue_seconds_sum[1m]) / rate(specdec:queue_seconds_count[1m]))", {"pool"}),
        ("histogram_quantile(0.9, sum by (le, pool) (rate(specdec:step_seconds_bucket[5m])))", {"pool"}),
        ("sum without (pod) (specdec:replicas{role='draft'}) * on (pool) group_left () vector(1)", None),
        ('max_over_time(sum by (role) (specdec:kv_blocks{state="active"})[5m:30s])', {"role"}),
        ('label_replace(sum by (pool) (specdec:kv_blocks), "name", "$1", "pool", "(.*)")', {"pool", "name"}),
    ],
)
def test_the_labels_of_a_query_follow_from_its_parts(query: str, labels: set[str] | None) -> None:
    series = exported_series(ROOT)
    if labels is None:
        with pytest.raises(QueryError, match="no label pool"):
            labels_of_query(query, series)
    else:
        assert labels_of_query(query, series) == labels


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("sum(specdec:kv_block)", "no service exports specdec:kv_block; did you mean specdec:kv_blocks"),
        ("specdec:kv_blocks{stat='active'}", "specdec:kv_blocks has no label stat; did you mean state"),
        ("sum by (pol) (specdec:kv_blocks)", "no label pol; did you mean pool"),
        ("histogram_quantile(0.9, rate(specdec:step_seconds_sum[5m]))", "no label le"),
        ("sum by (pool (specdec:kv_blocks)", "is not PromQL"),
    ],
)
def test_what_is_wrong_with_a_query_is_named(query: str, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        labels_of_query(query, exported_series(ROOT))
