"""KV that one replica computed and another one uses: bit for bit, and only where it is the same model's."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.checkpoints.artifact_cache import cache_directory
from specdec.contract.types import BLOCK_TOKENS, VerifyRequest
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.rpc.client import TargetLink
from tests.support.process_template import ENVIRON, Streams, start_like
from tests.support.redis_fixture import RedisServer
from tests.support.round_driver import make_round
from tests.support.stack import free_port
from tests.support.tier_rig import Replica, wait_until
from tests.support.tiny_models import build_tiny_model

NO_DRAFT = np.empty(0, dtype=np.uint32)
RUN_TOKENS = 256
PROMPT = [2 + index * 37 % 250 for index in range(3 * RUN_TOKENS + 40)]
RUN_BYTES = RUN_TOKENS * 3 * 2 * 32 * 4
#: Much to compute and little to keep: fetching is the better choice on any machine.
WIDE = {"hidden_size": 256, "intermediate_size": 6144, "num_key_value_heads": 1, "head_dim": 32}


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    arguments = ("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")
    server = RedisServer(tmp_path_factory.mktemp("tier"), arguments=arguments)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("model"), context=1024, config_overrides=WIDE)


@asynccontextmanager
async def target(model: Path, *flags: str) -> AsyncIterator[tuple[TargetLink, str]]:
    """A target process; its link and where its metrics are."""
    metrics = f"127.0.0.1:{free_port()}"
    arguments = ["--model", str(model), "--dtype", "float32", "--redis-url", "memory://", "--listen", "127.0.0.1:0"]
    arguments += ["--num-threads", "1", "--metrics", metrics, *flags]
    with ExitStack() as ending:
        link = TargetLink(await asyncio.to_thread(start, ending, arguments))
        try:
            yield link, metrics
        finally:
            await link.close()


def start(ending: ExitStack, arguments: list[str]) -> str:
    """Start a target, which ends with `ending`; return its address once it listens."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")} | ENVIRON
    nothing = ending.enter_context(open(os.devnull, "r+b"))  # noqa: SIM115  # `ending` closes it
    log = ending.enter_context(NamedTemporaryFile())  # noqa: SIM115  # likewise
    process = start_like("target_service", arguments, environ, Streams(nothing, nothing, log))

    def written() -> str:
        return Path(log.name).read_text()

    def stop() -> None:
        process.terminate()
        assert process.wait() == 0, written()

    ending.callback(stop)
    while process.poll() is None:
        for line in written().splitlines():
            if '"listening"' in line:
                return str(json.loads(line)["address"])
        time.sleep(0.05)
    pytest.fail(f"the service ended without listening:\n{written()}")


async def greedy(link: TargetLink, tokens: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Rounds of one token each of a session that the replica does not know, and what it had of the prompt's KV."""
    tokens, cached = list(tokens), None
    for round_id in range(num_tokens):
        position = make_round(tokens, session_id="returning", round_id=round_id)
        verification = await link.verify(VerifyRequest(position, NO_DRAFT, ()))
        cached = verification.num_cached_tokens if cached is None else cached
        tokens.append(int(verification.choice_token_ids[0]))
    return tokens[-num_tokens:], cached or 0


def metric(address: str, name: str, label: str = "") -> float:
    """The series of that name with that label."""
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        text = response.read().decode()
    found = re.search(rf"^specdec:{name}\{{.*{label}.*\}} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found.group(1))


@pytest.mark.parametrize("divided", [(), pytest.param(("--tensor-parallel", "2"), marks=pytest.mark.full)])
async def test_a_session_returns_on_a_cold_replica_with_the_kv_that_another_one_computed(
    divided: tuple[str, ...], model: Path, tier: RedisServer
) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = oracle.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = expected[0, len(PROMPT) :].tolist()
    async with AsyncExitStack() as services:
        # Starting takes longest; both at once.
        (first, its_metrics), (second, metrics) = await asyncio.gather(
            *(services.enter_async_context(target(model, "--kv-tier-url", tier.url, *divided)) for _ in range(2))
        )
        assert await greedy(first, PROMPT, 12) == (expected, 0)
        await asyncio.to_thread(
            wait_until, lambda: metric(its_metrics, "kv_tier_bytes_total", "written") == 3 * RUN_BYTES
        )
        assert await greedy(second, PROMPT, 12) == (expected, 3 * RUN_TOKENS)
        assert metric(metrics, "kv_tier_runs_restored_total") == 3
        assert metric(metrics, "kv_tier_bytes_per_second") > 0


@pytest.mark.parametrize(
    ("architecture", "backend"), [("llama", "native"), ("llama", "eager"), ("gemma3", "eager"), ("gpt2", "eager")]
)
async def test_restored_blocks_are_the_ones_that_were_computed_bit_for_bit(
    architecture: str, backend: str, tier: RedisServer, tmp_path: Path
) -> None:
    checkpoint = build_tiny_model(architecture, tmp_path / "model", context=1024, seed=len(backend))
    compiling = CompileOptions(backend, (), cache_directory(os.environ) / "compiled")
    replicas, blocks, texts, cached = [], [], [], []
    for index in range(2):
        worker = load_worker(
            LoadRequest(
                str(checkpoint), device="cpu", dtype="float32", num_kv_blocks=80, compiling=compiling, self_check=False
            )
        )
        replica = Replica(worker, tier.url)
        replicas.append(replica)
        await asyncio.to_thread(replica.wait_up)
        tokens = list(PROMPT)
        for round_id in range(8):
            verification = await replica.ask(tokens, round_id=round_id)
            tokens.append(int(verification.choice_token_ids[0]))
            if round_id == 0:
                cached.append(verification.num_cached_tokens)
        texts.append(tokens)
        sequence = replica.engine._engine_loop._sessions.get("s")
        blocks.append(worker.read_blocks(sequence.block_table[: 3 * RUN_TOKENS // BLOCK_TOKENS]))
        if index == 0:
            await asyncio.to_thread(replica.wait_written, blocks[0].nbytes)
    assert cached == [0, 3 * RUN_TOKENS]
    assert np.array_equal(blocks[0], blocks[1])
    assert blocks[0].any()
    assert texts[0] == texts[1]
    for replica in replicas:
        await replica.close()
