"""Weights of GGUF files: each is read number by number as it was written, in whole or in parts, or refused by name."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from bench.systems.models import DEMO
from specdec.checkpoints.gguf.dequantise import dequantise
from specdec.checkpoints.gguf.file import KINDS, GgufFile
from specdec.checkpoints.vocabulary import load_vocabulary
from specdec.contract.errors import SpecdecError
from specdec.engine.model.gguf_state import gguf_state
from specdec.engine.parallel.slices import SliceReader
from specdec.engine.parallel.splitting import Splitting
from specdec.learning.trained_model import load_model
from tests.support.gguf_models import CASES, build, load, require_same_logits, stated_by, tensors_of, write, write_case


def parts(case: str) -> tuple[str, dict[str, object], dict[str, np.ndarray]]:
    """Return architecture, numbers and tensors of a case's file."""
    kind, changes, architecture, numbers = CASES[case]
    model = build(kind, changes)
    return architecture, stated_by(model.config) | numbers, tensors_of(model, architecture)


#: Changed tensors (None: left out), reason and what is told.
FAULTS: list[tuple[str, dict[str, np.ndarray | None], str, str]] = [
    ("llama", {"blk.2.ffn_up.weight": None}, "INVALID_REQUEST",
     "lacks the tensor blk.2.ffn_up.weight, which its model of type llama needs"),
    ("llama", {"output_norm.weight": None}, "INVALID_REQUEST", "lacks the tensor output_norm.weight"),
    ("llama", {"token_embd.weight": None}, "INVALID_REQUEST", "lacks the matrix token_embd.weight"),
    ("qwen3", {"blk.1.attn_q_norm.weight": None}, "INVALID_REQUEST", "lacks the tensor blk.1.attn_q_norm.weight"),
    ("qwen3moe", {"blk.0.ffn_up_exps.weight": None}, "INVALID_REQUEST", "lacks the tensor blk.0.ffn_up_exps.weight"),
    ("starcoder2", {"blk.1.attn_k.bias": None}, "INVALID_REQUEST", "lacks the tensor blk.1.attn_k.bias"),
    ("llama", {"blk.0.attn_q.weight": np.ones((32, 40), np.float32)}, "INVALID_REQUEST",
     "has the tensor blk.0.attn_q.weight of the shape [32, 40], and its metadata says [32, 32]"),
    ("mixtral", {"blk.0.ffn_down_exps.weight": np.ones((3, 32, 48), np.float32)}, "INVALID_REQUEST",
     "has the tensor blk.0.ffn_down_exps.weight of the shape [3, 32, 48], and its metadata says [4, 32, 48]"),
    ("llama", {"blk.1.attn_v.bias": np.ones(16, np.float32)}, "UNSUPPORTED",
     "has the tensor blk.1.attn_v.bias, which no model of type llama has (1 such in all)"),
    ("qwen2", {"rope_freqs.weight": np.full(4, 2, np.float32)}, "UNSUPPORTED", "has the tensor rope_freqs.weight"),
    ("llama", {"blk.3.attn_q.weight": np.ones((32, 32), np.float32)}, "UNSUPPORTED",
     "has the tensor blk.3.attn_q.weight"),
    ("llama", {"blk.0.attn_norm.weight": np.ones(32, np.int32)}, "UNSUPPORTED",
     "has the tensor blk.0.attn_norm.weight of type I32, which models do not use for weights"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changed", "reason", "told"), FAULTS)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(
    case: str, changed: dict[str, np.ndarray | None], reason: str, told: str, tmp_path: Path
) -> None:
    architecture, numbers, tensors = parts(case)
    held = {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}
    path = write(tmp_path / "model.gguf", architecture, numbers, held)
    with pytest.raises(SpecdecError) as refused:
        gguf_state(path)
    assert refused.value.reason == reason
    assert f"{str(path)!r}" in refused.value.message
    assert told in refused.value.message


@pytest.mark.parametrize("case", ["llama with biases", "granitemoe"])
def test_queries_keys_and_values_and_the_inputs_of_experts_may_be_one_tensor(case: str, tmp_path: Path) -> None:
    architecture, numbers, tensors = parts(case)
    for layer in range(3):
        for kind in ("weight", "bias"):
            apart = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}", None) for part in "qkv"]
            if apart[0] is not None:
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(apart)
        experts = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight", None) for part in ("gate", "up")]
        if experts[0] is not None:
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(experts, axis=1)
    path = write(tmp_path / "model.gguf", architecture, numbers, tensors)
    require_same_logits(load(path), build(*CASES[case][:2]))


