"""How much of a GPU's memory a KV pool takes, alone and beside another process: figures are given, no GPU is needed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from specdec.engine.model.device_memory import DeviceMemory, kv_pool_bytes
from specdec.errors import InvalidRequest

GIB = 1 << 30
TOTAL = 80 * GIB
SHARE = 0.8


@dataclass
class Process:
    """One that loads its weights, then makes its KV pool."""

    weights: int
    utilization: float | None
    pool: int = 0

    def make_pool(self, free_bytes: int) -> None:
        memory = DeviceMemory(TOTAL, free_bytes, self.weights)
        self.pool = kv_pool_bytes(memory, utilization=self.utilization, kv_share=SHARE)


def pools(order: tuple[str, str], utilizations: dict[str, float | None]) -> dict[str, int]:
    """Pools of a target and a draft that start in some order, each only once the other is done."""
    weights = {"target": 16 * GIB, "draft": 1 * GIB}
    free_bytes, processes = TOTAL, {}
    for role in order:
        process = processes[role] = Process(weights[role], utilizations[role])
        process.make_pool(free_bytes - process.weights)
        free_bytes -= process.weights + process.pool
    return {role: process.pool for role, process in processes.items()}


def test_with_a_share_each_the_order_of_start_does_not_matter() -> None:
    shares: dict[str, float | None] = {"target": 0.6, "draft": 0.3}
    found = pools(("draft", "target"), shares)
    assert found == pools(("target", "draft"), shares)
    assert found == {"target": int((48 - 16) * GIB * SHARE), "draft": int((24 - 1) * GIB * SHARE)}


def test_without_a_share_a_process_takes_what_is_free() -> None:
    assert kv_pool_bytes(DeviceMemory(TOTAL, 50 * GIB, 30 * GIB), utilization=None, kv_share=0.9) == 45 * GIB


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (DeviceMemory(TOTAL, 60 * GIB, 20 * GIB), r"0.25 of 80.0 GiB leaves 0.0 GiB beside 20.0 GiB of weights"),
        (DeviceMemory(TOTAL, 10 * GIB, 1 * GIB), r"leaves 19.0 GiB beside 1.0 GiB of weights, and 10.0 GiB are free"),
    ],
    ids=["the weights fill it", "others hold it"],
)
def test_a_share_that_cannot_be_had_is_refused_with_the_figures(memory: DeviceMemory, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        kv_pool_bytes(memory, utilization=0.25, kv_share=SHARE)
    assert caught.value.field == "gpu_memory_utilization"
