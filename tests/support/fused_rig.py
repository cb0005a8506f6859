"""Rows for the kernels between a step's products, surrounded by NaNs, and the results of transformers for them.

Called by tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from specdec.engine.cuda_graphs import fused_operations as fused
from specdec.engine.cuda_graphs.fused_operations import Norm
from specdec.engine.model.kv_cache import KvCache, LayerKv, LayerShape

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: One rounding to 16 bits may fall to the other side, as sums are made in another order.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
EPS = 1e-5


def round_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton 3.7's interpreter round bfloat16 to nearest, as devices do; it truncates."""
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(numbers: Any, from_dtype: Any, to_dtype: Any, mode: Any) -> Any:
        if (from_dtype, to_dtype) != (language.float32, language.bfloat16):
            return convert(numbers, from_dtype, to_dtype, mode)
        wide = torch.frombuffer(bytearray(numbers.tobytes()), dtype=torch.float32)
        return wide.bfloat16().view(torch.uint16).numpy().reshape(numbers.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


def random(*size: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Return random numbers with NaNs behind them in memory."""
    around = torch.full((size[0] + 3, *size[1:]), torch.nan, dtype=dtype, device=device)
    around[: size[0]] = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(around)
    return around[: size[0]]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def llama_norm(gains: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    module = LlamaRMSNorm(gains.shape[-1], EPS)
    module.weight.data = gains
    with torch.no_grad():
        normed: torch.Tensor = module(x)
    return normed


class Heads:
    """Rows of queries, keys and values, the angles of their positions, and a cache of NaNs."""

    def __init__(
        self, num: int, num_kv: int, dim: int, dtype: torch.dtype, *, is_normed: bool, device: str = "cpu"
    ) -> None:
        self.num, self.num_kv, self.dim = num, num_kv, dim
        self.qkv = random(5, (num + 2 * num_kv) * dim, dtype=dtype, device=device)
        angles = torch.randn(5, dim // 2, generator=torch.Generator().manual_seed(3)).repeat(1, 2).to(device)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        gains = random(num + num_kv, dim, dtype=dtype, seed=4, device=device)
        self.norm = Norm(gains, EPS) if is_normed else None
        self.slots = torch.tensor([37, 2, 16, 15, 40], device=device)
        self.layer: LayerKv = KvCache(
            [LayerShape(num_kv, dim, dim)], num_blocks=3, dtype=dtype, device=torch.device(device)
        ).layers[0]
        self.layer.rows.fill_(torch.nan)

    def rotate(self, rows: slice = slice(None)) -> torch.Tensor:
        qkv = self.qkv[rows].clone()
        return fused.rotate(qkv, self.cos[rows], self.sin[rows], self.norm, self.slots[rows], self.layer)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [T, H, D] and the rows of the cache."""
        heads = self.qkv.unflatten(1, (-1, self.dim))
        query, key, value = heads.split((self.num, self.num_kv, self.num_kv), dim=1)
        if self.norm is not None:
            query = torch.stack([llama_norm(self.norm.gains[i], query[:, i]) for i in range(self.num)], 1)
            key = torch.stack([llama_norm(self.norm.gains[self.num + i], key[:, i]) for i in range(self.num_kv)], 1)
        query, key = apply_rotary_pos_emb(query, key, self.cos, self.sin)
        return query, torch.cat((key.flatten(1), value.flatten(1)), dim=1)
