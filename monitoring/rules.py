"""The rules of `prometheus/` as objects for the Prometheus operator, and the address of their runbooks."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[1]
RULES = Path(__file__).with_name("prometheus")
MANIFESTS = _ROOT / "k8s" / "components" / "monitoring"
ALERTS = "alerts.rules.yml"
#: Name of the object and name of its file in `MANIFESTS`, by the file with the rules.
_OBJECTS = {
    "recording.rules.yml": ("specdec-records", "recording-rules.yaml"),
    ALERTS: ("specdec-alerts", "alert-rules.yaml"),
}
_HEAD = """\
# Written by `make dashboards` from monitoring/prometheus/{file}.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {name}
spec:
"""
_RUNBOOK = re.compile(r"(?<=runbook_url: )\S+(?=/how-to/runbooks\.html#)")


def written_objects() -> dict[str, str]:
    """Return the text of each object's file by the name of the file."""
    return {target: _object(file, name) for file, (name, target) in _OBJECTS.items()}


def set_docs_address(address: str) -> None:
    """Let the alerts link to runbooks below an address.

    Args:
        address: where the documentation is served, such as https://docs.mycompany.com/specdec.

    Raises:
        ValueError: the address has no scheme, or a character that would end it.
    """
    if not re.fullmatch(r"https?://[^\s#?\"'{}]+", address):
        raise ValueError(f"--docs: must be an http or https address without spaces, quotes and #, got {address!r}")
    path = RULES / ALERTS
    path.write_text(_RUNBOOK.sub(lambda _: address.rstrip("/"), path.read_text()))


def _object(file: str, name: str) -> str:
    lines = (RULES / file).read_text().splitlines()
    begin = lines.index("groups:")
    indented = (f"  {line}" if line else "" for line in lines[begin:])
    return _HEAD.format(file=file, name=name) + "\n".join(indented) + "\n"
