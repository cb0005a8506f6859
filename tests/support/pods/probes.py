"""Ask containers what their probes ask, with the periods, time limits and thresholds of the manifests."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k8s.validation.documents import Body

from .http import ask, trusting_anyone
from .programs import ProgramFailed

#: Runs a command in a container within a number of seconds. Raises ProgramFailed.
Execute = Callable[[list[str], float], object]
_DEFAULTS = {"periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 3, "successThreshold": 1}


@dataclass
class Probe:
    """One probe of one container and the results that follow on each other."""

    ask: Callable[[], bool]
    period_s: float
    failure_threshold: int
    success_threshold: int
    _due: float = field(default_factory=time.monotonic)
    _num_passed: int = 0
    _num_failed: int = 0

    def poll(self) -> bool | None:
        """Ask if it is time to; return True or False once a threshold is reached, None otherwise."""
        if time.monotonic() < self._due:
            return None
        self._due = time.monotonic() + self.period_s
        if self.ask():
            self._num_passed, self._num_failed = self._num_passed + 1, 0
            return True if self._num_passed >= self.success_threshold else None
        self._num_passed, self._num_failed = 0, self._num_failed + 1
        return False if self._num_failed >= self.failure_threshold else None


def probe_of(body: Body | None, address: str, execute: Execute, ports: dict[str, int]) -> Probe | None:
    """Return a probe as a manifest describes it; None where there is none. `ports`: number of each named port."""
    if not body:
        return None
    numbers = _DEFAULTS | body
    return Probe(
        _question(body, address, execute, ports, numbers["timeoutSeconds"]),
        numbers["periodSeconds"],
        numbers["failureThreshold"],
        numbers["successThreshold"],
    )


def _question(
    body: Body, address: str, execute: Execute, ports: dict[str, int], timeout_s: float
) -> Callable[[], bool]:
    match body:
        case {"grpc": {"port": port, **rest}}:
            return lambda: _answers_serving(f"{address}:{port}", str(rest.get("service", "")), timeout_s)
        case {"httpGet": {"path": path, "port": port, **rest}}:
            tls = trusting_anyone() if rest.get("scheme") == "HTTPS" else None
            return lambda: _answers_ok(address, ports[port], path, tls, timeout_s)
        case {"exec": {"command": command}}:
            return lambda: _ends_well(execute, command, timeout_s)
    raise ValueError(f"probes of the kind {sorted(body)} are not made here")


def _answers_serving(target: str, service: str, timeout_s: float) -> bool:
    # In plaintext and without a proxy, as the kubelet asks.
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _answers_ok(address: str, port: int, path: str, tls: ssl.SSLContext | None, timeout_s: float) -> bool:
    try:
        status, _ = ask(address, port, path, tls=tls, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException):
        return False
    return status == HTTPStatus.OK


def _ends_well(execute: Execute, command: list[str], timeout_s: float) -> bool:
    try:
        execute(command, timeout_s)
    except ProgramFailed:
        return False
    return True
