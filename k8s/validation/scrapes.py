"""Scrapes against the ports that serve metrics: annotations of pods, and PodMonitors with what they select."""

from __future__ import annotations

from collections.abc import Iterator

from .container_settings import Configured
from .documents import Document, Problem, at, of_kind
from .selectors import selector_of, selects

_PATH = "/metrics"
_ANNOTATION = "prometheus.io"


def scrape_problems(configured: list[Configured], documents: list[Document]) -> Iterator[Problem]:
    """Yield scrapes of ports and paths without metrics, and services that no PodMonitor scrapes."""
    for one in configured:
        yield from _annotations(one)
    monitors = of_kind(documents, "PodMonitor")
    for one in configured:
        port, labels = _metrics_port(one), one.variables.container.template.labels
        selecting = [monitor for monitor in monitors if selects(selector_of(monitor)[1] or {}, labels)]
        for monitor in selecting:
            yield from _endpoints(monitor, one, port)
        has_own_port = bool(getattr(one.settings, "metrics", ""))
        if monitors and not selecting and has_own_port:
            title = one.variables.container.template.document.title
            message = f"selects no pod of {title}, which serves metrics at {port}: add its labels"
            yield monitors[0].problem("spec.selector", message)


def _metrics_port(one: Configured) -> str:
    """Return the port that serves metrics; "" for none. The gateway serves them at the port of its clients, too."""
    address = getattr(one.settings, "metrics", "") or (one.settings.listen if one.service.name == "gateway" else "")
    return str(address).rpartition(":")[2]


def _annotations(one: Configured) -> Iterator[Problem]:
    template, port = one.variables.container.template, _metrics_port(one)
    path = template.path.replace(".spec", "") or "metadata"
    annotations = at(template.body, "metadata", "annotations") or {}
    where = f"{path}.metadata.annotations"
    if str(annotations.get(f"{_ANNOTATION}/scrape", "false")) != "true":
        return
    given = str(annotations.get(f"{_ANNOTATION}/port", ""))
    if given != port:
        remedy = f"use {port}" if port else f"set {one.service.prefix}METRICS"
        yield template.document.problem(
            f"{where}[{_ANNOTATION}/port]", f"{given or 'unset'} serves no metrics: {remedy}"
        )
    if annotations.get(f"{_ANNOTATION}/path", _PATH) != _PATH:
        yield template.document.problem(f"{where}[{_ANNOTATION}/path]", f"must be {_PATH}, where metrics are")


def _endpoints(monitor: Document, one: Configured, port: str) -> Iterator[Problem]:
    container = one.variables.container
    names = {str(number): name for name, number in container.ports.items()}
    for index, endpoint in enumerate(monitor.spec.get("podMetricsEndpoints") or ()):
        given = endpoint.get("port", endpoint.get("portNumber"))
        where = f"spec.podMetricsEndpoints[{index}]"
        if given in container.ports and str(container.ports[given]) != port:
            message = f"{given} of {container.template.document.title} serves no metrics: use {names.get(port, port)}"
            yield monitor.problem(f"{where}.port", message)
        if endpoint.get("path", _PATH) != _PATH:
            yield monitor.problem(f"{where}.path", f"must be {_PATH}, where metrics are")
        if str(endpoint.get("scheme", "http")).lower() != "http" and one.service.name != "gateway":
            yield monitor.problem(f"{where}.scheme", "must be http: the port of metrics speaks plaintext")
