"""Draft and target services as the processes users start: they serve, they register, they drain, they fail clearly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.contract.types import DrawRule, ProposeRequest, SamplingFilters, SessionPosition, VerifyRequest
from specdec.core.reference import chain_hash
from specdec.rpc.client import DraftLink, TargetLink
from specdec.rpc.service_server import DRAFT_SERVICE
from specdec.state.redis_store import open_registry
from tests.support.process_template import ENVIRON, Streams, run_like, start_like
from tests.support.redis_fixture import redis_server, redis_url
from tests.support.stack import free_port
from tests.support.tiny_architectures import build_tiny_architecture
from tests.support.tiny_models import build_tiny_model

__all__ = ["redis_server", "redis_url"]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("model"), num_layers=1)


async def start(service: str, *flags: str) -> Process:
    """Starts `python -m <service>` with nothing of specdec in its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", service, "--num-threads", "1", *flags, cwd=ROOT, env=environment, stdout=PIPE, stderr=PIPE
    )


async def listening_address(process: Process) -> str:
    """Reads log lines until the one that names the bound address."""
    assert process.stderr is not None
    seen = []
    while line := await process.stderr.readline():
        seen.append(line.decode())
        record = json.loads(line)
        if record["message"] == "listening":
            return str(record["address"])
    pytest.fail(f"the service ended without listening:\n{''.join(seen)}")


@asynccontextmanager
async def running(service: str, *flags: str) -> AsyncIterator[tuple[Process, str]]:
    process = await start(service, *flags)
    try:
        yield process, await listening_address(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


def first_round(session_id: str) -> SessionPosition:
    token_ids = np.arange(5, 12, dtype=np.uint32)
    return SessionPosition(
        session_id=session_id,
        epoch=1,
        round_id=1,
        start=0,
        prefix_hash=chain_hash([]),
        token_ids=token_ids,
        filters=SamplingFilters(),
        seed=1,
        turn=1,
        output_start=len(token_ids),
        draw_rule=DrawRule.DISTRIBUTION,
    )


@pytest.mark.parametrize("compile_backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.full)])
async def test_a_draft_and_a_target_process_serve_a_round_and_end_on_sigterm(model: Path, compile_backend: str) -> None:
    common = ("--model", str(model), "--redis-url", "memory://", "--listen", "127.0.0.1:0")
    common += ("--compile-backend", compile_backend)
    async with AsyncExitStack() as services:
        # Starting takes longest; both at once.
        (draft, draft_address), (target, target_address) = await asyncio.gather(
            *(services.enter_async_context(running(name, *common)) for name in ("draft_service", "target_service"))
        )
        draft_link, target_link = DraftLink(draft_address), TargetLink(target_address)
        asked = first_round("a")
        proposal = await draft_link.propose(ProposeRequest(asked, 4))
        assert len(proposal.draft_token_ids) == 4
        supports = tuple(support.token_ids for support in proposal.supports)
        reply = await target_link.verify(VerifyRequest(asked, proposal.draft_token_ids, supports))
        assert len(reply.rows) == 5
        draft_info, target_info = await draft_link.info(), await target_link.info()
        assert (draft_info.role, target_info.role) == ("draft", "target")
        assert draft_info.vocabulary_fingerprint == target_info.vocabulary_fingerprint
        assert draft_info.num_sessions == 1
        await draft_link.release(["a"])
        assert (await draft_link.info()).num_sessions == 0
        async with grpc.aio.insecure_channel(draft_address) as channel:
            request = health_pb2.HealthCheckRequest(service=DRAFT_SERVICE)
            answer = await health_pb2_grpc.HealthStub(channel).Check(request)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await draft_link.close()
        await target_link.close()
    assert (draft.returncode, target.returncode) == (0, 0)


async def test_a_registered_process_can_be_found_and_leaves_when_it_drains(model: Path, redis_url: str) -> None:
    metrics_address = f"127.0.0.1:{free_port()}"
    flags = ("--model", str(model), "--redis-url", redis_url, "--listen", "127.0.0.1:0", "--metrics", metrics_address)
    registry = open_registry(redis_url)
    async with running("draft_service", *flags, "--replica-id", "draft-x", "--pool", "small") as (process, address):
        records = await registry.replicas("draft")
        assert [(record.address, record.engine.replica_id, record.engine.pool) for record in records] == [
            (address, "draft-x", "small")
        ]
        url = f"http://{metrics_address}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        assert "specdec:kv_cache_usage_perc" in text
    assert process.returncode == 0
    assert await registry.replicas("draft") == []
    await registry.close()


@pytest.mark.parametrize("service", ["draft_service", "target_service"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "/no/such/model", "--redis-url", "memory://"), "/no/such/model"),
        (("--model", "unused", "--redis-url", "redis://127.0.0.1:1", "--store-wait-s", "0"), "redis://127.0.0.1:1"),
    ],
)
async def test_what_cannot_start_says_why_in_one_line(service: str, flags: tuple[str, ...], words: str) -> None:
    process = await start(service, "--listen", "127.0.0.1:0", *flags)
    out, err = await process.communicate()
    assert process.returncode == 1
    assert out == b""
    assert err.decode().startswith("error: ")
    assert words in err.decode()
    assert err.count(b"\n") == 1


