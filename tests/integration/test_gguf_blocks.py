"""Weights of GGUF files as they are: kernels multiply by the file's own blocks, and represent its numbers exactly."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from bench.systems.gguf_writing import add_tokenizer
from bench.systems.models import DEMO
from specdec.checkpoints.artifact_cache import cache_directory
from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.gguf.weights import Weight
from specdec.contract.errors import InvalidRequest
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.kept_worker import load_kept_worker
from specdec.engine.kernels.library import load_library
from specdec.engine.loader import load_worker
from specdec.engine.native.file_rows import widened
from specdec.engine.native.native_runner import NativeRunner
from specdec.engine.options import CompileOptions, LoadRequest
from tests.integration.test_native_kernels import compile_with, needs_x86

TARGET = DEMO / "target"
#: Kinds of blocks, and the bytes of 256 weights as the kernels hold them. Scales take a byte instead of six bits in
#: Q4_K and Q5_K, and an offset that is not stored in those of 32 weights without one.
HELD_BYTES = {
    "Q4_0": 160, "Q4_1": 160, "Q5_0": 192, "Q5_1": 192, "Q8_0": 288, "IQ4_NL": 288, "Q3_K": 210, "Q4_K": 148,
    "Q5_K": 180, "Q6_K": 210,
}  # fmt: skip
#: Offsets of the binary16 numbers in a block; all other bytes are integers.
SCALES_AT = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
}
CONFIG = LlamaConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, pad_token_id=None,
)  # fmt: skip
MATRICES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
PROMPT = tuple(range(2, 41))
TABLE = (0, 1, 2)


def random_rows(kind: str, num_rows: int, inputs: int, seed: int) -> NDArray[np.uint8]:
    """Return rows of blocks with any integers, uint8 [rows, bytes]."""
    rng = np.random.default_rng(seed)
    num_weights, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if kind in ("F32", "F16", "BF16"):
        numbers = torch.from_numpy(rng.normal(0, 0.05, (num_rows, inputs)))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return numbers.to(dtype).view(torch.uint8).numpy()
    blocks = rng.integers(0, 256, (num_rows, inputs // num_weights, num_bytes), dtype=np.uint8)
    for at in SCALES_AT.get(kind, (0,)):
        scales = rng.normal(0, 2e-3 if "K" not in kind else 1e-4, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def numbers_of(rows: NDArray[np.uint8], kind: str) -> torch.Tensor:
    """Return the numbers that llama.cpp's own package reads, float32 [rows, inputs]."""
    return torch.from_numpy(gguf.quants.dequantize(rows, GGMLQuantizationType[kind]).astype(np.float32))


@dataclass(frozen=True)
class Written:
    path: Path
    model: LlamaForCausalLM
    """transformers' model with the same numbers."""


