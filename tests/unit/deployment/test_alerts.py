"""Every alert rule under promtool: silent in normal work, firing under its fault, resolved some time after it.

A case gives the series that the alert reads, each with its normal value and its value under the fault. Counters and
buckets have their increase a minute instead of a value. Normal work lasts an hour, the fault half an hour, and normal
work after it ninety minutes.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prometheus import FOLDER, NO_PROMETHEUS, PROMTOOL, RULE_FILES, rules

NORMAL_MIN, FAULT_MIN, AFTER_MIN = 60, 30, 90
MODEL = 'model_name="m"'
COORDINATOR = f'{MODEL}, instance="c:9051"'
REPLICA = f'{MODEL}, role="target", pool="default", instance="t:9071"'
POOL = f'{MODEL}, pool="default", instance="c:9051"'
GATEWAY = 'route="/v1/completions", instance="g:8000"'

Series = Mapping[str, tuple[float, float]]


def slow(name: str, labels: str, fast_bound: str, slow_bound: str) -> Series:
    """A histogram whose values are below the fast bound in normal work and between the bounds under the fault."""
    return {
        f'{name}_bucket{{{labels}, le="{fast_bound}"}}': (60, 0),
        f'{name}_bucket{{{labels}, le="{slow_bound}"}}': (60, 60),
        f'{name}_bucket{{{labels}, le="+Inf"}}': (60, 60),
    }


CASES: dict[str, Series] = {
    "SpecdecTimeToFirstTokenHigh": slow("specdec:time_to_first_token_seconds", MODEL, "2.5", "5.0"),
    "SpecdecInterTokenLatencyHigh": slow("specdec:inter_token_latency_seconds", MODEL, "0.25", "0.5"),
    "SpecdecRequestsFail": {f'specdec:request_failures_total{{{COORDINATOR}, reason="INTERNAL"}}': (0, 1)},
    "SpecdecRequestsRefused": {
        f'specdec:request_refusals_total{{{COORDINATOR}, reason="QUEUE_FULL"}}': (0, 10),
        f'specdec:request_refusals_total{{{COORDINATOR}, reason="INVALID_REQUEST"}}': (10, 10),
    },
    "SpecdecGatewayErrors": {
        f'specdec:http_requests_total{{{GATEWAY}, status="200"}}': (100, 90),
        f'specdec:http_requests_total{{{GATEWAY}, status="500"}}': (0, 10),
        'specdec:http_requests_total{route="/ready", instance="g:8000", status="503"}': (30, 30),
    },
    "SpecdecAcceptanceFell": {
        f"specdec:spec_decode_num_draft_tokens_total{{{POOL}}}": (600, 600),
        f"specdec:spec_decode_num_accepted_tokens_total{{{POOL}}}": (480, 120),
    },
    "SpecdecDraftsLate": {
        f"specdec:draft_late_total{{{POOL}}}": (1, 50),
        f"specdec:spec_decode_num_drafts_total{{{POOL}}}": (99, 50),
    },
    "SpecdecAuditMismatch": {
        f'specdec:audit_rounds_total{{{COORDINATOR}, mode="greedy", result="mismatch"}}': (0, 1),
        f'specdec:audit_rounds_total{{{COORDINATOR}, mode="greedy", result="tie"}}': (1, 1),
    },
    "SpecdecAuditAcceptance": {f'specdec:audit_acceptance_z{{{COORDINATOR}, mode="rejection"}}': (2, -6)},
    "SpecdecNoTarget": {
        f'specdec:replicas{{{COORDINATOR}, role="target", pool="", state="up"}}': (0, 0),
        f'specdec:replicas{{{COORDINATOR}, role="target", pool="default", state="up"}}': (2, 0),
        f'specdec:replicas{{{COORDINATOR}, role="target", pool="default", state="down"}}': (0, 2),
    },
    "SpecdecPoolWithoutReplicas": {
        f'specdec:replicas{{{COORDINATOR}, role="draft", pool="", state="up"}}': (0, 0),
        f'specdec:replicas{{{COORDINATOR}, role="draft", pool="default", state="up"}}': (1, 0),
    },
    "SpecdecServiceDown": {'up{job="specdec-draft", instance="d:9061"}': (1, 0)},
    "SpecdecDeviceStalled": {f"specdec:device_stalled{{{REPLICA}}}": (0, 1)},
    "SpecdecCallsWaiting": {f"specdec:num_requests_waiting{{{REPLICA}}}": (2, 9)},
    "SpecdecKvExhausted": {f"specdec:kv_exhausted_total{{{REPLICA}}}": (0, 1)},
    "SpecdecKvNearlyFull": {f"specdec:kv_cache_usage_perc{{{REPLICA}}}": (0.8, 0.97)},
    "SpecdecStoreErrors": {f"specdec:store_errors_total{{{COORDINATOR}}}": (0, 1)},
    "SpecdecLeasesLost": {f"specdec:leases_lost_total{{{COORDINATOR}}}": (0.1, 2)},
    "SpecdecEventLoopLag": slow("specdec:event_loop_lag_seconds", COORDINATOR, "0.1", "0.25"),
    "SpecdecTargetChanged": {f"specdec:target_changes_total{{{COORDINATOR}}}": (0, 1)},
}

#: Labels of the firing alerts, beside the severity.
LABELS: dict[str, dict[str, str]] = {
    "SpecdecTimeToFirstTokenHigh": {"model_name": "m"},
    "SpecdecInterTokenLatencyHigh": {"model_name": "m"},
    "SpecdecRequestsFail": {"model_name": "m", "reason": "INTERNAL"},
    "SpecdecRequestsRefused": {"model_name": "m", "reason": "QUEUE_FULL"},
    "SpecdecGatewayErrors": {"instance": "g:8000"},
    "SpecdecAcceptanceFell": {"model_name": "m", "pool": "default"},
    "SpecdecDraftsLate": {"model_name": "m", "pool": "default"},
    "SpecdecAuditMismatch": {"model_name": "m", "mode": "greedy"},
    "SpecdecAuditAcceptance": {"model_name": "m", "mode": "rejection", "instance": "c:9051"},
    "SpecdecPoolWithoutReplicas": {"model_name": "m", "pool": "default", "instance": "c:9051"},
    "SpecdecServiceDown": {"job": "specdec-draft", "instance": "d:9061"},
}
_OF_A_REPLICA = {"model_name": "m", "role": "target", "pool": "default", "instance": "t:9071"}
_OF_A_COORDINATOR = {"model_name": "m", "instance": "c:9051"}


def labels_of(alert: str) -> dict[str, str]:
    read_from_replica = any(REPLICA in selector for selector in CASES[alert])
    return LABELS.get(alert, _OF_A_REPLICA if read_from_replica else _OF_A_COORDINATOR)


def samples(selector: str, normal: float, fault: float) -> str:
    """The samples of a series in promtool's notation, one a minute."""
    values = [normal] * NORMAL_MIN + [fault] * FAULT_MIN + [normal] * AFTER_MIN
    if re.search(r"_(total|bucket)\{", selector):
        values = list(accumulate(values))
    return " ".join(f"{value:g}" if value < 1e5 else str(int(value)) for value in values)


