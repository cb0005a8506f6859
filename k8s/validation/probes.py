"""Probes: each asks what it is for, at the port that answers, and waits as long as a process takes.

tests/integration/test_asked_manifests.py asks every probe of a running service.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .container_settings import Configured
from .documents import Body, Container, Document, Problem, at
from .redis_servers import is_redis

#: Name under which the port of `health` tells that the process lives; the empty name tells that it takes calls.
LIVENESS = "liveness"
#: What each probe of our services asks. A process that loads, drains or waits lives, and must not be restarted.
_GRPC_NAMES = {"startupProbe": LIVENESS, "readinessProbe": "", "livenessProbe": LIVENESS}
_HTTP_PATHS = {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}
PROBES = tuple(_GRPC_NAMES)

#: Shortest time for the first answer of a process: it imports its libraries on a node where others start too.
_START_S = 60.0
#: Shortest and longest time from the first failure of a probe to its effect. A liveness probe that acts earlier
#: restarts a process that a full machine holds up; the event loop alone may pause for 10 s.
_WINDOWS_S = {"readinessProbe": (10.0, 60.0), "livenessProbe": (30.0, 300.0)}
_DEFAULTS = {
    "initialDelaySeconds": 0, "periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 3, "successThreshold": 1,
}  # fmt: skip
#: Time in which a rollout must make progress, by Kubernetes's default.
_PROGRESS_S = 600


def balancer_problems(documents: list[Document]) -> Iterator[Problem]:
    """Yield health checks of load balancers that ask what no gateway answers."""
    for document in documents:
        for field, path in _checked_paths(document.spec, "spec"):
            if path not in _HTTP_PATHS.values():
                yield document.problem(field, f"must be {_HTTP_PATHS['readinessProbe']}, not {path}")


def _checked_paths(node: Any, field: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items() if isinstance(node, dict) else ():
        if key in ("requestPath", "healthCheckPath"):
            yield f"{field}.{key}", value
        yield from _checked_paths(value, f"{field}.{key}")


def probe_problems(containers: list[Container], configured: list[Configured]) -> Iterator[Problem]:
    """Yield probes that ask the wrong thing, or that give a process too little or too much time."""
    for one in configured:
        yield from _questions(one)
    for container in containers:
        for probe in PROBES:
            if body := container.body.get(probe):
                yield from _times(container, probe, body)
        yield from _progress(container)
        if is_redis(container):
            yield from _redis(container)


def _questions(one: Configured) -> Iterator[Problem]:
    for probe in PROBES:
        body = one.variables.container.body.get(probe) or {}
        if "grpc" in body:
            yield from _grpc(one, probe, body["grpc"])
        elif "httpGet" in body:
            yield from _http(one, probe, body["httpGet"])
        elif "tcpSocket" in body:
            message = "an open port does not tell that the process works: ask its health by grpc or httpGet"
            yield one.variables.container.problem(f"{probe}.tcpSocket", message)


def _grpc(one: Configured, probe: str, body: Body) -> Iterator[Problem]:
    container = one.variables.container
    port = _port_of(getattr(one.settings, "health", ""))
    if str(body.get("port")) != port:
        serves = f"use {port}" if port else f"set {one.service.prefix}HEALTH"
        yield container.problem(f"{probe}.grpc.port", f"{body.get('port')} does not serve plaintext health; {serves}")
    wanted, name = _GRPC_NAMES[probe], str(body.get("service") or "")
    if name != wanted:
        words = f'must be "{wanted}"' if wanted else 'must be unset or ""'
        yield container.problem(f"{probe}.grpc.service", f'{words}, not "{name}": {_REASONS[probe]}')


def _http(one: Configured, probe: str, body: Body) -> Iterator[Problem]:
    container, wanted = one.variables.container, _HTTP_PATHS[probe]
    if one.service.name != "gateway":
        yield container.problem(f"{probe}.httpGet", f"the {one.service.name} answers no HTTP: use grpc")
        return
    if body.get("path") != wanted:
        yield container.problem(f"{probe}.httpGet.path", f"must be {wanted}, not {body.get('path')}: {_REASONS[probe]}")
    port, listen = body.get("port"), _port_of(one.settings.listen)
    if str(container.ports.get(str(port), port)) != listen:
        yield container.problem(f"{probe}.httpGet.port", f"{port} is not the port of LISTEN; use {listen}")
    scheme = "HTTPS" if one.settings.tls_cert else "HTTP"
    if str(body.get("scheme") or "HTTP").upper() != scheme:
        yield container.problem(f"{probe}.httpGet.scheme", f"must be {scheme}, which the port of LISTEN speaks")


_REASONS = {
    "startupProbe": "the process lives before it has loaded its model",
    "readinessProbe": "it must tell whether calls are taken",
    "livenessProbe": "a process that loads or drains lives, and must not be restarted",
}


def _times(container: Container, probe: str, body: Body) -> Iterator[Problem]:
    numbers = _DEFAULTS | body
    window_s = numbers["periodSeconds"] * numbers["failureThreshold"]
    words = f"failureThreshold {numbers['failureThreshold']} x periodSeconds {numbers['periodSeconds']}"
    if probe == "startupProbe":
        if numbers["initialDelaySeconds"] + window_s < _START_S:
            message = f"{words} gives a start {window_s} s; give at least {_START_S:g} s"
            yield container.problem(f"{probe}.failureThreshold", message)
    else:
        least_s, most_s = _WINDOWS_S[probe]
        if not least_s <= window_s <= most_s:
            message = f"{words} acts after {window_s} s; it must be {least_s:g} to {most_s:g} s"
            field = "periodSeconds" if window_s > most_s else "failureThreshold"
            yield container.problem(f"{probe}.{field}", message)
        if numbers["initialDelaySeconds"] > most_s:
            message = f"{numbers['initialDelaySeconds']} s without a probe; use a startupProbe instead"
            yield container.problem(f"{probe}.initialDelaySeconds", message)
    if numbers["timeoutSeconds"] > numbers["periodSeconds"]:
        message = f"{numbers['timeoutSeconds']} exceeds periodSeconds, which is {numbers['periodSeconds']}"
        yield container.problem(f"{probe}.timeoutSeconds", message)
    yield from _refused(container, probe, numbers)


def _refused(container: Container, probe: str, numbers: dict[str, Any]) -> Iterator[Problem]:
    """Yield what the API server refuses beyond the schema, and an end that outlasts the pod's."""
    if probe != "readinessProbe" and numbers["successThreshold"] != 1:
        yield container.problem(f"{probe}.successThreshold", f"must be 1, not {numbers['successThreshold']}")
    grace_s = numbers.get("terminationGracePeriodSeconds")
    pod_grace_s = container.template.spec.get("terminationGracePeriodSeconds", 30)
    if grace_s is not None and (probe == "readinessProbe" or grace_s > pod_grace_s):
        message = "a failed readiness probe ends nothing: remove it"
        if probe != "readinessProbe":
            message = f"{grace_s} exceeds the pod's terminationGracePeriodSeconds, which is {pod_grace_s}"
        yield container.problem(f"{probe}.terminationGracePeriodSeconds", message)