def test_queries_keys_and_values_of_phi_3_may_be_apart(tmp_path: Path) -> None:
    architecture, numbers, tensors = parts("phi3")
    for layer in range(3):
        apart = np.split(tensors.pop(f"blk.{layer}.attn_qkv.weight"), [32, 48])
        tensors |= {f"blk.{layer}.attn_{part}.weight": array for part, array in zip("qkv", apart, strict=True)}
    path = write(tmp_path / "model.gguf", architecture, numbers, tensors)
    require_same_logits(load(path), build(*CASES["phi3"][:2]))


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS.values() if kind.name[0] not in "I" or "Q" in kind.name])
def test_quantised_numbers_are_those_of_llama_cpp(kind: str) -> None:
    """The package `gguf`, which is llama.cpp's, is the oracle, on random bytes."""
    number = GGMLQuantizationType[kind]
    data = np.random.default_rng(1).integers(0, 256, (3, 5 * KINDS[number].num_bytes), np.uint8)
    with np.errstate(all="ignore"):
        try:
            expected = dequantize(data, number)
        except NotImplementedError:
            with pytest.raises(SpecdecError, match=f"weights of type {kind} are not supported"):
                dequantise(data, number)
            return
        found = dequantise(data, number)
    np.testing.assert_array_equal(found.view(np.uint32), expected.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")])
def test_weights_have_the_narrowest_dtype_that_holds_them(kind: str, dtype: str, tmp_path: Path) -> None:
    architecture, numbers, tensors = parts("qwen2")
    rounded = {name: array.astype(np.float16 if array.ndim > 1 else np.float32) for name, array in tensors.items()}
    vectors = {name: np.round(array) for name, array in rounded.items() if array.ndim == 1}
    path = write(tmp_path / "model.gguf", architecture, numbers, rounded | vectors, kind)
    stored = {name: dequantise(tensor.data, tensor.kind) for name, tensor in GgufFile(path).tensors.items()}
    state = gguf_state(path)
    assert {str(weight.dtype).removeprefix("torch.") for weight in state.values()} == {dtype}
    for layer in range(3):
        read = state[f"model.layers.{layer}.mlp.up_proj.weight"][...]
        np.testing.assert_array_equal(read.float().numpy(), stored[f"blk.{layer}.ffn_up.weight"])


def test_a_file_is_loaded_for_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kind, changes, architecture, numbers = CASES["gemma3"]
    changes = {**changes, "vocab_size": len(load_vocabulary(DEMO / "target"))}
    path = write_case((kind, changes, architecture, numbers), tmp_path / "a.gguf", tokenizer=DEMO / "target")
    require_same_logits(load_model(str(path)), build(kind, changes))


def test_ranks_read_the_parts_of_a_file_that_they_read_of_a_checkpoint(tmp_path: Path) -> None:
    kind, changes, *_ = CASES["llama with biases"]
    model = build(kind, changes)
    model.save_pretrained(tmp_path)
    architecture, numbers, tensors = parts("llama with biases")
    path = write(tmp_path / "model.gguf", architecture, numbers, tensors)
    shapes = {name: parameter.shape for name, parameter in model.state_dict().items()}
    for rank in range(2):
        cut_of = Splitting.of(model.config, rank, 2).cut_of
        with SliceReader(str(tmp_path), tmp_path) as checkpoint, SliceReader(str(path), tmp_path) as file:
            of_checkpoint, of_file = checkpoint.parts(shapes, cut_of), file.parts(shapes, cut_of)
            assert of_file.keys() == of_checkpoint.keys()
            assert all(torch.equal(of_file[name][...], of_checkpoint[name][...]) for name in of_file)
            assert file.num_bytes == checkpoint.num_bytes < 0.6 * file.all_bytes


@pytest.mark.parametrize("case", ["mixtral", "gpt2", "gemma3"])
def test_a_part_of_a_weight_is_the_part_of_the_whole(case: str, tmp_path: Path) -> None:
    architecture, numbers, tensors = parts(case)
    whole, rng = build(*CASES[case][:2]).state_dict(), random.Random(5)
    for name, weight in gguf_state(write(tmp_path / "model.gguf", architecture, numbers, tensors)).items():
        index = tuple(slice(*sorted(rng.choices(range(size + 1), k=2))) for size in weight.shape)
        for chosen in (index, index[0], ...):
            torch.testing.assert_close(weight[chosen], whole[name][chosen], rtol=0, atol=1e-6)
