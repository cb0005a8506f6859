"""The demo target's own drafts: they learn what they will draft, and what is shipped fits the target."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.engine.heads.factory import load_head
from specdec.engine.heads.interface import DraftHead, TargetParts
from specdec.settings.draft_specs import LocalDraftSpec
from tests.support.head_drive import HeadDrive
from tests.support.head_references import hidden_states

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
NUM_DEPTHS = 3
TOKENS = [(7 * i * i + 3 * i) % 2011 + 6 for i in range(40)]
NUM_SEEN = 30


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    """`learners` and `train_heads`; the folder is no package, and they import each other by plain names."""
    sys.path.insert(0, str(DEMO))
    try:
        yield importlib.import_module("learners"), importlib.import_module("train_heads")
    finally:
        sys.path.remove(str(DEMO))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()


def parts(model: LlamaForCausalLM) -> TargetParts:
    return TargetParts(
        config=model.config,
        embedding=model.model.embed_tokens.weight.detach(),
        norm=model.model.norm,
        head=model.lm_head.weight.detach(),
        vocabulary_size=model.config.vocab_size,
        max_context_tokens=512,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def loaded(model: LlamaForCausalLM, name: str, folder: Path) -> DraftHead:
    return load_head(LocalDraftSpec(name, name, path=str(folder)), parts(model))


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_a_head_learns_at_every_depth_what_it_gives_when_it_drafts(
    scripts: tuple[ModuleType, ModuleType], model: LlamaForCausalLM, tmp_path: Path, name: str
) -> None:
    """What the training loop computes for whole rows at once is what the served head says token by token."""
    learners, train_heads = scripts
    torch.manual_seed(5)
    learner = learners.LEARNERS[name](model)
    with torch.no_grad():
        for parameter in learner.parameters():
            if parameter.requires_grad and parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        if name == "eagle3":  # the target's hidden states are long: its own layer would hardly show beside them
            learner.layers["fc"].weight.mul_(0.02)
        view = learners.Target(model, bf16=False).look(torch.tensor([TOKENS]))
        learned = list(learner.logits(view))
    train_heads.save(learner, tmp_path, {})
    states = hidden_states(model, TOKENS[: NUM_SEEN - 1])
    drive = HeadDrive(loaded(model, name, tmp_path), TOKENS[:NUM_SEEN], states, 16)
    drafted = drive.draft(NUM_DEPTHS, TOKENS[NUM_SEEN:])
    for depth in range(NUM_DEPTHS):
        logits, offset = learned[depth]
        # Half precision is what is between them.
        torch.testing.assert_close(drafted[depth], logits[0, NUM_SEEN - 1 + depth - offset], atol=0.05, rtol=0.02)
    assert (drafted[1] - drafted[0]).abs().max() > (1 if name == "eagle3" else 0.2)


def test_what_is_shipped_beside_the_pair_is_small_and_says_how_it_was_made() -> None:
    folders = [DEMO / name for name in ("medusa", "eagle3", "early_exit", "prose")]
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) < 6e6
    for folder in folders:
        facts = json.loads((folder / "training.json").read_text())
        assert facts["corpus"] == json.loads((DEMO / "training.json").read_text())["corpus"]
        assert facts["finished_steps"] > 0
