"""Services under the probes of a kubelet while Redis or the only target is late: none is restarted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.systems.simulated import write_tokenizer
from specdec.rpc.health import LIVENESS
from tests.support.redis_fixture import RedisServer
from tests.support.stack import free_port, is_ready

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
    """A process that a thread watches until `end` as the kubelet watches containers.

    A startup probe comes first, then a liveness probe. No process is started again: `num_restarts` counts when the
    kubelet would have done it.
    """

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


ROOT = Path(__file__).resolve().parents[2]
MODEL = "simulated:8b-0.6b"


class Pods:
    """Processes under probes."""

    def __init__(self, redis_url: str, tokenizer: Path, ending: contextlib.ExitStack) -> None:
        self._redis_url, self._tokenizer, self._ending = redis_url, tokenizer, ending
        self.containers: dict[str, Container] = {}

    def start_replica(self, role: str) -> Container:
        return self._start(role, f"{role}_service", "--model", MODEL, *self._grpc_flags())

    def start_coordinator(self, **probes: float) -> Container:
        return self._start("coordinator", "coordinator", "--tokenizer", str(self._tokenizer), *self._grpc_flags(),
                           **probes)  # fmt: skip

    def start_gateway(self) -> Container:
        return self._start("gateway", "gateway", "--listen", f"127.0.0.1:{free_port()}", probe=http_probe)

    def _grpc_flags(self) -> list[str]:
        return ["--listen", "127.0.0.1:0", "--health", f"127.0.0.1:{free_port()}"]

    def _start(self, name: str, service: str, *flags: str, **probes: object) -> Container:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
        command = [sys.executable, "-m", service, "--redis-url", self._redis_url, "--log-level", "error", *flags]
        process = self._ending.enter_context(subprocess.Popen(command, cwd=ROOT, env=environ, text=True))
        self._ending.callback(process.kill)
        container = Container(process, flags[-1], **probes)  # type: ignore[arg-type]
        self._ending.callback(container.end)
        self.containers[name] = container
        return container


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def pods(redis_process: RedisServer, tmp_path: Path) -> Iterator[Pods]:
    with contextlib.ExitStack() as ending:
        yield Pods(redis_process.url, write_tokenizer(tmp_path), ending)


def until(condition: Callable[[], bool], container: Container) -> None:
    while not condition():
        assert container.num_restarts == 0
        time.sleep(0.1)


@pytest.mark.parametrize("late_s", [6.0, pytest.param(30.0, marks=pytest.mark.full)])
def test_no_service_is_restarted_while_redis_is_late(redis_process: RedisServer, pods: Pods, late_s: float) -> None:
    pods.start_replica("target")
    pods.start_replica("draft")
    pods.start_coordinator()
    gateway = pods.start_gateway()
    time.sleep(late_s)
    redis_process.start()
    until(lambda: is_ready(gateway.address), gateway)
    until(lambda: grpc_probe(pods.containers["draft"].address, ""), pods.containers["draft"])
    assert {name: each.num_restarts for name, each in pods.containers.items()} == dict.fromkeys(pods.containers, 0)


def test_no_coordinator_is_restarted_while_the_only_target_loads(redis_process: RedisServer, pods: Pods) -> None:
    """As many probes as 15 minutes have at the manifests' interval of 10 s."""
    redis_process.start()
    coordinator = pods.start_coordinator(period_s=0.05, startup_threshold=600)
    until(lambda: coordinator.num_probes >= 90, coordinator)
    assert not grpc_probe(coordinator.address, "")  # alive and not ready
    pods.start_replica("target")
    until(lambda: grpc_probe(coordinator.address, ""), coordinator)
    assert coordinator.num_restarts == 0