def _progress(container: Container) -> Iterator[Problem]:
    document, probe = container.template.document, container.body.get("startupProbe")
    if document.kind != "Deployment" or not probe:
        return
    numbers = _DEFAULTS | probe
    start_s = numbers["initialDelaySeconds"] + numbers["periodSeconds"] * numbers["failureThreshold"]
    progress_s = document.spec.get("progressDeadlineSeconds", _PROGRESS_S)
    if progress_s <= start_s:
        message = f"{progress_s} s ends before the startupProbe of {container.name}, which waits {start_s} s: give more"
        yield document.problem("spec.progressDeadlineSeconds", message)


def _redis(container: Container) -> Iterator[Problem]:
    for probe in PROBES:
        words = at(container.body, probe, "exec", "command")
        if words is None:
            continue
        if not any("redis-cli" in str(word) for word in words):
            yield container.problem(f"{probe}.exec.command", f"{words[0]} does not ask Redis: use redis-cli ping")
        elif words[0] == "redis-cli" and str(words[-1]).lower() != "ping":
            yield container.problem(f"{probe}.exec.command", f"must end with ping, not {words[-1]}")
        port = words[words.index("-p") + 1] if "-p" in words[:-1] else None
        if port is not None and int(port) not in container.ports.values():
            message = f"the container has no port {port}: use {', '.join(map(str, container.ports.values()))}"
            yield container.problem(f"{probe}.exec.command", message)


def _port_of(address: str) -> str:
    return address.rpartition(":")[2]
