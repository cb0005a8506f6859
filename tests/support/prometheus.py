"""Debian's Prometheus and promtool: where they are, and the rule files that ship with specdec."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.stack import free_port

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
NO_PROMETHEUS = "needs the programs prometheus and promtool on the PATH (`make prometheus`)"
FOLDER = Path(__file__).resolve().parents[2] / "monitoring" / "prometheus"
#: Labels that the operator, or the configuration of a fleet, gives to the series of a system.
SYSTEM_LABELS = {"cluster": "here", "namespace": "specdec"}
RULE_FILES = (FOLDER / "recording.rules.yml", FOLDER / "alerts.rules.yml")
_SELECTOR = re.compile(r"\b(?:up|process_\w+|specdec:[\w:]+)(?:\{[^}]*\})?")


def rules() -> list[dict[str, Any]]:
    """Return all recording and alert rules, in the order of the files."""
    files = [yaml.safe_load(path.read_text()) for path in RULE_FILES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def selectors_of(expression: str) -> list[str]:
    """Return the selectors of the series of services and of records that an expression reads."""
    return _SELECTOR.findall(expression)


def queries_of(dashboard: Mapping[str, Any]) -> list[str]:
    """Return the expressions of a dashboard's panels."""
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def with_variables(expression: str) -> str:
    """Return the expression of a panel as Grafana sends it, with all values of each variable."""
    return re.sub(r"\$(cluster|namespace|model_name|pool)", ".*", expression.replace("$__rate_interval", "1m"))


class Prometheus:
    """A running Prometheus, asked over its HTTP API."""

    def __init__(self, address: str) -> None:
        self.address = address

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query; an expression that Prometheus refuses raises HTTPError."""
        return self._get("query", query=expression)["result"]

    def label_values(self, label: str, selector: str) -> list[str]:
        """Return the values of a label among the series of a selector."""
        return self._get(f"label/{label}/values", **{"match[]": selector})

    def rule_health(self) -> dict[str, str]:
        """Return the health of each rule by its name: unknown before the first evaluation, then ok or err."""
        groups = self._get("rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return json.load(response)["data"]


@contextmanager
def scraping(directory: Path, targets: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """Run Prometheus with the shipped rules. `targets`: addresses with metrics, by job."""
    assert PROMETHEUS is not None
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(path) for path in RULE_FILES],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(addresses), "labels": SYSTEM_LABELS}]}
            for job, addresses in targets.items()
        ],
    }
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [PROMETHEUS, f"--config.file={path}", f"--storage.tsdb.path={directory / 'tsdb'}",
             f"--web.listen-address={address}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield Prometheus(address)
    finally:
        process.terminate()
        process.wait()
