"""A target that drafts by itself is killed in mid-stream: another one continues, with its own drafts or without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.v1 import coordinator_pb2 as pb
from tests.support.process_rig import PROMPT, ask, greedy, read_rest, read_some, stub_of
from tests.support.stack import Stack
from tests.support.tiny_models import build_tiny_model

NUM_TOKENS = 160


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("target"))


def holder(stack: Stack) -> str:
    """Return the target that holds a session; "" while none reports it."""
    pools = stub_of(stack.endpoint).GetInfo(pb.GetInfoRequest()).pools
    addresses = {replica.address for pool in pools for replica in pool.replicas if replica.num_sessions}
    return next((part.name for part in stack.parts.values() if part.address in addresses), "")


def test_killed_targets_that_draft_by_themselves_cost_no_token(target: Path) -> None:
    with Stack(
        target, None, num_targets=2, target_arguments=("--local-draft", "early-exit:2", "--num-threads", "1")
    ) as stack:
        stub = stub_of(stack.endpoint)
        stream = stub.Generate(ask(num_tokens=NUM_TOKENS, gamma=1, return_provenance=True))
        output = read_some(stream, 8)
        while not (name := holder(stack)):
            pass
        stack.kill(name)
        read_rest(stream, output)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        assert output.token_ids == greedy(model, PROMPT, NUM_TOKENS)
        accepted = [index for index, detail in enumerate(output.details) if detail.source == pb.TOKEN_SOURCE_ACCEPTED]
        assert accepted[0] < 40
        assert accepted[-1] > NUM_TOKENS - 40, "the other one drafts too"
        assert {output.details[index].draft_pool for index in accepted} == {"early-exit"}
