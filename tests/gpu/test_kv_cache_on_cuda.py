"""Copies of KV blocks on a GPU, out beside steps and in."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.test_kv_cache import check_copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine: nothing was copied"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_read_from_a_cache_on_a_gpu_are_the_same_in_another(dtype: torch.dtype) -> None:
    check_copies(torch.device("cuda", 0), dtype)
