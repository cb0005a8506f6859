"""Device memory that is left after loading a model."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from specdec.engine.cuda_graphs.capture import CudaCapture
from tests.support.cuda_graphs_rig import build, load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine: no memory was counted"),
]
CUDA = torch.device("cuda:0")


def test_fusing_layers_frees_their_parts(tmp_path: Path) -> None:
    """The parts have more than a megabyte each, because smaller ones share cached memory."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 64, "num_attention_heads": 16}
    model = build("qwen3", tmp_path, config_overrides=sizes)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(CUDA) - torch.cuda.memory_allocated(CUDA)
    worker = load(model, "eager", device="cuda:0")
    kept = torch.cuda.memory_reserved(CUDA) - torch.cuda.memory_allocated(CUDA) - before
    assert worker.shape.num_kv_blocks
    assert kept < 40 << 20  # one layer's parts have 64 MiB, both layers' 128


def test_a_failed_recording_frees_its_memory() -> None:
    numbers = torch.ones(1 << 20, device=CUDA)

    def allocates_and_fails() -> None:
        (numbers + numbers).sum().item()

    with pytest.raises(RuntimeError):
        CudaCapture(CUDA)(allocates_and_fails)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(CUDA)
    kept = torch.empty(64 << 20, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.memory_reserved(CUDA) >= before + kept.numel()
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(CUDA) == before  # a pool of recordings would keep it
