"""The compiled kernels between a step's products on a GPU, with the checks of the interpreted ones."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.cuda_graphs import fused_operations as fused
from specdec.engine.cuda_graphs.fused_operations import Norm
from tests.support.fused_rig import DTYPES, EPS, Heads, close, llama_norm, random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine: no kernel was compiled"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [80, 4096])
def test_a_sum_and_its_norm_equal_those_of_transformers(width: int, dtype: torch.dtype) -> None:
    residual, delta = (random(5, width, dtype=dtype, seed=seed, device="cuda") for seed in (0, 1))
    gains, rows = random(width, dtype=dtype, seed=2, device="cuda"), torch.tensor([4, 1], device="cuda")
    total = residual + delta
    close(fused.normalise(residual, delta, Norm(gains, EPS), rows), llama_norm(gains, total)[rows])
    close(fused.normalise(residual, delta, Norm(gains, EPS)), llama_norm(gains, total))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "num_kv", "dim", "is_normed"), [(32, 8, 128, False), (3, 1, 80, True)])
def test_heads_are_rotated_as_in_transformers_and_stored(
    num: int, num_kv: int, dim: int, is_normed: bool, dtype: torch.dtype
) -> None:
    heads = Heads(num, num_kv, dim, dtype, is_normed=is_normed, device="cuda")
    query, rows = heads.expected()
    close(heads.rotate(), query)
    close(heads.layer.rows[heads.slots], rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_equals_that_of_transformers(dtype: torch.dtype) -> None:
    gate_up = random(5, 2 * 1500, dtype=dtype, device="cuda") * 8
    gate, up = gate_up.chunk(2, dim=1)
    close(fused.gated(gate_up), torch.nn.functional.silu(gate) * up)
