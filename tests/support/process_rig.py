"""Two coordinators, a draft and a target as processes on a real Redis, and what Hugging Face's greedy decoding gives.

`models`, `stack` and `reference` are module-scoped fixtures; a test file imports them, with `redis_server`. Called by
tests of whole processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.v1 import coordinator_pb2 as pb
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.support.output import Output
from tests.support.redis_fixture import RedisServer
from tests.support.stack import Stack
from tests.support.tiny_models import build_tiny_pair

PROMPT = (5, 17, 99, 42, 3, 8)
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_tiny_pair("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stack(models: tuple[Path, Path], redis_server: RedisServer) -> Iterator[Stack]:
    arguments = ["--lease-ttl-s", "1", "--draft-timeout-s", "20"]
    with Stack(*models, redis_url=redis_server.url, num_coordinators=2, coordinator_arguments=arguments) as stack:
        yield stack


@pytest.fixture(scope="module")
def reference(models: tuple[Path, Path]) -> list[int]:
    """Hugging Face's greedy continuation of PROMPT, long enough for every test here."""
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    return greedy(model, PROMPT, 4 * NUM_TOKENS)


def greedy(model: torch.nn.Module, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
                            eos_token_id=None)  # fmt: skip
    return output[0, len(prompt) :].tolist()


def stub_of(address: str) -> CoordinatorServiceStub:
    return CoordinatorServiceStub(grpc.insecure_channel(address))


def ask(session_id: str = "", *, num_tokens: int = NUM_TOKENS, gamma: int = 3, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        session_id=session_id,
        prompt_token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True),
        speculation=pb.SpeculationParams(gamma=gamma),
        **fields,
    )


def run(stub: CoordinatorServiceStub, request: pb.GenerateRequest) -> Output:
    output = Output()
    for response in stub.Generate(request):
        output.add(response)
    return output


def read_rest(stream: Iterator[pb.GenerateResponse], output: Output) -> None:
    for response in stream:
        output.add(response)


def read_some(stream: Iterator[pb.GenerateResponse], num_tokens: int) -> Output:
    output = Output()
    while len(output.token_ids) < num_tokens:
        output.add(next(stream))
    return output


def ranks_of(watcher_pid: int) -> list[int]:
    """Process ids of a watcher's ranks, by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            words = (path.parent / "cmdline").read_bytes().decode().split("\0")
        except (OSError, IndexError):
            continue
        if parent == watcher_pid and "--rank" in words:
            found[int(words[words.index("--rank") + 1])] = int(path.parent.name)
    return [found[rank] for rank in sorted(found)]
