"""A replica of two ranks loses one: its calls fail, it leaves the registry, and the whole group restarts by itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specdec.client import Budgets, Client
from specdec.contract.errors import SpecdecError
from specdec.contract.types import DrawRule, SamplingFilters, SessionPosition, VerifyRequest
from specdec.core.reference import chain_hash
from specdec.rpc.client import TargetLink
from specdec.state.redis_store import open_registry
from tests.support.process_rig import NUM_TOKENS, PROMPT, models, ranks_of, reference
from tests.support.redis_fixture import RedisServer, redis_server
from tests.support.stack import Stack, is_serving
from tests.support.tiny_models import build_tiny_model

__all__ = ["models", "redis_server", "reference"]

#: Of a test that would otherwise wait for ever, in seconds; a group is back within 30 where it has the machine.
_PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def stack(models: tuple[Path, Path], redis_server: RedisServer) -> Iterator[Stack]:
    divided = ("--tensor-parallel", "2", "--redis-url", redis_server.url)
    with Stack(*models, target_arguments=divided, coordinator_arguments=["--draft-timeout-s", "20"]) as stack:
        yield stack


def target_ranks(stack: Stack) -> list[int]:
    process = stack.parts["target"].process
    assert process is not None
    return ranks_of(process.pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def verify_once(address: str, session_id: str) -> None:
    """Run one greedy round from the first token."""
    token_ids = np.arange(5, 12, dtype=np.uint32)
    asked = SessionPosition(
        session_id=session_id,
        epoch=1,
        round_id=1,
        start=0,
        prefix_hash=chain_hash([]),
        token_ids=token_ids,
        filters=SamplingFilters(temperature=0.0),
        seed=1,
        turn=1,
        output_start=len(token_ids),
        draw_rule=DrawRule.DISTRIBUTION,
    )

    async def verify() -> None:
        link = TargetLink(address)
        try:
            await link.verify(VerifyRequest(asked, np.empty(0, dtype=np.uint32), ()))
        finally:
            await link.close()

    asyncio.run(verify())


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.full),
    ],
)
def test_a_text_continues_after_the_loss_of_a_rank(stack: Stack, reference: list[int], rank: int, number: int) -> None:
    before = target_ranks(stack)
    assert len(before) == 2
    options = {"prompt_token_ids": PROMPT, "temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4 * NUM_TOKENS}
    budgets = Budgets(resume_s=_PATIENCE_S)
    with Client(stack.endpoint, budgets=budgets) as client, client.generate(stream=True, gamma=1, **options) as stream:
        next(iter(stream))
        os.kill(before[rank], number)
        output = stream.result()
    assert list(output.token_ids) == reference
    # The step that waits for a killed rank may fail before the first rank reads that the connection is closed.
    why = "no heartbeat for 8 s" if number == signal.SIGSTOP else "rank 1 is gone|a step failed on rank 0"
    until(lambda: rank == 0 or re.search(why, stack.parts["target"].log) is not None)
    until(lambda: not any(is_running(pid) for pid in before))
    until(lambda: len(target_ranks(stack)) == 2)
    assert not set(before) & set(target_ranks(stack))


@pytest.mark.full
def test_a_replica_that_lost_a_rank_while_idle_fails_its_calls_and_leaves_the_registry(
    stack: Stack, redis_server: RedisServer
) -> None:
    target = stack.parts["target"]
    before = target_ranks(stack)
    verify_once(target.address, "idle")

    async def num_registered() -> int:
        registry = open_registry(redis_server.url)
        try:
            return len(await registry.replicas("target"))
        finally:
            await registry.close()

    assert asyncio.run(num_registered()) == 1
    os.kill(before[1], signal.SIGKILL)
    reasons = set()
    while not reasons:
        try:
            verify_once(target.address, "more")
        except SpecdecError as error:
            reasons.add(error.reason)
    assert reasons <= {"REPLICA_UNAVAILABLE"}
    until(lambda: not is_running(before[0]))
    # The replica removed its own entry; expiry would take ten seconds.
    assert asyncio.run(num_registered()) == 0
    assert "rank 1 is gone" in target.log
    stack.wait_serving("target")
    until(lambda: asyncio.run(num_registered()) == 1)


@pytest.mark.full
def test_ranks_end_with_a_killed_watcher(stack: Stack) -> None:
    before = target_ranks(stack)
    stack.kill("target")
    until(lambda: not any(is_running(pid) for pid in before))
    assert not is_serving(stack.parts["target"].address)
    stack.restart("target")


def test_a_terminated_replica_leaves_no_process(stack: Stack) -> None:
    before = target_ranks(stack)
    assert stack.terminate("target") == 0
    assert not any(is_running(pid) for pid in before)
    host, port = stack.parts["target"].address.split(":")
    with socket.create_server((host, int(port))):  # no process holds the port
        pass


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tensor-parallel", "3"), "--tensor-parallel 3 does not divide the model's 4 attention heads"),
        (("--tensor-parallel", "4", "--model", "simulated:70b-1b"), "cannot divide a simulated replica"),
        (
            ("--tensor-parallel", "2", "--compile-backend", "native"),
            "auto, eager or cuda-graphs, not native",
        ),
        (("--tensor-parallel", "2", "--dtype", "int8"), "--tensor-parallel supports int8 weights on GPUs only"),
        (("--tensor-parallel", "2", "--device", "cuda:0"), "gives each rank its own device: use --device cuda, not"),
    ],
)
def test_a_wrong_number_of_ranks_is_refused_in_one_line(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    model = build_tiny_model("llama", tmp_path, num_layers=1)
    common = ("--model", str(model), "--redis-url", "memory://", "--listen", "127.0.0.1:0")
    result = subprocess.run(
        [sys.executable, "-m", "target_service", *common, *flags], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    (error,) = (line for line in result.stderr.splitlines() if not line.startswith("{"))  # log records aside
    assert error.startswith("error: ")
    assert words in error


@pytest.mark.full
def test_a_failure_of_one_rank_is_the_first_ranks_error_line(tmp_path: Path) -> None:
    """A machine with fewer GPUs than ranks is an example."""
    model = build_tiny_model("llama", tmp_path, num_layers=1)

    def start(rank: int, *own: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "specdec.service.rank", "target", "--rank", str(rank), "--world-size", "2"]
        flags = ["--model", str(model), "--redis-url", "memory://", "--listen", "127.0.0.1:0", "--device", "cpu"]
        return subprocess.Popen(
            [*command, *own, *flags, *(["--dtype", "int8"] if rank else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = start(0, "--")
    assert first.stdout is not None
    port = first.stdout.readline().removeprefix("store ").strip()
    second = start(1, "--store-port", port, "--")
    _, stderr = first.communicate()
    second.communicate()
    assert (first.returncode, second.returncode) == (1, 1)
    (error,) = (line for line in stderr.splitlines() if not line.startswith("{"))  # log records aside
    assert error.startswith("error: --tensor-parallel supports int8 weights on GPUs only")
