"""The rule files: what each alert says, its runbook, the objects of Kubernetes, and the scrapes of the compose file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from monitoring import rules as written_rules
from monitoring.rules import MANIFESTS, set_docs_address, written_objects
from tests.support.prometheus import FOLDER, NO_PROMETHEUS, PROMTOOL, RULE_FILES, rules

ROOT = FOLDER.parents[1]
RUNBOOKS = ROOT / "docs" / "how-to" / "runbooks.md"
ALERTS = [rule for rule in rules() if "alert" in rule]


def test_every_alert_says_how_severe_it_is_what_happened_and_where_its_runbook_is() -> None:
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("page", "ticket", "info"), rule["alert"]
        assert sorted(rule["annotations"]) == ["description", "runbook_url", "summary"], rule["alert"]
        assert rule["annotations"]["runbook_url"].endswith(f"/how-to/runbooks.html#{rule['alert'].lower()}")


def test_every_alert_has_a_runbook_that_states_its_severity_and_no_runbook_is_left_over() -> None:
    found = dict(re.findall(r"^## (Specdec\w+)\n\n\*\*(\w+)\.\*\*", RUNBOOKS.read_text(), re.MULTILINE))
    assert found == {rule["alert"]: rule["labels"]["severity"].capitalize() for rule in ALERTS}


def test_the_table_of_the_monitoring_page_has_every_alert_with_its_severity() -> None:
    page = (ROOT / "docs" / "how-to" / "monitor.md").read_text()
    rows = re.findall(r"^\| `(Specdec\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in ALERTS]


def test_the_objects_for_the_operator_are_committed_as_they_are_written() -> None:
    for name, text in written_objects().items():
        assert (MANIFESTS / name).read_text() == text, f"{name} differs from the rules: run make dashboards"


def test_the_objects_for_the_operator_have_the_rules_of_the_files() -> None:
    objects = [yaml.safe_load(text) for text in written_objects().values()]
    found = [group for body in objects for group in body["spec"]["groups"]]
    assert found == [group for file in RULE_FILES for group in yaml.safe_load(file.read_text())["groups"]]


def test_the_address_of_the_runbooks_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alerts.rules.yml").write_text((FOLDER / "alerts.rules.yml").read_text())
    monkeypatch.setattr(written_rules, "RULES", tmp_path)
    for address in ("https://docs.mycompany.com/specdec/", "http://docs:8001"):
        set_docs_address(address)
        urls = re.findall(r"runbook_url: (\S+)", (tmp_path / "alerts.rules.yml").read_text())
        assert len(urls) == len(ALERTS)
        assert all(url.startswith(f"{address.rstrip('/')}/how-to/runbooks.html#specdec") for url in urls)


@pytest.mark.parametrize("address", ["docs.mycompany.com", 'https://a"b', "https://a#b", ""])
def test_another_address_is_refused_in_one_line(address: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "monitoring", "--docs", address], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --docs: must be an http or https address")
    assert len(done.stderr.splitlines()) == 1


def test_the_prometheus_of_the_compose_profile_scrapes_every_service_where_it_serves_metrics() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    metrics = {
        (name, int(value.rpartition(":")[2]))
        for name, service in services.items()
        for key, value in service.get("environment", {}).items()
        if key.endswith("__METRICS") or key == "SPECDEC_GATEWAY__LISTEN"
    }
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    scraped = {(*lookup["names"], lookup["port"]) for job in jobs for lookup in job["dns_sd_configs"]}
    assert len(metrics) == 4
    assert scraped == metrics
    assert services["prometheus"]["profiles"] == ["monitoring"]
    assert "./monitoring/prometheus:/etc/prometheus:ro" in services["prometheus"]["volumes"]


def test_compose_and_the_operator_give_services_the_same_jobs() -> None:
    """Rules tell services apart by their job."""
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    monitor = yaml.safe_load((MANIFESTS / "pod-monitor.yaml").read_text())["spec"]
    (selected,) = monitor["selector"]["matchExpressions"]
    assert {job["job_name"] for job in jobs} == {f"specdec-{name}" for name in selected["values"]}
    ((step,),) = [endpoint["relabelings"] for endpoint in monitor["podMetricsEndpoints"]]
    assert (step["targetLabel"], step["replacement"]) == ("job", "specdec-$1")


@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMETHEUS)
def test_prometheus_takes_the_configuration_of_the_compose_profile() -> None:
    assert PROMTOOL is not None
    command = [PROMTOOL, "check", "config", str(FOLDER / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
