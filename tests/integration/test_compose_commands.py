"""The compose file's own commands, environment and health checks, as local processes: no Docker needed.

Only what a container gives is replaced: host names become loopback, fixed ports become free ones, paths inside the
image become the repository's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.client import Client
from tests.support.stack import free_port

ROOT = Path(__file__).resolve().parents[2]


class LocalCompose:
    """Starts a compose file's services in the order of `depends_on`."""

    def __init__(self, text: str, directory: Path, stack: contextlib.ExitStack) -> None:
        services: dict[str, Any] = yaml.safe_load(text)["services"]
        self._services = {name: service for name, service in services.items() if "profiles" not in service}
        self._directory = directory
        self._stack = stack
        self._ports: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        while waiting := [name for name in self._services if name not in self.processes]:
            healthy = set(self.processes)
            startable = [name for name in waiting if healthy.issuperset(self._services[name].get("depends_on", {}))]
            for name in startable:
                self._start(name)
            for name in startable:
                self._wait_until_healthy(name)

    def endpoint(self, name: str) -> str:
        """Return where a service's published port is served."""
        (published,) = self._services[name]["ports"]
        return f"127.0.0.1:{self._port(published.rpartition(':')[2])}"

    def _start(self, name: str) -> None:
        service = self._services[name]
        command = [self._local(part) for part in service["command"]]
        if name == "redis":
            command += ["--bind", "127.0.0.1", "--port", str(self._port("6379")), "--dir", str(self._directory)]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("SPECDEC_")}
        environ |= {key: self._local(value) for key, value in service.get("environment", {}).items()}
        environ |= {"HF_HOME": str(self._directory), "OMP_NUM_THREADS": "1"}
        log = self._stack.enter_context((self._directory / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        self.processes[name] = process
        self._stack.callback(process.kill)

    def _wait_until_healthy(self, name: str) -> None:
        process, service = self.processes[name], self._services[name]
        check = [self._local(part) for part in service["healthcheck"]["test"][1:]]
        if name == "redis":
            check[1:1] = ["-p", str(self._port("6379"))]
        while subprocess.run(check, capture_output=True).returncode != 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)  # the interval between two checks, cut short when there is nothing left to check
                pytest.fail(f"{name} ended: {(self._directory / f'{name}.log').read_text()}")

    def _local(self, text: str) -> str:
        if text in ("python", "specdec"):
            return sys.executable if text == "python" else str(Path(sys.executable).with_name("specdec"))
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("/app/models", str(ROOT / "models"))
        return re.sub(
            r"\b(0\.0\.0\.0|127\.0\.0\.1|redis):(\d+)\b", lambda found: f"127.0.0.1:{self._port(found[2])}", text
        )

    def _port(self, number: str) -> int:
        if number not in self._ports:
            self._ports[number] = free_port()
        return self._ports[number]


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[LocalCompose]:
    with contextlib.ExitStack() as stack:
        local = LocalCompose((ROOT / "docker-compose.yml").read_text(), tmp_path, stack)
        local.up()
        yield local


def test_the_compose_file_serves_speculative_generation_and_stops_in_order(compose: LocalCompose) -> None:
    with Client(compose.endpoint("coordinator")) as client:
        completion = client.generate("import os\n", temperature=0, max_new_tokens=24)
        roles = {pool.role: len(pool.replicas) for pool in client.info().pools}
    assert roles == {"draft": 1, "target": 1}
    assert completion.usage.num_output_tokens == 24
    assert completion.stats.num_accepted_tokens > 0
    body = json.dumps({"prompt": "import os\n", "temperature": 0, "max_tokens": 24})
    connection = HTTPConnection(compose.endpoint("gateway"))
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert json.load(connection.getresponse())["choices"][0]["text"] == completion.text
    for name in ("gateway", "coordinator", "draft", "target", "redis"):
        compose.processes[name].send_signal(signal.SIGTERM)
        assert compose.processes[name].wait(30) == 0, name
