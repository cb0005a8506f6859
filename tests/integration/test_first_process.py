"""Services as the first process of a container: they end on SIGTERM while they load, and probes find a hung one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.rpc.health import LIVENESS
from tests.support.freezing import frozen
from tests.support.stack import free_port
from tests.support.tiny_models import build_tiny_model

ROOT = Path(__file__).resolve().parents[2]
NEW_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]
#: The wanted second, times the load under which tests may run.
END_S = 5.0
SERVICES = ["draft_service", "target_service", "coordinator"]


def _can_unshare() -> bool:
    try:
        return subprocess.run([*NEW_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(not _can_unshare(), reason="this user may not make process namespaces")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("model"), num_layers=1)


def flags(service: str, model: Path, health: str) -> list[str]:
    common = ["--listen", "127.0.0.1:0", "--health", health]
    if service == "coordinator":
        return [*common, "--tokenizer", str(model), "--redis-url", "redis://127.0.0.1:1", "--store-wait-s", "600"]
    return [*common, "--model", str(model), "--redis-url", "memory://", "--num-threads", "1"]


@contextlib.contextmanager
def first_process(service: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A service as process 1 of a namespace: the process outside, whose exit code is the same, and the service's id."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*NEW_NAMESPACE, sys.executable, "-m", service, *arguments]
    outside = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
    try:
        while not (inside := children.read_text().split()):
            assert outside.poll() is None
            time.sleep(0.01)
        yield outside, int(inside[0])
    finally:
        for pid in children.read_text().split() if outside.poll() is None else ():
            os.kill(int(pid), signal.SIGKILL)
        outside.communicate()


def liveness(address: str, timeout_s: float = 5.0) -> str:
    """Ask as the kubelet does; return the status, or the name of the error."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=LIVENESS)
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def wait_alive(address: str, process: subprocess.Popen[str]) -> None:
    while liveness(address) != "SERVING":
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.05)


def handles_sigterm(pid: int) -> bool:
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:\t")[2].split()[0]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def wait_stopped(pid: int) -> None:
    """Wait until every thread of a process that got SIGSTOP stands still."""
    tasks = Path(f"/proc/{pid}/task")
    while any("State:\tT" not in (task / "status").read_text() for task in tasks.iterdir()):
        time.sleep(0.01)


@needs_namespaces
@pytest.mark.parametrize("delay_s", [0.0, 0.5, pytest.param(1.5, marks=pytest.mark.full)])
@pytest.mark.parametrize("service", SERVICES)
def test_a_first_process_that_loads_lives_and_ends_on_sigterm(service: str, delay_s: float, model: Path) -> None:
    health = f"127.0.0.1:{free_port()}"
    with first_process(service, *flags(service, model, health)) as (outside, inside):
        wait_alive(health, outside)
        time.sleep(delay_s)  # further into the imports and the load
        began_s = time.monotonic()
        os.kill(inside, signal.SIGTERM)
        outside.wait(60.0)
        took_s = time.monotonic() - began_s
    print(f"{service} after {delay_s} s: {took_s * 1000:.0f} ms")
    assert took_s < END_S
    assert outside.returncode in (0, 128 + signal.SIGTERM)


@needs_namespaces
@pytest.mark.parametrize("service", [*SERVICES, "gateway"])
def test_a_first_process_that_imports_ends_on_sigterm(service: str) -> None:
    with first_process(service, "--help") as (outside, inside):
        while not handles_sigterm(inside):
            assert outside.poll() is None
            time.sleep(0.001)
        os.kill(inside, signal.SIGTERM)
        outside.wait(60.0)
    assert outside.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("service", SERVICES)
def test_a_stopped_process_answers_no_probe_and_lives_again_afterwards(service: str, model: Path) -> None:
    health = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", service, *flags(service, model, health)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_alive(health, process)
            with frozen(process.pid):
                wait_stopped(process.pid)
                assert [liveness(health, timeout_s=0.5) for _ in range(3)] == ["DEADLINE_EXCEEDED"] * 3
            assert liveness(health, timeout_s=60.0) == "SERVING"
        finally:
            process.kill()
            process.communicate()
