"""The overlay `production` as containers: keys of two tenants, TLS on every connection, a password for Redis."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec import AsyncClient, Tls
from specdec.contract.errors import SpecdecError
from tests.support.pods.http import ask
from tests.support.pods.kubectl import Kubectl, run_script
from tests.support.pods.pod import Pod
from tests.support.pods.programs import ROOT, ProgramFailed
from tests.support.tutorial import make_files

from .conftest import Deployed, started

OVERLAY = "k8s/overlays/production"
PROMPT, NUM_TOKENS = "def main():", 16
OTHER_KEY = "globex-key-of-the-second-tenant"
REDIS = ["redis-cli", "--tls", "--cacert", "/tls/ca.crt", "-e"]

# The images are built in the first test's time.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the secrets as the tutorial makes them, and a second tenant."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("secrets")
    make_files(folder)
    with (folder / "keys.txt").open("a") as keys:
        keys.write(f"{hashlib.sha256(OTHER_KEY.encode()).hexdigest()} globex generate\n")
    return folder


@pytest.fixture(scope="module")
def production(files: Path) -> Iterator[Deployed]:
    names = {
        "specdec-tls": ("tls.crt", "tls.key", "ca.crt"),
        "specdec-redis": ("password", "url"),
        "specdec-keys": ("keys.txt", "service.key"),
    }
    secrets = {name: {key: (files / key).read_text() for key in keys} for name, keys in names.items()}
    with started(OVERLAY, secrets) as found:
        yield found


@pytest.fixture(scope="module")
def keys(files: Path) -> dict[str, str]:
    """Keys by their tenants."""
    return {"acme": (files / "acme.key").read_text(), "globex": OTHER_KEY}


def completed(pod: Pod, files: Path, key: str) -> tuple[int, dict[str, Any]]:
    """Return status and body of a gateway's answer to a completion, asked as the cluster's Gateway does: with TLS."""
    tls = ssl.create_default_context(cafile=files / "ca.crt")
    body = {"model": "specdec", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    status, text = ask(pod.address, 8000, "/v1/completions", tls=tls, body=body, key=key)
    return status, json.loads(text)


def test_the_acceptance_script_accepts_the_deployment(
    production: Deployed, files: Path, keys: dict[str, str], tmp_path: Path
) -> None:
    environ = {
        "SPECDEC_API_KEY": keys["acme"],
        "SPECDEC_TLS_CA": str(files / "ca.crt"),
        "SPECDEC_ENDPOINT": "coordinator:50051",
    }
    with Kubectl(production.cluster, OVERLAY, tmp_path):
        done = run_script(ROOT / "k8s" / "acceptance.sh", tmp_path, os.environ | environ)
    print(done.stdout)
    steps = re.findall(r"^(\w+) +\d+ s  (.*)$", done.stdout, re.MULTILINE)
    assert len(steps) == 12, done.stdout
    assert [step for step in steps if step[0] != "ok"] == []
    assert done.returncode == 0


def test_both_tenants_get_an_answer_from_every_gateway(production: Deployed, files: Path, keys: dict[str, str]) -> None:
    gateways = production.cluster.pods_of("gateway")
    answers = [completed(pod, files, key) for pod in gateways for key in keys.values()]
    assert len(answers) == 4
    assert {status for status, _ in answers} == {200}
    bodies = [body for _, body in answers]
    assert {body["model"] for body in bodies} == {"specdec"}
    assert {body["usage"]["completion_tokens"] for body in bodies} == {NUM_TOKENS}
    assert len({body["choices"][0]["text"] for body in bodies}) == 1


@pytest.mark.parametrize("key", ["", "an-unknown-key"])
def test_a_request_without_a_known_key_is_refused(key: str, production: Deployed, files: Path) -> None:
    (gateway, *_) = production.cluster.pods_of("gateway")
    assert completed(gateway, files, key)[0] == 401


async def test_a_coordinator_knows_the_tenants_as_well(production: Deployed, files: Path, keys: dict[str, str]) -> None:
    tls = Tls(ca=str(files / "ca.crt"), server_name="specdec")
    (address, *_) = production.cluster.addresses("coordinator")
    for key in keys.values():
        async with AsyncClient(f"{address}:50051", tls=tls, api_key=key) as client:
            output = await client.generate(PROMPT, max_new_tokens=NUM_TOKENS, temperature=0.0)
            assert len(output.token_ids) == NUM_TOKENS
    async with AsyncClient(f"{address}:50051", tls=tls, api_key="an-unknown-key") as client:
        with pytest.raises(SpecdecError) as refused:
            await client.generate(PROMPT, max_new_tokens=NUM_TOKENS)
    assert refused.value.reason == "UNAUTHENTICATED"


def test_nothing_is_served_in_plaintext(production: Deployed) -> None:
    (gateway, *_) = production.cluster.pods_of("gateway")
    with pytest.raises((OSError, http.client.HTTPException)):
        ask(gateway.address, 8000, "/health")
    (redis,) = production.cluster.pods_of("redis")
    with pytest.raises(ProgramFailed):
        redis.execute(["redis-cli", "-e", "ping"])


def test_redis_asks_for_its_password(production: Deployed) -> None:
    (redis,) = production.cluster.pods_of("redis")
    assert redis.execute([*REDIS, "ping"]).strip() == "PONG"
    with pytest.raises(ProgramFailed, match="NOAUTH"):
        redis.execute(["env", "--unset=REDISCLI_AUTH", *REDIS, "ping"])
