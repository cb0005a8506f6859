"""CUDA settings of a process that loads a model, and the size of its KV pool beside another process; needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from specdec.contract.errors import InvalidRequest
from specdec.engine.cuda_device import DeviceMemory, kv_pool_bytes
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from tests.support.tiny_models import build_tiny_model

GIB = 1 << 30
TOTAL = 80 * GIB
SHARE = 0.8


@dataclass
class Process:
    """A process that loads its weights and then makes its KV pool."""

    weights: int
    utilization: float | None
    pool: int = 0

    def make_pool(self, free_bytes: int) -> None:
        memory = DeviceMemory(TOTAL, free_bytes, self.weights)
        self.pool = kv_pool_bytes(memory, utilization=self.utilization, kv_share=SHARE)


def pools(order: tuple[str, str], utilizations: dict[str, float | None]) -> dict[str, int]:
    """Return the pools of a target and a draft that start one after the other in the given order."""
    weights = {"target": 16 * GIB, "draft": 1 * GIB}
    free_bytes, processes = TOTAL, {}
    for role in order:
        process = processes[role] = Process(weights[role], utilizations[role])
        process.make_pool(free_bytes - process.weights)
        free_bytes -= process.weights + process.pool
    return {role: process.pool for role, process in processes.items()}


def test_pool_sizes_do_not_depend_on_the_order_of_start_if_each_process_has_a_share() -> None:
    shares: dict[str, float | None] = {"target": 0.6, "draft": 0.3}
    found = pools(("draft", "target"), shares)
    assert found == pools(("target", "draft"), shares)
    assert found == {"target": int((48 - 16) * GIB * SHARE), "draft": int((24 - 1) * GIB * SHARE)}


def test_a_process_without_a_share_takes_the_free_memory() -> None:
    assert kv_pool_bytes(DeviceMemory(TOTAL, 50 * GIB, 30 * GIB), utilization=None, kv_share=0.9) == 45 * GIB


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (DeviceMemory(TOTAL, 60 * GIB, 20 * GIB), r"0.25 of 80.0 GiB leaves 0.0 GiB beside 20.0 GiB of weights"),
        (DeviceMemory(TOTAL, 10 * GIB, 1 * GIB), r"leaves 19.0 GiB beside 1.0 GiB of weights, and 10.0 GiB are free"),
    ],
    ids=["weights fill the share", "other processes hold the memory"],
)
def test_a_share_that_is_not_available_is_refused_with_the_numbers(memory: DeviceMemory, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        kv_pool_bytes(memory, utilization=0.25, kv_share=SHARE)
    assert caught.value.field == "gpu_memory_utilization"


@pytest.fixture
def default_settings() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True


@pytest.mark.usefixtures("default_settings")
def test_loading_a_model_turns_off_cudnn_attention_and_reduced_precision_sums(tmp_path: Path) -> None:
    load_worker(LoadRequest(str(build_tiny_model("llama", tmp_path)), device="cpu", dtype="float32", num_kv_blocks=8))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
