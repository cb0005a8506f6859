"""Native kernels keep weights in a shorter format if it is exact.

Plain numbers and fine scales give every logit the same bits. Blocks with offsets are summed in another order.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file

from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.loader import load_worker
from specdec.engine.native.native_runner import NativeRunner
from specdec.engine.options import CompileOptions, LoadRequest
from tests.integration.test_native_kernels import compile_with, needs_x86
from tests.support.tiny_models import build_tiny_model

PROMPT = tuple(range(2, 41))
#: Wide enough for the layers to outweigh the embeddings.
WIDE = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}
TABLE = (0, 1, 2)

#: The smallest and largest numbers of each kind, and neighbours of powers of two; binary16 has its own smallest ones.
ODD_NUMBERS = {
    torch.bfloat16: [1e-40, -1e-40, 1.17e-38, -3.0e30, 0.00787, -0.0],
    torch.float16: [6e-8, -6e-8, 6.1e-5, -5.9e-5, 65504.0, -0.0],
}


def store_as(directory: Path, dtype: torch.dtype, *, odd: bool = False) -> None:
    """Round a checkpoint's weights to `dtype` and store them; `odd` puts extreme values into the MLP."""
    path = directory / "model.safetensors"
    weights = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    if odd:
        for name, tensor in weights.items():
            if "up_proj" in name:
                numbers = torch.tensor(ODD_NUMBERS[dtype], dtype=dtype)
                tensor[0, : len(numbers)] = numbers
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config))


