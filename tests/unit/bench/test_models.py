"""deep(N, eps): more layers, nearly the same law, the same weights for the same seed."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from bench.systems.models import deep

VOCABULARY_SIZE = 64


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose law is far from uniform, with something that looks like a tokenizer file."""
    directory = tmp_path_factory.mktemp("source")
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=7)
    model.half().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@torch.inference_mode()
def law(directory: Path) -> torch.Tensor:
    """The law after every token of one fixed text.  [T, V]"""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    token_ids = torch.arange(40).remainder(VOCABULARY_SIZE)[None]
    return torch.softmax(model(token_ids).logits[0].double(), dim=-1)


def total_variation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().sum(-1).mean() / 2)


def test_a_small_eps_leaves_the_law_nearly_unchanged_and_a_large_one_does_not(source: Path, tmp_path: Path) -> None:
    shallow = law(source)
    near = total_variation(shallow, law(deep(source, tmp_path / "near", num_layers=5, eps=0.001)))
    far = total_variation(shallow, law(deep(source, tmp_path / "far", num_layers=5, eps=1.0)))
    assert 0 < near < 0.02
    assert far > 0.2


def test_eps_zero_leaves_the_law_exactly_unchanged(source: Path, tmp_path: Path) -> None:
    assert torch.equal(law(source), law(deep(source, tmp_path / "deep", num_layers=3, eps=0.0)))


def test_the_layers_are_really_there_in_16_bits_with_tokenizer_and_eos(source: Path, tmp_path: Path) -> None:
    made = deep(source, tmp_path / "deep", num_layers=5, eps=0.1)
    model = LlamaForCausalLM.from_pretrained(made)
    assert model.config.num_hidden_layers == 7
    assert model.dtype == torch.float16
    assert model.generation_config.eos_token_id == 7
    assert (made / "tokenizer.json").exists()
    assert model.model.layers[6].self_attn.o_proj.weight.abs().max() > 0


def test_the_same_seed_makes_the_same_model_and_leaves_the_global_generator_alone(source: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    one = LlamaForCausalLM.from_pretrained(deep(source, tmp_path / "one", num_layers=2, eps=0.5, seed=4))
    same = LlamaForCausalLM.from_pretrained(deep(source, tmp_path / "same", num_layers=2, eps=0.5, seed=4))
    other = LlamaForCausalLM.from_pretrained(deep(source, tmp_path / "other", num_layers=2, eps=0.5, seed=5))
    assert torch.equal(state, torch.get_rng_state())
    name = "model.layers.3.mlp.down_proj.weight"
    assert torch.equal(one.get_parameter(name), same.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