def shown(alert: str) -> dict[str, Any]:
    """The alert as it fires."""
    (rule,) = [rule for rule in rules() if rule.get("alert") == alert]
    labels = labels_of(alert)
    filled = {
        name: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
        for name, text in rule["annotations"].items()
    }
    return {"exp_labels": labels | rule["labels"], "exp_annotations": filled}


def run_promtool(folder: Path, alert: str, expected: Mapping[int, list[dict[str, Any]]]) -> tuple[int, str]:
    """Return the exit code and the output of promtool; `expected` has the firing alerts by minute."""
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": samples(name, *values)} for name, values in CASES[alert].items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": alerts} for minute, alerts in expected.items()
        ],
    }
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(file) for file in RULE_FILES], "tests": [test]}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_every_alert_has_a_case() -> None:
    assert sorted(CASES) == sorted(rule["alert"] for rule in rules() if "alert" in rule)


def test_every_alert_says_how_severe_it_is_what_happened_and_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
            assert sorted(rule["annotations"]) == ["description", "summary"], rule["alert"]


@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMETHEUS)
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_is_silent_in_normal_work_fires_under_its_fault_and_resolves(alert: str, tmp_path: Path) -> None:
    end_of_fault = NORMAL_MIN + FAULT_MIN - 1
    expected = {NORMAL_MIN - 1: [], end_of_fault: [shown(alert)], end_of_fault + AFTER_MIN: []}
    code, output = run_promtool(tmp_path, alert, expected)
    assert code == 0, output


@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMETHEUS)
def test_promtool_refuses_an_expectation_that_does_not_hold(tmp_path: Path) -> None:
    code, output = run_promtool(tmp_path, "SpecdecDeviceStalled", {NORMAL_MIN + FAULT_MIN - 1: []})
    assert code != 0
    assert "SpecdecDeviceStalled" in output


def test_the_prometheus_of_the_compose_profile_scrapes_every_service_where_it_serves_metrics() -> None:
    services = yaml.safe_load((FOLDER.parents[1] / "docker-compose.yml").read_text())["services"]
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


@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMETHEUS)
def test_prometheus_takes_the_configuration_of_the_compose_profile() -> None:
    assert PROMTOOL is not None
    command = [PROMTOOL, "check", "config", str(FOLDER / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
