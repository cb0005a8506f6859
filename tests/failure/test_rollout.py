"""A rolling update of all targets to another model under streams: real processes on a real Redis.

The greedy text of both models is known, so a turn that two models had a part in is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.client import AsyncClient, Budgets, Completion
from tests.support.process_rig import PROMPT, greedy
from tests.support.process_template import ENVIRON, ForkedProcess, Streams, start_like
from tests.support.redis_fixture import RedisServer, redis_server
from tests.support.stack import free_port
from tests.support.tiny_models import build_tiny_model

__all__ = ["redis_server"]

NUM_TARGETS, NUM_STREAMS, NUM_TOKENS, NUM_LONG_TOKENS = 3, 16, 6, 400
#: New sessions of each step of the rollout. The draw of a model depends on the session's id alone.
NUM_SESSIONS = 100
#: Of a stream between two sessions, in seconds: the sixteen must not take the processors from targets that start.
_PAUSE_S = 0.5
#: Of a client, in seconds. No test waits for it where nothing is wrong.
_PATIENCE_S = 120.0

Process = subprocess.Popen[bytes] | ForkedProcess


@dataclass
class System:
    """A coordinator and targets that find each other in a Redis."""

    redis_url: str
    tokenizer: Path
    logs: Path
    ending: contextlib.ExitStack
    coordinators: list[str] = field(default_factory=list)

    def start_coordinator(self) -> None:
        self.coordinators.append(f"127.0.0.1:{free_port()}")
        flags = ["--tokenizer", str(self.tokenizer)]
        self._start("coordinator", *flags, "--listen", self.coordinators[-1])

    def start_target(self, model: Path) -> Process:
        flags = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--listen", f"127.0.0.1:{free_port()}"]
        return self._start("target_service", *flags)

    def _start(self, service: str, *flags: str) -> Process:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")} | ENVIRON
        arguments = ["--redis-url", self.redis_url, *flags]
        with open(os.devnull, "rb") as nothing, open(self.logs, "ab") as log:
            process = start_like(service, arguments, environ, Streams(nothing, log, log))
        self.ending.callback(process.wait)
        self.ending.callback(process.kill)
        return process


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model("llama", root / name, seed=seed) for name, seed in (("old", 0), ("new", 1))}


@pytest.fixture(scope="module")
def texts(models: dict[str, Path]) -> dict[str, list[int]]:
    """What Hugging Face's greedy decoding gives, by the name of the model."""
    return {
        name: greedy(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), PROMPT, NUM_LONG_TOKENS)
        for name, path in models.items()
    }


@pytest.fixture
def system(redis_server: RedisServer, models: dict[str, Path], tmp_path: Path) -> Iterator[System]:
    with contextlib.ExitStack() as ending:
        yield System(redis_server.url, models["old"], tmp_path / "log", ending)


async def ready_models(client: AsyncClient) -> dict[str, int]:
    """Return the number of target replicas that take sessions, by the name of their model."""
    return {Path(model.model).name: model.num_replicas for model in (await client.info()).target_models}


async def until_ready(client: AsyncClient, **wanted: int) -> None:
    while True:
        if {name: count for name, count in (await ready_models(client)).items() if count} == wanted:
            return
        await asyncio.sleep(0.05)


async def generate(client: AsyncClient, session_id: str, num_tokens: int = NUM_TOKENS) -> Completion:
    return await client.generate(
        prompt_token_ids=PROMPT, session_id=session_id, max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True
    )


def name_of(output: Completion, texts: dict[str, list[int]]) -> str:
    """Return the name of the model that made the whole output. Fails where none did."""
    tokens = list(output.token_ids)
    (name,) = [name for name, text in texts.items() if text[: len(tokens)] == tokens]
    return name


async def test_a_rollout_under_streams_fails_none_and_moves_new_sessions_in_proportion(
    system: System, texts: dict[str, list[int]], models: dict[str, Path]
) -> None:
    targets = [system.start_target(models["old"]) for _ in range(NUM_TARGETS)]
    for _ in range(2):
        system.start_coordinator()
    outputs: list[Completion] = []
    numbers, stopping, step = itertools.count(), asyncio.Event(), 0

    async def stream(client: AsyncClient) -> None:
        """Begin sessions one after another; every third one has a second turn at once."""
        while not stopping.is_set():
            number = next(numbers)
            first = await generate(client, f"step-{step}-{number}")
            outputs.append(first)
            if number % 3 == 0:
                again = await client.generate(
                    prompt_token_ids=PROMPT[:1], session_id=first.session_id, max_new_tokens=4, temperature=0.0
                )
                assert again.target_changed == (again.target_fingerprint != first.target_fingerprint)
            await asyncio.sleep(_PAUSE_S)

    budgets = Budgets(resume_s=_PATIENCE_S, connect_s=_PATIENCE_S)
    async with AsyncClient(",".join(system.coordinators), budgets=budgets) as client, asyncio.TaskGroup() as streams:
        await until_ready(client, old=NUM_TARGETS)
        long = streams.create_task(generate(client, "long", NUM_LONG_TOKENS))
        for _ in range(NUM_STREAMS):
            streams.create_task(stream(client))
        for step in range(1, NUM_TARGETS + 1):
            system.start_target(models["new"])
            await until_ready(client, old=NUM_TARGETS + 1 - step, new=step)
            targets[step - 1].terminate()
            left = {"old": NUM_TARGETS - step, "new": step}
            await until_ready(client, **{name: count for name, count in left.items() if count})
            begun, last = len(outputs), next(numbers)
            while len(outputs) < begun + NUM_STREAMS + NUM_SESSIONS:  # noqa: ASYNC110  services need the processors
                await asyncio.sleep(0.02)
            fresh = [each for each in outputs[begun:] if int(each.session_id.rpartition("-")[2]) > last]
            share = Counter(name_of(each, texts) for each in fresh)["new"] / len(fresh)
            print(f"{step} of {NUM_TARGETS} replicas are new: {share:.2f} of {len(fresh)} new sessions")
            assert abs(share - step / NUM_TARGETS) <= 0.15
        stopping.set()
    assert [await asyncio.to_thread(target.wait, _PATIENCE_S) for target in targets] == [0] * NUM_TARGETS
    for output in [*outputs, await long]:
        name_of(output, texts)
        assert len(output.token_ids) in (NUM_TOKENS, NUM_LONG_TOKENS)


async def test_an_interrupted_turn_of_the_last_old_target_continues_there_and_then_it_ends(
    system: System, texts: dict[str, list[int]], models: dict[str, Path]
) -> None:
    old = system.start_target(models["old"])
    system.start_coordinator()
    async with AsyncClient(system.coordinators[0], budgets=Budgets(connect_s=_PATIENCE_S)) as client:
        await until_ready(client, old=1)
        async with client.generate(
            prompt_token_ids=PROMPT, session_id="cut", max_new_tokens=NUM_LONG_TOKENS, temperature=0.0, stream=True,
            ignore_eos=True,
        ) as stream:  # fmt: skip
            held = list((await anext(stream)).token_ids)
        system.start_target(models["new"])
        await until_ready(client, old=1, new=1)
        old.terminate()
        await until_ready(client, new=1)
        await asyncio.sleep(4.0)  # longer than a replica stays that no turn needs
        assert old.poll() is None
        async with client.resume("cut", resume_from=len(held)) as resumed:
            rest = await resumed.result()
        assert held + list(rest.token_ids) == texts["old"]
        assert await asyncio.to_thread(old.wait, _PATIENCE_S) == 0
        assert name_of(await generate(client, "next"), texts) == "new"
