"""A service that listens on [::] is reached over IPv4 and IPv6 at each of its ports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from specdec.supervision.processes import free_ports
from tests.support.process_template import ENVIRON
from tests.support.stack import START_TIMEOUT_S, is_serving

GRPC, HEALTH, METRICS = "grpc", "health", "metrics"
START_S = 120.0


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """Ports of a running target service."""
    ports = dict(zip((GRPC, HEALTH, METRICS), free_ports(3), strict=True))
    flags = {"listen": ports[GRPC], "health": ports[HEALTH], "metrics": ports[METRICS]}
    command = [sys.executable, "-m", "target_service", "--model", "simulated:8b-0.6b", "--redis-url", "memory://"]
    command += ["--insecure", *(f"--{flag}=[::]:{port}" for flag, port in flags.items())]
    with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + START_S
        while not is_serving(f"127.0.0.1:{ports[HEALTH]}") and time.monotonic() < deadline_s:
            time.sleep(0.1)
        yield ports
        process.kill()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
@pytest.mark.parametrize("port", [GRPC, HEALTH])
def test_health_answers_over_both_families(ports: dict[str, int], port: str, host: str) -> None:
    assert is_serving(f"{host}:{ports[port]}", timeout_s=START_TIMEOUT_S)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_metrics_are_read_over_both_families(ports: dict[str, int], host: str) -> None:
    connection = HTTPConnection(host, ports[METRICS], timeout=10.0)
    connection.request("GET", "/metrics")
    assert connection.getresponse().status == 200
    connection.close()
