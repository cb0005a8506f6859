"""Numbers in the metadata of GGUF files: the converted model computes what the written one computes, or is refused.

Files are written from tiny models of many types with the numbers that llama.cpp's converter stores, none of which is a
default of its class. transformers' own logits of the model that was written are the oracle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import set_tqdm_hook

from bench.systems.gguf_writing import add_tokenizer
from bench.systems.models import DEMO
from specdec.checkpoints import gguf_convert
from specdec.checkpoints.gguf_numbers import NotConverted

TARGET = DEMO / "target"
VOCABULARY_SIZE = json.loads((TARGET / "config.json").read_text())["vocab_size"]
NUM_TOKENS = 120
SIZES = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
#: Weights of norms that are stored with 1 added.
SHIFTED_NORMS = ("gemma2", "gemma3", "nemotron")


def rope(base: float, **others: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, **others}


def gemma3_rope(local: float) -> dict[str, Any]:
    return {"full_attention": rope(700.0), "sliding_attention": rope(local)}


#: Type, changes of its configuration, architecture of the file, and numbers beside those of every file.
Case = tuple[str, dict[str, Any], str, dict[str, Any]]
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 20, "tie_word_embeddings": True}
CASES: dict[str, Case] = {
    "llama": ("llama", {"rope_parameters": rope(500.0), "rms_norm_eps": 1e-2}, "llama", {}),
    "llama with wide heads": ("llama", {"rope_parameters": rope(500.0), "head_dim": 32}, "llama", {}),
    "qwen2": ("qwen2", {"rope_parameters": rope(500.0), "rms_norm_eps": 1e-2}, "qwen2", {}),
    "qwen3": ("qwen3", {"rope_parameters": rope(500.0), "head_dim": 24}, "qwen3", {}),
    "starcoder2": (
        "starcoder2",
        {"rope_parameters": rope(500.0), "norm_epsilon": 1e-2, "sliding_window": None},
        "starcoder2",
        {},
    ),
    "starcoder2 with a window": (
        "starcoder2",
        {"rope_parameters": rope(500.0), "sliding_window": 30},
        "starcoder2",
        {"attention.sliding_window": 30},
    ),
    "phi3": (
        "phi3",
        {"rope_parameters": rope(500.0, partial_rotary_factor=0.5), "sliding_window": 30},
        "phi3",
        {"rope.dimension_count": 8, "attention.sliding_window": 30, "rope.scaling.original_context_length": 256},
    ),
    "nemotron": (
        "nemotron",
        {"rope_parameters": rope(500.0, partial_rotary_factor=0.25), "norm_eps": 1e-2, "head_dim": 16},
        "nemotron",
        {"rope.dimension_count": 4, "rope.scaling.type": "none"},
    ),
    "gemma2": (
        "gemma2",
        {"rope_parameters": rope(500.0), "attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0, **GEMMA},
        "gemma2",
        {"attention.sliding_window": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"rope_parameters": gemma3_rope(10_000.0), **GEMMA},
        "gemma3",
        {"attention.sliding_window": 20},
    ),
    "gemma3 with layers of its own": (
        "gemma3_text",
        {
            "rope_parameters": gemma3_rope(90.0),
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            **GEMMA,
        },
        "gemma3",
        {
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [False, True, False],
            "rope.freq_base_swa": 90.0,
        },
    ),
}


def build(kind: str, changes: Mapping[str, Any]) -> PreTrainedModel:
    config = CONFIG_MAPPING[kind](**(SIZES | dict(changes)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.1 * noise if parameter.ndim < 2 else noise / parameter.shape[-1] ** 0.5)
    return model


def write(model: PreTrainedModel, architecture: str, path: Path, numbers: Mapping[str, Any]) -> Path:
    """Write a model as llama.cpp's converter does. A number None leaves a key out."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    eps, rms_eps = (
        getattr(config, "norm_epsilon", getattr(config, "norm_eps", None)),
        getattr(config, "rms_norm_eps", 0),
    )
    stated = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width, "attention.value_length": width, "vocab_size": config.vocab_size,
        "rope.freq_base": parameters["rope_theta"], "rope.dimension_count": width,
        **({"attention.layer_norm_rms_epsilon": rms_eps} if rms_eps else {"attention.layer_norm_epsilon": eps}),
    } | dict(numbers)  # fmt: skip
    for name, value in stated.items():
        add = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32, list: writer.add_array}
        if value is not None:
            add.get(type(value), writer.add_uint32)(f"{architecture}.{name}", value)
    add_tokenizer(writer, TARGET)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy() + (1 if architecture in SHIFTED_NORMS and "norm" in key and key.endswith("weight") else 0)
        if architecture == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            halves = array.reshape(-1, 2, width // 2, array.shape[1])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.randint(2, VOCABULARY_SIZE, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits[0]
    return found


@pytest.fixture
def convert(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return the child's part of a conversion of one case's model, in this process."""

    def convert(case: Case, **changed: Any) -> Path:
        kind, changes, architecture, numbers = case
        path = write(build(kind, changes), architecture, tmp_path / "model.gguf", numbers | changed)
        gguf_convert.convert(path, tmp_path / "converted", tokenizer_only=False)
        return tmp_path / "converted"

    yield convert
    set_tqdm_hook(None)


@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_computes_what_the_written_one_computes(case: str, convert: Callable[..., Path]) -> None:
    kind, changes, _, _ = CASES[case]
    converted = AutoModelForCausalLM.from_pretrained(convert(CASES[case]), attn_implementation="eager").eval()
    expected = logits(build(kind, changes))
    torch.testing.assert_close(logits(converted), expected, rtol=0, atol=1e-4 * float(expected.std()))


#: Left out of a file, with the value that llama.cpp takes then.
ABSENT: dict[str, tuple[str, dict[str, Any]]] = {
    "rope.freq_base": ("gemma3", {"rope_parameters": {"full_attention": rope(1e4), "sliding_attention": rope(1e4)}}),
    "rope.dimension_count": ("nemotron", {"rope_parameters": rope(500.0, partial_rotary_factor=1.0)}),
    "attention.key_length": ("qwen3", {"head_dim": 16}),
}


@pytest.mark.parametrize("name", ABSENT)
def test_a_number_that_a_file_leaves_out_is_llama_cpps_default(name: str, convert: Callable[..., Path]) -> None:
    kind, changes, architecture, numbers = CASES[ABSENT[name][0]]
    changes = changes | ABSENT[name][1]
    left_out = {name: None} | ({"attention.value_length": None} if "key" in name else {})
    converted = convert((kind, changes, architecture, numbers), **left_out)
    model = AutoModelForCausalLM.from_pretrained(converted, attn_implementation="eager").eval()
    expected = logits(build(kind, changes))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4 * float(expected.std()))


REFUSED: list[tuple[str, str, Any]] = [
    ("llama", "rope.dimension_count", 8),
    ("llama", "attention.value_length", 8),
    ("llama", "attention.sliding_window", 64),
    ("llama", "attention.causal", False),
    ("llama", "logit_scale", 0.5),
    ("llama", "residual_scale", 0.22),
    ("llama", "rope.scaling.factor", 4.0),
    ("llama", "rope.scaling.type", "yarn"),
    ("llama", "rope.scale_linear", 2.0),
    ("llama", "expert_count", 8),
    ("llama", "attention.temperature_scale", 0.1),
    ("llama", "attention.head_count_kv", [2, 1, 2]),
    ("qwen2", "final_logit_softcapping", 30.0),
    ("qwen3", "rope.freq_base_swa", 90.0),
    ("qwen2", "a.number.of.tomorrow", 7),
    ("starcoder2", "rope.dimension_count", 8),
    ("starcoder2 with a window", "attention.sliding_window_pattern", 2),
    ("gemma2", "attention.scale", 0.5),
]


@pytest.mark.parametrize(("case", "name", "value"), REFUSED)
def test_a_number_that_is_not_supported_is_refused_by_its_name(
    case: str, name: str, value: Any, convert: Callable[..., Path]
) -> None:
    with pytest.raises(NotConverted) as refusal:
        convert(CASES[case], **{name: value})
    shown = f"{value:g}" if isinstance(value, float) and value >= 1 else str(value)[:4]
    assert f"{CASES[case][2]}.{name} = {shown}" in str(refusal.value)


def test_numbers_that_change_nothing_are_accepted(convert: Callable[..., Path]) -> None:
    neutral = {"rope.scaling.type": "none", "rope.scaling.factor": 8.0, "expert_count": 0, "logit_scale": 1.0,
               "attention.sliding_window": 4096, "attention.causal": True, "pooling_type": 0}  # fmt: skip
    assert (convert(CASES["llama"], **neutral) / "config.json").is_file()