def error_line(service: str, *flags: str) -> str:
    """Return the only line that a service from a template writes besides log records before it ends."""
    ended = run_like(service, "--num-threads", "1", "--redis-url", "memory://", "--listen", "127.0.0.1:0", *flags)
    assert ended.returncode == 1
    (error,) = (line for line in ended.stderr.splitlines() if not line.startswith("{"))
    return error


def test_an_unknown_compile_backend_is_one_line_that_names_those_there_are(model: Path) -> None:
    error = error_line("target_service", "--model", str(model), "--compile-backend", "tensorflow")
    assert error.startswith("error: compile_backend 'tensorflow' does not exist")
    assert ", inductor" in error


def listens(service: str, *flags: str) -> bool:
    """Return whether a service from a template listens; it is ended."""
    reading, writing = os.pipe()
    with open(os.devnull, "rb") as nothing, open(writing, "wb") as log:
        process = start_like(service, flags, {**os.environ, **ENVIRON}, Streams(nothing, log, log))
    with open(reading) as lines:
        is_listening = any('"message": "listening"' in line for line in lines)
        process.send_signal(signal.SIGTERM)
        lines.read()
    process.wait()
    return is_listening


@pytest.mark.parametrize("service", [pytest.param("draft_service", marks=pytest.mark.full), "target_service"])
def test_a_model_that_is_computed_wrongly_is_one_line_and_never_serves(service: str, tmp_path: Path) -> None:
    build_tiny_architecture("roberta", tmp_path)  # its positions begin behind the padding token's
    error = error_line(service, "--model", str(tmp_path))
    assert error.startswith("error: a model of type roberta is computed differently")
    flags = ("--model", str(tmp_path), "--redis-url", "memory://", "--listen", "127.0.0.1:0", "--num-threads", "1")
    assert listens(service, *flags, "--self-check", "off")


def test_a_promise_that_cannot_be_kept_is_one_line_and_never_serves(model: Path) -> None:
    error = error_line("target_service", "--model", str(model), "--compile-backend", "eager", "--deterministic")
    assert error == "error: --deterministic on cpu needs native kernels, not --compile-backend eager (UNSUPPORTED)"


async def test_a_taken_port_is_one_line_and_exit_code_1() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        process = await start("draft_service", "--model", "unused", "--redis-url", "memory://", "--listen", address)
        _, err = await process.communicate()
    assert process.returncode == 1
    assert err.decode() == (f"error: cannot listen on {address}: Address already in use (REPLICA_UNAVAILABLE)\n")
