"""Debian's Prometheus scrapes a running `specdec up --http --metrics`; every query of dashboards and rules has data.

The system has had a little load by then, with a request that was cancelled and a draft that was killed and replaced.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from monitoring.dashboards import FOLDER
from specdec.client import Client
from tests.support.prometheus import (
    NO_PROMETHEUS,
    PROMETHEUS,
    Prometheus,
    queries_of,
    rules,
    scraping,
    selectors_of,
    with_variables,
)
from tests.support.up_rig import ENVIRON, SPECDEC, child_running

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason=NO_PROMETHEUS)

SERVICES = ("coordinator", "target", "draft", "gateway")
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
#: Limit on what Prometheus takes to see something, for machines under load.
PATIENCE_S = 120


@dataclass
class System:
    """A running system and where its services serve metrics."""

    process: subprocess.Popen[str]
    grpc: str
    http: str
    metrics: dict[str, str]


@pytest.fixture(scope="module")
def system(llama_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    target, draft = llama_pair
    log = tmp_path_factory.mktemp("system") / "log"
    with log.open("w") as stderr:
        up = subprocess.Popen(
            [*SPECDEC, "up", "--target", str(target), "--draft", str(draft), "--listen", "127.0.0.1:0",
             "--http", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--set", "coordinator.audit_share=1"],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=ENVIRON,
        )  # fmt: skip
    assert up.stdout is not None
    ready = re.fullmatch(r"ready grpc=(\S+) http=(\S+)\n", up.stdout.readline())
    assert ready, log.read_text()
    found = re.findall(r"^\[(\w+)(?:-\d+)?\] metrics at http://(\S+)/metrics$", log.read_text(), re.MULTILINE)
    assert sorted(name for name, _ in found) == sorted(SERVICES)
    yield System(up, ready[1], ready[2], dict(found))
    up.send_signal(signal.SIGTERM)
    up.communicate()


@pytest.fixture(scope="module")
def prometheus(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, which has scraped the system before, during and after the load."""
    jobs = {f"specdec-{name}": [address] for name, address in system.metrics.items()}
    with scraping(tmp_path_factory.mktemp("prometheus"), jobs) as prometheus:
        until(lambda: len(prometheus.query("up == 1")) == len(SERVICES))
        put_load_on(system, prometheus)
        yield prometheus


def put_load_on(system: System, prometheus: Prometheus) -> None:
    """Answer some requests, one of which is cancelled, and replace a killed draft in between."""
    answer_over_http(system)
    with Client(system.grpc) as client:
        until(lambda: cancels_a_request(client, prometheus))
        draft = child_running(system.process, "draft_service")
        os.kill(draft, signal.SIGKILL)
        until(lambda: child_running(system.process, "draft_service") != draft)
        until(lambda: len(prometheus.query("up == 1")) == len(SERVICES))
        client.generate("import os", temperature=1.0, seed=3, max_new_tokens=24, ignore_eos=True)
    answer_over_http(system)


def cancels_a_request(client: Client, prometheus: Prometheus) -> bool:
    """Cancel a request; return whether Prometheus has seen a cancellation. A short request may end before it."""
    with client.generate("import os", max_new_tokens=200, ignore_eos=True, stream=True) as stream:
        next(stream)
    return bool(prometheus.query('specdec:request_cancellations_total{cause="client_left"} > 0'))


def answer_over_http(system: System) -> None:
    body = {"prompt": "import os", "max_tokens": 24, "ignore_eos": True, "stream": True}
    answer = httpx2.post(f"http://{system.http}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


def until(is_so: Callable[[], bool]) -> None:
    """Wait until `is_so`; a condition that Prometheus does not answer yet is asked again."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        try:
            if is_so():
                return
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.2)
    pytest.fail(f"not so within {PATIENCE_S} s")


def queries_without_data(prometheus: Prometheus, expressions: list[str]) -> list[str]:
    """Return the expressions that still have no data when the patience ends."""
    missing, end_s = expressions, time.monotonic() + PATIENCE_S
    while missing and time.monotonic() < end_s:
        missing = [text for text in missing if not prometheus.query(text)]
    return missing


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_of_a_dashboard_has_data(prometheus: Prometheus, name: str) -> None:
    assert queries_without_data(prometheus, [with_variables(text) for text in queries_of(DASHBOARDS[name])]) == []


def test_every_series_that_alerts_read_and_every_recorded_one_has_data(prometheus: Prometheus) -> None:
    records = {rule["record"] for rule in rules() if "record" in rule}
    read = {text for rule in rules() if "alert" in rule for text in selectors_of(rule["expr"])}
    assert len(read) > len(records)
    assert queries_without_data(prometheus, sorted(records | read)) == []


def test_prometheus_evaluates_every_rule_without_an_error(prometheus: Prometheus) -> None:
    names = {rule.get("record") or rule["alert"] for rule in rules()}
    until(lambda: prometheus.rule_health() == dict.fromkeys(names, "ok"))


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_variables_of_a_dashboard_have_values(prometheus: Prometheus, name: str) -> None:
    queries = [variable["query"] for variable in DASHBOARDS[name]["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) == 4
    for query in queries:
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()
        assert prometheus.label_values(label, with_variables(selector))


def test_the_cancelled_request_and_the_killed_draft_are_seen(prometheus: Prometheus) -> None:
    until(lambda: bool(prometheus.query('specdec:request_cancellations_total{cause="client_left"} > 0')))
    until(lambda: bool(prometheus.query('changes(process_start_time_seconds{job="specdec-draft"}[10m]) == 1')))