def write(path: Path, kind: str, kinds: Mapping[str, str] | None = None, *, scale: float | None = None) -> Written:
    """Write a Llama with random blocks as llama.cpp's converter does.

    Args:
        path: the file.
        kind: kind of the matrices.
        kinds: other kinds of some matrices.
        scale: scale of the first block of one matrix.
    """
    model = LlamaForCausalLM(CONFIG).eval()
    state, writer = model.state_dict(), gguf.GGUFWriter(path, "llama")
    heads = {"attn_q": CONFIG.num_attention_heads, "attn_k": CONFIG.num_key_value_heads}
    numbers = {
        "context_length": CONFIG.max_position_embeddings, "embedding_length": CONFIG.hidden_size,
        "block_count": CONFIG.num_hidden_layers, "feed_forward_length": CONFIG.intermediate_size,
        "attention.head_count": CONFIG.num_attention_heads, "attention.head_count_kv": CONFIG.num_key_value_heads,
        "vocab_size": CONFIG.vocab_size, "rope.dimension_count": CONFIG.hidden_size // CONFIG.num_attention_heads,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"llama.{name}", number)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    add_tokenizer(writer, TARGET)
    for seed, (name, tensor) in enumerate(state.items()):
        place = name.split(".")
        if tensor.ndim == 1:
            stored = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}.get(place[-2])
            tensor.copy_(1 + 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
            writer.add_tensor(f"blk.{place[2]}.{stored}.weight" if stored else "output_norm.weight", tensor.numpy())
            continue
        stored = MATRICES.get(".".join(place[-3:-1]), "")
        of_tensor = (kinds or {}).get(stored or place[-2], kind)
        rows = random_rows(of_tensor, *tensor.shape, seed)
        whole = (
            f"blk.{place[2]}.{stored}.weight"
            if stored
            else {"embed_tokens": "token_embd", "lm_head": "output"}[place[-2]] + ".weight"
        )
        if scale is not None and whole == "blk.1.ffn_down.weight":
            rows[0, :2] = np.array([scale], np.float16).view(np.uint8)
        writer.add_tensor(whole, rows, raw_dtype=GGMLQuantizationType[of_tensor])
        read = numbers_of(rows, of_tensor)
        if stored in heads:  # the file has the rows in the order of llama.cpp's rotary embedding
            read = read.view(heads[stored], -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        tensor.copy_(read)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, model)


def request(path: Path, kept_in: Path | None = None, compiled_in: Path | None = None) -> LoadRequest:
    compiling = CompileOptions("native", directory=compiled_in or cache_directory(os.environ) / "compiled")
    return LoadRequest(str(path), device="cpu", dtype="auto", num_kv_blocks=8, compiling=compiling, kept_in=kept_in)


def logits_of(worker: Worker, ends: Sequence[int] = (20, 25, *range(26, len(PROMPT) + 1))) -> torch.Tensor:
    """Return the logits of steps that end there: of a prefill chunk, of five rows, and of single rows."""
    steps = [
        worker.execute(StepPlan((SequenceSlice(PROMPT[start:end], start, TABLE[: -(-end // 16)], end - start),)))
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    return torch.cat(steps)


def assert_computes(worker: Worker, model: LlamaForCausalLM) -> None:
    """A row has the logits of transformers, and the same bits whatever else is in its step."""
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    logits = logits_of(worker)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.std()))
    assert torch.equal(logits_of(worker, [3, 5, 13, len(PROMPT)]), logits)


def matrix_bytes(kind: str) -> float:
    """Return the bytes of all matrices if each were of this kind."""
    num_weights, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    layers = CONFIG.num_hidden_layers * (256 * 256 * 3 + 3 * 256 * 512)
    return (layers + 2 * 2048 * 256) / num_weights * num_bytes


@pytest.mark.parametrize("kind", [*HELD_BYTES, "F32", "F16", "BF16", "Q2_K"])
def test_the_numbers_of_every_kind_of_block_are_those_of_llama_cpps_own_package(kind: str, tmp_path: Path) -> None:
    written = write(tmp_path / "model.gguf", kind)
    library = load_library(cache_directory(os.environ) / "compiled")
    file = GgufFile(written.path)
    for name in ("token_embd.weight", "blk.1.ffn_down.weight"):
        tensor = file.tensors[name]
        assert torch.equal(widened(Weight((tensor,)), library), numbers_of(tensor.data, kind))


@pytest.mark.parametrize("kind", HELD_BYTES)
def test_a_model_of_blocks_computes_what_its_numbers_say_in_about_the_files_memory(kind: str, tmp_path: Path) -> None:
    written = write(tmp_path / "model.gguf", kind)
    worker = load_worker(request(written.path))
    assert isinstance(worker, NativeRunner)
    assert_computes(worker, written.model)
    small = 64 * 1024  # norms and rotary tables
    held = matrix_bytes("F32") / 4 * HELD_BYTES[kind] / 256
    embeddings = (
        2048
        * 256
        / 256
        * GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
        * (256 // GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])
    )
    in_panels = held * (1 - 2048 * 256 / (matrix_bytes("F32") / 4))
    assert worker.weight_bytes == pytest.approx(in_panels + embeddings, abs=small)


#: Kinds of single matrices, as the mixtures of llama.cpp have them, and matrices of the same kinds in all layers.
MIXTURES = {
    "more bits for values": ("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "lm_head": "Q6_K"}),
    "a kind without a layout": ("Q4_K", {"attn_k": "Q2_K", "ffn_up": "Q2_K", "embed_tokens": "Q2_K"}),
    "plain numbers": ("F16", {"ffn_gate": "Q8_0", "attn_q": "BF16", "lm_head": "F32"}),
}  # fmt: skip


@pytest.mark.parametrize("mixture", MIXTURES)
def test_matrices_of_several_kinds_are_multiplied_as_one(mixture: str, tmp_path: Path) -> None:
    written = write(tmp_path / "model.gguf", *MIXTURES[mixture])
    assert_computes(load_worker(request(written.path)), written.model)


def test_a_later_start_packs_the_file_again_and_keeps_no_weights(tmp_path: Path) -> None:
    written = write(tmp_path / "model.gguf", "Q4_K", {"attn_v": "Q6_K"})
    kept_in = tmp_path / "kept"
    first = load_worker(request(written.path, kept_in))
    (kept,) = kept_in.iterdir()
    assert kept.stat().st_size < matrix_bytes("F32") / 4
    second = load_kept_worker(request(written.path, kept_in))
    assert second is not None
    assert torch.equal(logits_of(second), logits_of(first))
    assert second.shape == first.shape
    written.path.write_bytes(written.path.read_bytes()[:-4096] + bytes(4096))
    assert load_kept_worker(request(written.path, kept_in)) is None  # another file


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("-march=znver3", marks=needs_x86("avx2", "fma", "f16c"), id="AVX2"),
        pytest.param("-march=x86-64", marks=[needs_x86(), pytest.mark.full], id="SSE2"),
    ],
)
def test_blocks_are_multiplied_on_processors_with_narrower_vectors(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(flags, tmp_path, monkeypatch)
    others = {
        "attn_q": "Q4_1",
        "attn_k": "Q5_1",
        "attn_v": "Q6_K",
        "ffn_down": "Q5_K",
        "ffn_up": "Q8_0",
        "lm_head": "Q3_K",
    }
    written = write(tmp_path / "model.gguf", "Q4_K", others)
    assert_computes(load_worker(request(written.path, compiled_in=tmp_path / "kept")), written.model)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0"])
def test_an_offset_that_binary16_does_not_hold_is_computed_all_the_same(kind: str, tmp_path: Path) -> None:
    written = write(tmp_path / "model.gguf", kind, scale=9000.0)
    with torch.inference_mode():
        expected = written.model(torch.tensor([PROMPT])).logits[0]
    logits = logits_of(load_worker(request(written.path)))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.std()))


def test_weights_that_give_no_numbers_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "Q4_0", scale=float("nan")).path
    with pytest.raises(InvalidRequest, match="gives no numbers"):
        load_worker(request(path))
