"""Copies of KV blocks out of one cache and into another keep every byte."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from specdec.engine.model.kv_cache import KvCache, LayerShape, block_bytes, pool_sizes

SHAPES = [LayerShape(2, 8, 8), LayerShape(1, 4, 12), LayerShape(2, 8, 8)]


def check_copies(device: torch.device, dtype: torch.dtype) -> None:
    """Copy blocks between two caches, reading in another thread as the cold tier does."""
    full, empty = (KvCache(SHAPES, num_blocks=12, dtype=dtype, device=device) for _ in range(2))
    for layer in full.layers:
        layer.blocks.copy_(torch.randn(layer.blocks.shape))
    ids, others = [7, 2, 3, 11], [0, 1, 9, 4]
    rows: list[np.ndarray] = []
    reader = threading.Thread(target=lambda: rows.append(full.copies.read(ids)))
    reader.start()
    reader.join()
    assert rows[0].shape == (4, block_bytes(SHAPES, dtype))
    assert rows[0].dtype == np.uint8
    with torch.inference_mode():
        empty.copies.write(others[1:], np.frombuffer(rows[0].tobytes(), np.uint8).reshape(4, -1)[1:])
    for before, after in zip(full.layers, empty.layers, strict=True):
        assert torch.equal(after.blocks[others[1:]], before.blocks[ids[1:]])
        untouched = [index for index in range(12) if index not in others[1:]]
        assert not after.blocks[untouched].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_read_from_one_cache_are_the_same_in_another(dtype: torch.dtype) -> None:
    check_copies(torch.device("cpu"), dtype)


@pytest.mark.parametrize(("slot_bytes", "num_sessions"), [(5_000, 64), (20_000_000, 14)])
def test_the_default_pool_of_a_hybrid_has_the_states_of_the_sessions_whose_kv_it_holds(
    slot_bytes: int, num_sessions: int
) -> None:
    """64 sessions of 2,048 tokens, or as many as fit into 1 GiB; each has two states and one snapshot."""
    bytes_per_block = 16 * 6_000
    num_blocks, num_slots = pool_sizes(bytes_per_block, slot_bytes, 40_000, None, None)
    assert num_slots == 3 * num_sessions
    assert num_blocks >= 128 * num_sessions
    assert num_blocks * bytes_per_block + num_slots * slot_bytes <= 1 << 30


def test_the_bytes_of_a_hybrids_pool_hold_blocks_and_states_together() -> None:
    num_blocks, num_slots = pool_sizes(1_000, 50_000, 2_048, 10_000_000, None)
    assert num_slots == 3 * (10_000_000 // (128 * 1_000 + 3 * 50_000))
    assert 0 <= 10_000_000 - num_blocks * 1_000 - num_slots * 50_000 < 1_000
