"""The comparison of a worker with its model before it serves, for every way of running steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.systems.models import DEMO
from specdec.contract.errors import Unsupported
from specdec.engine.base import ModelShape
from specdec.engine.cuda_graphs.static_attention import GatheredAttention
from specdec.engine.loader import load_worker
from specdec.engine.model import self_check
from specdec.engine.model.batch import AttentionKind
from specdec.engine.native.model_layout import ModelLayout
from specdec.engine.native.native_runner import NativeRunner
from specdec.engine.options import CompileOptions, LoadRequest
from tests.support.cuda_graphs_rig import CountedCapture
from tests.support.tiny_models import ARCHITECTURES, build_tiny_model

REFUSAL = "type mistral is computed differently here than by transformers"


def load(directory: Path, backend: str, dtype: str = "float32", *, num_kv_blocks: int = 16, **options: object) -> None:
    compiling = CompileOptions(backend, (1, 2, 3, 5), capture=CountedCapture() if backend == "cuda-graphs" else None)
    load_worker(
        LoadRequest(
            str(directory), device="cpu", dtype=dtype, num_kv_blocks=num_kv_blocks, compiling=compiling, **options
        )
    )


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("mistral", tmp_path_factory.mktemp("mistral"), vocabulary_size=96, context=256)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_native_kernels_that_ignore_a_window_are_refused(
    windowed: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(windowed, "native", dtype)
    lay_out = ModelLayout._layer

    def without_window(self, layer, cache, index, kind, is_int8):
        return lay_out(self, layer, cache, index, AttentionKind(None, kind.queries_per_kv_head, None), is_int8)

    monkeypatch.setattr(ModelLayout, "_layer", without_window)
    with pytest.raises(Unsupported, match=REFUSAL):
        load(windowed, "native", dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_graphs_that_ignore_a_window_are_refused(
    windowed: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(windowed, "cuda-graphs", dtype)
    view = GatheredAttention._view
    monkeypatch.setattr(
        GatheredAttention,
        "_view",
        lambda self, kind, inputs: view(self, AttentionKind(None, kind.queries_per_kv_head, None), inputs),
    )
    with pytest.raises(Unsupported, match=REFUSAL):
        load(windowed, "cuda-graphs", dtype)
    load(windowed, "cuda-graphs", dtype, self_check=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 9), marks=pytest.mark.full)])
def test_no_seed_of_a_correctly_computed_model_is_refused(
    architecture: str, dtype: str, seeds: range, tmp_path: Path
) -> None:
    for seed in seeds:
        build_tiny_model(architecture, tmp_path, seed=seed, vocabulary_size=96, context=256)
        load(tmp_path, "auto", dtype)
        if architecture in ("llama", "qwen3"):
            load(tmp_path, "eager", dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("role", ["draft", "target"])
def test_the_demo_pair_is_not_refused(role: str, dtype: str) -> None:
    load(DEMO / role, "auto", dtype)
    load(DEMO / role, "eager", dtype)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5])
def test_a_pool_of_few_blocks_is_checked_within_its_size(windowed: Path, num_blocks: int) -> None:
    load(windowed, "eager", num_kv_blocks=num_blocks)


def shape_of(num_kv_blocks: int, context: int) -> ModelShape:
    return ModelShape(96, context, (), "", "", num_kv_blocks, "float32", "cpu")


@pytest.mark.parametrize("window", [4, 40, 500])
def test_both_sequences_are_longer_than_the_smallest_window(window: int) -> None:
    kinds = [AttentionKind(None, 1, None), AttentionKind(window, 1, None), AttentionKind(2000, 1, None)]
    assert min(self_check.sequence_lengths(shape_of(256, 4096), kinds)) > window + 8


def test_every_token_of_both_sequences_is_run_once_and_in_order() -> None:
    for lengths in ((56, 47), (1048, 1039), (16,), (2,), (1,)):
        for index, length in enumerate(lengths):
            spans = [span for step in self_check._steps(lengths) for span in step if span[0] == index]
            assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans)][:-1]
            assert spans[-1][2] == length


def test_a_worker_that_returns_nan_is_refused(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = NativeRunner.execute
    monkeypatch.setattr(NativeRunner, "execute", lambda self, plan: execute(self, plan) * torch.nan)
    with pytest.raises(Unsupported, match="differ by inf"):
        load(windowed, "native")
