"""Watches processes as the kubelet watches containers: a startup probe, then a liveness probe, and restarts.

No process is started again: `num_restarts` counts when the kubelet would have done it.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.rpc.health import LIVENESS

Probe = Callable[[str], bool]


def grpc_probe(address: str, service: str = LIVENESS) -> bool:
    """Return whether the health service answers SERVING for a name within a probe's time."""
    with grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5.0)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def http_probe(address: str) -> bool:
    """Return whether `/health` answers with status 200."""
    connection = HTTPConnection(address, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


@dataclass
class Container:
    """A process under probes, watched by a thread until `end`."""

    process: subprocess.Popen[str]
    address: str
    probe: Probe = grpc_probe
    period_s: float = 1.0
    startup_threshold: int = 30
    liveness_threshold: int = 3
    num_restarts: int = 0
    num_probes: int = 0
    """Number of liveness probes that passed."""
    has_started: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kubelet", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        num_failed = 0
        while not self._ended.wait(self.period_s):
            if self.process.poll() is not None:
                self.num_restarts += 1
                return
            if self.probe(self.address):
                num_failed = 0
                self.num_probes += self.has_started.is_set()
                self.has_started.set()
                continue
            num_failed += 1
            if num_failed >= (self.liveness_threshold if self.has_started.is_set() else self.startup_threshold):
                self.num_restarts += 1
                return
