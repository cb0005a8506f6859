"""Real processes: the target is replaced by another model of the same vocabulary, and later brought back."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.client import Budgets, Client
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.process_rig import PROMPT, ask, greedy, read_rest, read_some, run, stub_of
from tests.support.stack import Stack
from tests.support.tiny_models import build_tiny_model, build_tiny_pair

NUM_TOKENS = 160


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A target, a draft for it, and another target of the same vocabulary."""
    directory = tmp_path_factory.mktemp("models")
    return *build_tiny_pair("llama", directory), build_tiny_model("llama", directory / "other", seed=7)


def redeploy(stack: Stack, model: Path) -> None:
    part = stack.parts["target"]
    stack.kill("target")
    arguments = list(part.arguments)
    arguments[arguments.index("--model") + 1] = str(model)
    part.arguments = arguments
    stack.restart("target")


def reference(model: Path, prompt: tuple[int, ...]) -> list[int]:
    return greedy(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), prompt, NUM_TOKENS)


def test_a_redeployed_target_adds_no_token_to_running_turns_and_new_turns_report_it(
    models: tuple[Path, Path, Path],
) -> None:
    target, draft, other = models
    with Stack(target, draft, coordinator_arguments=("--draft-timeout-s", "20")) as stack:
        stub = stub_of(stack.endpoint)
        stream = stub.Generate(ask("begun", num_tokens=NUM_TOKENS, gamma=1))
        output = read_some(stream, 5)
        redeploy(stack, other)
        with pytest.raises(grpc.RpcError) as caught:
            read_rest(stream, output)
        assert from_rpc_error(caught.value).reason == "REPLICA_UNAVAILABLE"
        assert output.token_ids == reference(target, PROMPT)[: len(output.token_ids)]

        with Client(stack.endpoint, budgets=Budgets(connect_s=30.0)) as client:
            options = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NUM_TOKENS}
            told = client.generate(prompt_token_ids=PROMPT, session_id="fresh", **options)
            assert list(told.token_ids) == reference(other, PROMPT)
            redeploy(stack, target)
            changed = client.generate(prompt_token_ids=PROMPT, session_id="fresh", **options)
        held = (*PROMPT, *told.token_ids, *PROMPT)
        assert list(changed.token_ids) == reference(target, held)
        assert (told.target_changed, changed.target_changed) == (False, True)
        assert told.target_fingerprint != changed.target_fingerprint

        rest = run(stub, pb.GenerateRequest(session_id="begun", resume_from=len(output.token_ids)))
        assert output.token_ids + rest.token_ids == reference(target, PROMPT)