def round_as(directory: Path, kind: GGMLQuantizationType) -> None:
    """Round a checkpoint's matrices as llama.cpp's format does, and store them in float32."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            weights[name] = torch.from_numpy(quants.dequantize(quants.quantize(tensor.float().numpy(), kind), kind))
    save_file(weights, path, metadata={"format": "pt"})


def load(directory: Path, dtype: str, kept_in: Path | None = None) -> NativeRunner:
    compiling = CompileOptions("native", directory=kept_in)
    worker = load_worker(
        LoadRequest(str(directory), device="cpu", dtype=dtype, num_kv_blocks=6, compiling=compiling, self_check=False)
    )
    assert isinstance(worker, NativeRunner)
    return worker


def logits_of(worker: NativeRunner) -> list[torch.Tensor]:
    """Return the logits of a prefill chunk, of five rows, and of single rows."""
    ends = [20, 25, *range(26, len(PROMPT) + 1)]
    starts = [0, *ends[:-1]]
    return [
        worker.execute(StepPlan((SequenceSlice(PROMPT[start:end], start, TABLE[: -(-end // 16)], end - start),)))
        for start, end in zip(starts, ends, strict=True)
    ]


def assert_close(compact: NativeRunner, whole: NativeRunner) -> None:
    """Compare logits of the same weights, whose sums have another order."""
    for got, expected in zip(logits_of(compact), logits_of(whole), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * float(expected.std()))


@pytest.mark.parametrize("odd", [False, True], ids=["ordinary numbers", "extreme numbers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_compact_weights_give_the_bits_of_float32_in_about_half_the_memory(
    architecture: str, dtype: torch.dtype, odd: bool, tmp_path: Path
) -> None:
    directory = build_tiny_model(architecture, tmp_path / "model", vocabulary_size=96, context=64)
    store_as(directory, dtype, odd=odd)
    compact, whole = load(directory, "auto"), load(directory, "float32")
    for got, expected in zip(logits_of(compact), logits_of(whole), strict=True):
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    assert compact.weight_bytes < 0.6 * whole.weight_bytes
    assert compact.shape == whole.shape


def round_as_q6_k(directory: Path) -> None:
    """Round a checkpoint's matrices to numbers that Q6_K can have, for which the package has no quantiser.

    Sixteen numbers share a scale, a binary16 number times an integer of 8 bits; the numbers are 6 bits wide.
    """
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            groups = tensor.float().view(len(tensor), -1, 16)
            outer = (groups.abs().amax() / 4000).half().float()
            scale = outer * (groups.abs().amax(-1, keepdim=True) / 31 / outer).round().clamp(1, 127)
            weights[name] = ((groups / scale).round().clamp(-32, 31) * scale).flatten(1)
    save_file(weights, path, metadata={"format": "pt"})


def test_numbers_of_q6_k_keep_their_bits_in_a_fraction_of_the_memory(tmp_path: Path) -> None:
    directory = build_tiny_model("llama", tmp_path / "model", vocabulary_size=96, context=64, config_overrides=WIDE)
    round_as_q6_k(directory)
    compact, whole = load(directory, "auto"), load(directory, "float32")
    assert all(map(torch.equal, logits_of(compact), logits_of(whole)))
    assert compact.weight_bytes < 0.45 * whole.weight_bytes


@pytest.mark.parametrize(("kind", "share"), [(GGMLQuantizationType.Q4_1, 0.25), (GGMLQuantizationType.Q8_0, 0.38)])
def test_quantised_weights_keep_their_numbers_in_a_fraction_of_the_memory(
    kind: GGMLQuantizationType, share: float, tmp_path: Path
) -> None:
    directory = build_tiny_model("llama", tmp_path / "model", vocabulary_size=96, context=64, config_overrides=WIDE)
    round_as(directory, kind)
    compact, whole = load(directory, "auto"), load(directory, "float32")
    assert_close(compact, whole)
    assert compact.weight_bytes < share * whole.weight_bytes


def test_groups_with_zero_and_with_the_largest_scales_are_stored_exactly(tmp_path: Path) -> None:
    directory = build_tiny_model("llama", tmp_path / "model", vocabulary_size=96, context=64, config_overrides=WIDE)
    path = directory / "model.safetensors"
    weights = load_file(path)
    up = weights["model.layers.0.mlp.up_proj.weight"]
    up[0, :32], up[1, :32], up[2, :32] = 0.0, -0.25, torch.linspace(-60000.0, 60000.0, 32)
    save_file(weights, path, metadata={"format": "pt"})
    for kind in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        round_as(directory, kind)
        assert_close(load(directory, "auto"), load(directory, "float32"))


def test_a_scale_that_binary16_rounds_does_not_change_another_output(tmp_path: Path) -> None:
    """Its integers would not fit into 4 bits."""
    directory = build_tiny_model("llama", tmp_path / "model", vocabulary_size=96, context=64, config_overrides=WIDE)
    path = directory / "model.safetensors"
    weights = load_file(path)
    down = torch.randint(-8, 8, weights["model.layers.0.mlp.down_proj.weight"].shape).float()
    down[:, ::32] = -8
    down *= 2.0**-9
    down[3, :32] = 0
    down[3, 5], down[3, 6] = -9 * 2.0**-24, 3 * 2.0**-24
    weights["model.layers.0.mlp.down_proj.weight"] = down
    save_file(weights, path, metadata={"format": "pt"})
    assert_close(load(directory, "auto"), load(directory, "float32"))


def test_a_checkpoint_in_float32_stays_in_float32(tmp_path: Path) -> None:
    directory = build_tiny_model("llama", tmp_path / "model", vocabulary_size=96, context=64)
    auto, whole = load(directory, "auto"), load(directory, "float32")
    assert auto.weight_bytes == whole.weight_bytes
    assert all(map(torch.equal, logits_of(auto), logits_of(whole)))


def test_a_weight_that_does_not_fit_into_16_bits_stays_in_float32(tmp_path: Path) -> None:
    directory = build_tiny_model("llama", tmp_path / "model", vocabulary_size=96, context=64)
    store_as(directory, torch.bfloat16)
    path = directory / "model.safetensors"
    weights = {name: tensor.float() for name, tensor in load_file(path).items()}
    weights["model.layers.0.mlp.down_proj.weight"][3, 5] = 0.1
    save_file(weights, path, metadata={"format": "pt"})
    compact, whole = load(directory, "auto"), load(directory, "float32")
    for got, expected in zip(logits_of(compact), logits_of(whole), strict=True):
        assert torch.equal(got, expected)
    num_bytes = weights["model.layers.0.mlp.down_proj.weight"].nbytes
    assert 0 < compact.weight_bytes - num_bytes < 0.6 * whole.weight_bytes


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("-march=znver3", marks=[needs_x86("avx2", "fma", "f16c"), pytest.mark.full], id="AVX2"),
        pytest.param("-march=x86-64", marks=[needs_x86(), pytest.mark.full], id="SSE2"),
    ],
)
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.bfloat16, id="bfloat16"), pytest.param(torch.float16, marks=pytest.mark.full, id="float16")],
)
def test_compact_weights_give_the_numbers_of_float32_on_processors_with_narrower_vectors(
    dtype: torch.dtype, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(flags, tmp_path, monkeypatch)
    for rounded in (None, "Q6_K", GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        directory = build_tiny_model(
            "llama", tmp_path / str(rounded), vocabulary_size=96, context=64, config_overrides=WIDE
        )
        if rounded is None:
            store_as(directory, dtype, odd=True)
        elif isinstance(rounded, str):
            round_as_q6_k(directory)
        else:
            round_as(directory, rounded)
        compact, whole = (load(directory, name, tmp_path / "kept") for name in ("auto", "float32"))
        if isinstance(rounded, GGMLQuantizationType):
            assert_close(compact, whole)
        else:
            assert all(map(torch.equal, logits_of(compact), logits_of(whole)))
        assert compact.weight_bytes < 0.8 * whole.weight_bytes
