"""Numbers in the metadata of GGUF files: a model computes what the written one computes, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.checkpoints.gguf.architectures import config_of
from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.gguf.rope import DIVISORS
from specdec.checkpoints.gguf.table import ARCHITECTURES
from specdec.contract.errors import SpecdecError
from tests.support.gguf_models import CASES, build, by_layer, load, require_same_logits, rope, write, write_case
from tools.gguf_table import section
from tools.model_list import PAGE


def test_the_page_lists_the_architectures() -> None:
    assert section() in PAGE.read_text(), "run `make model-list`"


def test_every_architecture_is_tested() -> None:
    assert {architecture for _, _, architecture, _ in CASES.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("case", CASES)
def test_a_file_computes_what_the_written_model_computes(case: str, tmp_path: Path) -> None:
    require_same_logits(load(write_case(CASES[case], tmp_path / "model.gguf")), build(*CASES[case][:2]))


#: Left out of a file, with the value that llama.cpp takes then.
ABSENT: list[tuple[str, str, dict[str, Any]]] = [
    ("rope.freq_base", "gemma3", {"rope_parameters": by_layer(1e4) | {"full_attention": rope(1e4)}}),
    ("rope.dimension_count", "nemotron", {"rope_parameters": rope(partial_rotary_factor=1.0)}),
    ("attention.key_length", "qwen3", {"head_dim": 8}),
    ("attention.head_count_kv", "llama", {"num_key_value_heads": 4}),
    ("attention.scale", "granite", {"attention_multiplier": 8**-0.5}),
    ("residual_scale", "granite", {"residual_multiplier": 1.0}),
    ("final_logit_softcapping", "gemma2", {"final_logit_softcapping": 30.0}),
    ("attn_logit_softcapping", "gemma2", {"attn_logit_softcapping": 50.0}),
    ("rope.scaling.type", "llama with linear scaling", {}),
    ("rope.scaling.yarn_beta_fast", "qwen3 with yarn", {"beta_fast": None}),
]


@pytest.mark.parametrize(("name", "case", "value"), ABSENT)
def test_a_number_that_a_file_leaves_out_is_llama_cpps_default(
    name: str, case: str, value: dict[str, Any], tmp_path: Path
) -> None:
    kind, changes, architecture, numbers = CASES[case]
    if "beta_fast" in value:
        value = {"rope_parameters": changes["rope_parameters"] | value}
    changes = changes | value
    left_out = {name: None} | ({"attention.value_length": None} if "key" in name else {})
    path = write_case((kind, changes, architecture, numbers), tmp_path / "model.gguf", **left_out)
    require_same_logits(load(path), build(kind, changes))


REFUSED: list[tuple[str, str, Any]] = [
    ("llama", "rope.dimension_count", 4),
    ("llama", "attention.value_length", 4),
    ("llama", "attention.sliding_window", 64),
    ("llama", "attention.causal", False),
    ("llama", "logit_scale", 0.5),
    ("llama", "residual_scale", 0.22),
    ("llama", "rope.scaling.type", "dynamic"),
    ("llama", "rope.scaling.factor", -2.0),
    ("llama", "rope.freq_base", -1.0),
    ("llama", "attention.temperature_scale", 0.1),
    ("llama", "attention.head_count_kv", [2, 1, 2]),
    ("llama", "feed_forward_length", [48, 48, 40]),
    ("llama", "vocab_size", 95),
    ("mixtral", "expert_gating_func", 2),
    ("granite", "rope.scaling.finetuned", False),
    ("qwen2", "final_logit_softcapping", 30.0),
    ("qwen2", "attention.key_length", 12),
    ("qwen3", "rope.freq_base_swa", 90.0),
    ("qwen3 with yarn", "rope.scaling.yarn_ext_factor", 0.5),
    ("qwen3 with yarn", "rope.scaling.attn_factor", 1.2),
    ("qwen2", "a.number.of.tomorrow", 7),
    ("starcoder2", "rope.dimension_count", 4),
    ("starcoder2 with a window", "attention.sliding_window_pattern", 2),
    ("gemma2", "attention.scale", 0.5),
    ("gemma3", "attention.sliding_window_pattern", [True]),
    ("phi3 with long sequences", "rope.scaling.factor", 2.0),
    ("llama", "nextn_predict_layers", 1),
    ("gemma4", "attention.sliding_window_pattern", [True] * 4),
    ("gemma4", "feed_forward_length", [48, 96, 96, 96]),
    ("gemma4 with experts", "attention.head_count_kv", [2, 1, 1, 1]),
]


def refusal(case: str, tmp_path: Path, **changed: Any) -> SpecdecError:
    with pytest.raises(SpecdecError) as refused:
        config_of(GgufFile(write_case(CASES[case], tmp_path / "model.gguf", **changed)))
    assert str(tmp_path / "model.gguf") in refused.value.message
    return refused.value


@pytest.mark.parametrize(("case", "name", "value"), REFUSED)
def test_a_number_that_is_not_supported_is_refused_by_its_name(
    case: str, name: str, value: Any, tmp_path: Path
) -> None:
    refused = refusal(case, tmp_path, **{name: value})
    assert refused.reason == "UNSUPPORTED"
    assert f"{CASES[case][2]}.{name} = {value}" in refused.message


#: Numbers that no model has, or that every model has.
IMPOSSIBLE: list[tuple[str, Any]] = [
    ("block_count", 0), ("block_count", None), ("embedding_length", None), ("attention.head_count", "four"),
    ("feed_forward_length", None),
    ("attention.layer_norm_rms_epsilon", float("nan")), ("attention.layer_norm_rms_epsilon", None),
    ("rope.freq_base", "large"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_an_impossible_number_is_refused_by_its_name(name: str, value: Any, tmp_path: Path) -> None:
    refused = refusal("llama", tmp_path, **{name: value})
    assert refused.reason == "INVALID_REQUEST"
    assert f"llama.{name}" in refused.message


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"attention.head_count_kv": 3}, "4 heads of width 8 and 3 heads of keys"),
        ({"attention.head_count": 64, "attention.key_length": None}, "64 heads of width 0 and 2 heads of keys"),
        ({"attention.key_length": 7}, "4 heads of width 7 and 2 heads of keys"),
    ],
)
def test_impossible_heads_are_refused(numbers: dict[str, Any], told: str, tmp_path: Path) -> None:
    assert told in refusal("llama", tmp_path, **numbers).message


def test_numbers_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    neutral = {"rope.scaling.type": "none", "rope.scaling.factor": 8.0, "expert_count": 0, "logit_scale": 1.0,
               "attention.sliding_window": 4096, "attention.causal": True, "pooling_type": 0,
               "attention.head_count_kv": [2, 2, 2]}  # fmt: skip
    path = write_case(CASES["llama"], tmp_path / "model.gguf", **neutral)
    require_same_logits(load(path), build(*CASES["llama"][:2]))


@pytest.mark.parametrize("architecture", ["rwkv6", "clip"])
def test_an_unknown_architecture_is_refused_with_the_known_ones(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(SpecdecError) as refused:
        config_of(GgufFile(write(tmp_path / "model.gguf", architecture, {}, {"a": np.ones(4, np.float32)})))
    assert f"of an unsupported type: {architecture}; supported are " in refused.value.message
    assert "llama" in refused.value.message


def test_the_scaled_positions_of_llama_3_are_recovered_from_their_divisors(tmp_path: Path) -> None:
    """Transformers' own rotary frequencies are the oracle."""
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    config = LlamaConfig(head_dim=64, rope_parameters=scaling, max_position_embeddings=131072)
    frequencies = LlamaRotaryEmbedding(config).inv_freq.double().numpy()
    divisors = (500000.0 ** (-np.arange(32) / 32) / frequencies).astype(np.float32)
    case = ("llama", {"rope_parameters": rope(500000.0), "head_dim": 64}, "llama", {})
    path = write_case(case, tmp_path / "model.gguf", extra={DIVISORS: divisors})
    assert config_of(GgufFile(path))["rope_parameters"] == pytest.approx(scaling)
    other = write_case(case, tmp_path / "other.gguf", extra={DIVISORS: np.arange(1, 33, dtype=np.float32)})
    with pytest.raises(SpecdecError, match=r"unsupported RoPE scaling: its tensor rope_freqs\.weight"):
        config_of(GgufFile(other))
