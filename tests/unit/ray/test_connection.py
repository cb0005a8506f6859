"""A Ray cluster that cannot be had is told in one line, by the process that would place a replica there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

ray = pytest.importorskip("ray")


def place(address: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The process that places a target, asked to do so at an address."""
    command = [sys.executable, "-m", "specdec.service.ray.placed_replica", "--ray-address", address]
    command += ["--name", "target-0", "--role", "target", "--", "--model", "simulated:8b-0.6b"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, timeout=120)


def told(result: subprocess.CompletedProcess[str]) -> str:
    """Its error line, which is its last."""
    assert (result.returncode, result.stderr) == (1, "")
    *records, line = result.stdout.splitlines()
    assert all(record.startswith("{") for record in records)
    return line


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """In which no Ray is known."""
    return {"RAY_TMPDIR": str(tmp_path), "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": ""}


def test_an_address_without_a_listener_is_refused(environ: dict[str, str]) -> None:
    line = "error: --ray-address 127.0.0.1:1: no Ray cluster answers there (REPLICA_UNAVAILABLE)"
    assert told(place("127.0.0.1:1", **environ)) == line


def test_an_address_whose_listener_never_answers_is_refused(environ: dict[str, str]) -> None:
    with socket.create_server(("0.0.0.0", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert told(place(address, **environ)).startswith(f"error: --ray-address {address}: no Ray cluster answer")


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:x", "http://127.0.0.1:1"])
def test_a_malformed_address_is_refused(address: str, environ: dict[str, str]) -> None:
    line = told(place(address, **environ))
    assert line.startswith("error: --ray-address must be HOST:PORT")
    assert address in line


def test_a_missing_ray_is_one_line_with_the_command_that_installs_it(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no module named ray')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert told(place("127.0.0.1:1", **environ, PYTHONPATH=path)).startswith(
        'error: --ray-address needs the package ray: run pip install "specdec-serving[ray]" ('
    )


@pytest.fixture
def other_head() -> Iterator[tuple[str, dict[str, Any]]]:
    """The head of a cluster of another version, as much of it as is asked before a process joins; and its answer."""
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    answer: dict[str, Any] = {"ray_version": "2.1.0"}

    class Head(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
        def CheckAlive(self, request: Any, context: Any) -> Any:  # noqa: N802
            if "code" in answer:
                context.abort(answer["code"], "no")
            return gcs_service_pb2.CheckAliveReply(ray_version=answer["ray_version"])

    server = grpc.server(ThreadPoolExecutor(1))
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(Head(), server)
    port = server.add_insecure_port("0.0.0.0:0")
    server.start()
    yield f"127.0.0.1:{port}", answer
    server.stop(None)


def test_a_cluster_of_another_version_is_refused(
    other_head: tuple[str, dict[str, Any]], environ: dict[str, str]
) -> None:
    address, _ = other_head
    assert told(place(address, **environ)) == (
        f"error: --ray-address {address}: its Ray is 2.1.0, ours {ray.__version__} (UNSUPPORTED)"
    )


def test_a_cluster_that_wants_a_token(other_head: tuple[str, dict[str, Any]], environ: dict[str, str]) -> None:
    address, answer = other_head
    answer["code"] = grpc.StatusCode.UNAUTHENTICATED
    assert "the cluster requires a token (RAY_AUTH_TOKEN, or ~/.ray/auth_token)" in told(place(address, **environ))
