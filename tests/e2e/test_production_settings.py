"""The overlay `production` as processes of this machine, with the variables, secrets and flags that its pods get.

Only addresses differ: everything is on loopback, at free ports. `tests/pods/test_production.py` has the containers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specdec.supervision.processes import free_ports
from tests.support.pods.http import ask
from tests.support.pods.workloads import Workload, read
from tests.support.tutorial import make_files
from tests.unit.deployment.test_k8s_validate import KUBECTL

ROOT = Path(__file__).resolve().parents[2]
OTHER_KEY = "globex-key-of-the-second-tenant"
NUM_TOKENS = 16
START_S = 300.0
#: Settings with ports of the pod, in place of which defaults are free ports or none.
_PORTS = ("HEALTH", "METRICS", "ADMIN")

pytestmark = [
    pytest.mark.skipif(KUBECTL is None, reason="no kubectl: `make k8s-tools` installs it"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]


@dataclass(frozen=True)
class Production:
    """The processes' files and addresses."""

    files: Path
    redis_port: int
    gateway_port: int

    def complete(self, key: str) -> tuple[int, dict[str, Any]]:
        """Return status and body of the gateway's answer to a completion."""
        tls = ssl.create_default_context(cafile=self.files / "ca.crt")
        body = {"model": "specdec", "prompt": "def main():", "max_tokens": NUM_TOKENS, "temperature": 0}
        status, text = ask("127.0.0.1", self.gateway_port, "/v1/completions", tls=tls, body=body, key=key)
        return status, json.loads(text)

    def redis(self, *words: str, password: str = "") -> str:
        command = ["redis-cli", "-p", str(self.redis_port), *words]
        environ = {"PATH": os.environ["PATH"], **({"REDISCLI_AUTH": password} if password else {})}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environ).stdout.strip()


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    files = tmp_path_factory.mktemp("production")
    make_files(files)
    with (files / "keys.txt").open("a") as keys:
        keys.write(f"{hashlib.sha256(OTHER_KEY.encode()).hexdigest()} globex generate\n")
    for file in files.iterdir():
        file.chmod(0o600)
    names = {"specdec-redis": ("password", "url")}
    secrets = {name: {key: (files / key).read_text() for key in keys} for name, keys in names.items()}
    workloads = {one.name: one for one in read("k8s/overlays/production", secrets)}
    redis_port, gateway_port = free_ports(2)
    started = Production(files, redis_port, gateway_port)
    with contextlib.ExitStack() as stack:
        stack.enter_context(process(redis_flags(workloads["redis"], started), {}, files))
        for name, module in (
            ("target", "target_service"),
            ("draft", "draft_service"),
            ("coordinator", "coordinator"),
            ("gateway", "gateway"),
        ):
            command = [sys.executable, "-m", module]
            stack.enter_context(process(command, variables(workloads[name], started), files))
        wait_until_ready(started)
        yield started


def here(text: str, production: Production) -> str:
    """Return a value with the paths of the container, and the address of Redis, as they are on this machine."""
    for path, folder in (("/tls", production.files), ("/keys", production.files), ("/app/models", ROOT / "models")):
        text = text.replace(f"{path}/", f"{folder}/")
    # The certificate has the name of the Service, which does not resolve here.
    return text.replace("@redis:6379/0?", f"@127.0.0.1:{production.redis_port}/0?ssl_check_hostname=false&")


def redis_flags(workload: Workload, production: Production) -> list[str]:
    password = (production.files / "password").read_text()
    words = [here(word, production) for word in workload.container["args"]]
    words[words.index("--tls-port") + 1] = str(production.redis_port)
    return [word.replace("$(REDISCLI_AUTH)", password) for word in words]


def variables(workload: Workload, production: Production) -> dict[str, str]:
    prefix = f"SPECDEC_{workload.name.upper()}__"
    given = workload.variables(workload.container, workload.name, "127.0.0.1")
    values = {name: here(value, production) for name, value in given.items() if name.startswith(prefix)}
    for name in _PORTS:
        values.pop(prefix + name, None)
    port = production.gateway_port if workload.name == "gateway" else 0
    if f"{prefix}NUM_THREADS" in values:
        values[f"{prefix}NUM_THREADS"] = "1"
    return values | {f"{prefix}LISTEN": f"127.0.0.1:{port}"}


@contextlib.contextmanager
def process(command: list[str], environ: dict[str, str], folder: Path) -> Iterator[None]:
    """Run a process, whose log goes to this one's, and end it."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    paths = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=folder, env=plain | paths | environ) as running:
        try:
            yield
        finally:
            running.terminate()


def wait_until_ready(production: Production) -> None:
    tls = ssl.create_default_context(cafile=production.files / "ca.crt")
    end = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError):
            if ask("127.0.0.1", production.gateway_port, "/ready", tls=tls, timeout_s=5)[0] == 200:
                return
        assert time.monotonic() < end, "the gateway is not ready"
        time.sleep(0.5)


def test_both_tenants_get_the_same_answer(production: Production) -> None:
    keys = ((production.files / "acme.key").read_text(), OTHER_KEY)
    answers = [production.complete(key) for key in keys]
    assert [status for status, _ in answers] == [200, 200]
    bodies = [body for _, body in answers]
    assert {body["model"] for body in bodies} == {"specdec"}
    assert {body["usage"]["completion_tokens"] for body in bodies} == {NUM_TOKENS}
    assert len({body["choices"][0]["text"] for body in bodies}) == 1


@pytest.mark.parametrize("key", ["", "an-unknown-key"])
def test_a_request_without_a_known_key_is_refused(key: str, production: Production) -> None:
    assert production.complete(key)[0] == 401


def test_redis_asks_for_tls_and_its_password(production: Production) -> None:
    tls = ("--tls", "--cacert", str(production.files / "ca.crt"))
    password = (production.files / "password").read_text()
    assert production.redis(*tls, "ping", password=password) == "PONG"
    assert production.redis(*tls, "ping").startswith("NOAUTH")
    assert production.redis("ping", password=password) != "PONG"
