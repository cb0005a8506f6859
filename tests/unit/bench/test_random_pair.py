"""A random pair in bfloat16: the written checkpoints accept as was asked, and the draft is part of the target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from bench.harness.workload import prompt_token_ids
from bench.systems.models import DEMO
from bench.systems.random_pair import PairModel, RandomPair, write_random_pair, write_tokenizer
from specdec.checkpoints.vocabulary import load_tokenizer

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=4096,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> RandomPair:
    return write_random_pair(CONFIG, 3, 0.8, tmp_path_factory.mktemp("pair"), "cpu")


@torch.inference_mode()
def acceptance(pair: RandomPair) -> float:
    """Of the target's greedy tokens after fresh prompts, the share that the draft names, by transformers alone."""
    target, draft = (
        LlamaForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16) for model in (pair.target, pair.draft)
    )
    prompts = torch.tensor(prompt_token_ids(pair.target.directory, 30))
    texts = target.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=60)
    named = draft(texts[:, 29:-1]).logits.argmax(-1)
    return float((named == texts[:, 30:])[:, 20:].float().mean())


def test_the_written_checkpoints_agree_as_often_as_was_asked(pair: RandomPair) -> None:
    assert pair.agreement == pytest.approx(0.8, abs=0.03)
    assert acceptance(pair) == pytest.approx(0.8, abs=0.1)


@pytest.mark.full
def test_a_pair_that_is_to_agree_less_accepts_less(pair: RandomPair, tmp_path: Path) -> None:
    other = write_random_pair(CONFIG, 3, 0.4, tmp_path, "cpu")
    assert other.eps > pair.eps
    assert acceptance(other) < 0.6


def test_the_draft_is_the_first_layers_of_the_target_with_its_embedding_norm_and_head(pair: RandomPair) -> None:
    target, draft = weights(pair.target), weights(pair.draft)
    assert {name.split(".")[2] for name in draft if ".layers." in name} == {"0", "1", "2"}
    assert all(torch.equal(draft[name], target[name]) for name in draft)
    assert all(weight.dtype == torch.bfloat16 for weight in target.values())
    scaled = target["model.layers.4.mlp.down_proj.weight"].float().std()
    assert scaled / target["model.layers.1.mlp.down_proj.weight"].float().std() == pytest.approx(pair.eps, rel=0.05)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_step_reads_every_weight_but_the_input_embedding(pair: RandomPair, role: str) -> None:
    model: PairModel = getattr(pair, role)
    stored = {name: weight.nbytes for name, weight in weights(model).items()}
    assert model.step_bytes == sum(stored.values()) - stored["model.embed_tokens.weight"]
    assert model.kv_bytes_per_token == (6 if role == "target" else 3) * 2 * 2 * 16 * 2


def test_the_tokenizer_has_a_token_for_every_row_of_the_head_and_encodes_as_before(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 4096)
    padded = load_tokenizer(tmp_path)
    assert len(padded) == 4096
    assert padded.decode([300, 4095]).startswith(load_tokenizer(DEMO / "target").decode([300]))
    assert prompt_token_ids(tmp_path) == prompt_token_ids(DEMO / "target")


def weights(model: PairModel) -> dict[str, torch.Tensor]:
    return load_file(model.directory / "model.safetensors")
