"""A hybrid behind real processes and a real Redis: its text stays that of `generate()` when its states are lost.

The quick part is one family whose layers have both a convolution and a recurrence; the others are in the full tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.v1 import coordinator_pb2 as pb
from tests.support.greedy_texts import generate, require_same_but_for_ties
from tests.support.output import Output
from tests.support.process_rig import ask, read_rest, read_some, run, stub_of
from tests.support.redis_fixture import RedisServer
from tests.support.stack import Stack
from tests.support.tiny_models import build_tiny_pair

#: Odd, so that no block ends where the states are lost.
PROMPT = [5 + 7 * index % 240 for index in range(53)]
NUM_TOKENS = 120


@pytest.fixture(
    scope="module", params=["qwen3_5", *(pytest.param(name, marks=pytest.mark.full) for name in ("lfm2", "nemotron_h"))]
)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    layers = 6 if request.param == "nemotron_h" else 4
    return build_tiny_pair(request.param, tmp_path_factory.mktemp("models"), seed=3, num_layers=layers)


@pytest.fixture(scope="module")
def stack(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    arguments = ["--lease-ttl-s", "1", "--draft-timeout-s", "20"]
    # A store for each family: in a store of all, a session of the same name would go on with another model.
    store = RedisServer(tmp_path_factory.mktemp("redis"))
    store.start()
    try:
        with Stack(*models, redis_url=store.url, num_coordinators=2, coordinator_arguments=arguments) as stack:
            yield stack
    finally:
        store.stop()


@pytest.fixture(scope="module")
def oracle(models: tuple[Path, Path]) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference(oracle: torch.nn.Module) -> list[int]:
    return generate(oracle, PROMPT, NUM_TOKENS)


def request(session_id: str, prompt: list[int], num_tokens: int = NUM_TOKENS) -> pb.GenerateRequest:
    made = ask(session_id, num_tokens=num_tokens, gamma=3)
    made.prompt_token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    return made


@pytest.mark.parametrize("killed", ["target", pytest.param("draft", marks=pytest.mark.full)])
def test_a_replica_killed_in_mid_run_changes_no_token(
    stack: Stack, oracle: torch.nn.Module, reference: list[int], killed: str
) -> None:
    stream = stub_of(stack.endpoint).Generate(request("", PROMPT))
    output = read_some(stream, 17)
    stack.kill(killed)
    stack.restart(killed)
    read_rest(stream, output)
    require_same_but_for_ties(oracle, PROMPT, reference, output.token_ids)


def test_a_session_resumed_after_its_coordinator_was_killed_has_the_same_text_and_a_second_turn(
    stack: Stack, oracle: torch.nn.Module, reference: list[int]
) -> None:
    stream = stub_of(stack.endpoint).Generate(request("orphan", PROMPT))
    held = read_some(stream, 23)
    stack.kill("coordinator")
    with suppress(grpc.RpcError):  # on a busy machine all tokens may have left before
        read_rest(stream, held)
    other = stub_of(stack.parts["coordinator2"].address)
    rest = run(other, pb.GenerateRequest(session_id="orphan", resume_from=len(held.token_ids)))
    stack.restart("coordinator")
    text = [*held.token_ids, *rest.token_ids]
    require_same_but_for_ties(oracle, PROMPT, reference, text)
    second = [9, 12, 200, 31, 7]
    output: Output = run(stub_of(stack.endpoint), request("orphan", second, num_tokens=31))
    whole = [*PROMPT, *text, *second]
    require_same_but_for_ties(oracle, whole, generate(oracle, whole, 31), output.token_ids)
