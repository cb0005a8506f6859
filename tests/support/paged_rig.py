"""Ragged rows over a paged cache whose other numbers are NaN, and their expected attention. Called by tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.cuda_graphs.paged_attention import ContextSplit, RaggedRows, paged_attention
from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.kv_cache import KvCache, LayerKv, LayerShape

#: A context of a few pages has several units, and one of some more has more than there are splits.
SMALL = ContextSplit(tile_keys=16, unit_tiles=2, num_splits=4, tile_outputs=16)


@dataclass(frozen=True)
class Heads:
    """Sizes of one layer and its queries."""

    dim: int = 64
    num_kv: int = 1
    per_kv: int = 2
    window: int | None = None
    softcap: float | None = None
    value_dim: int | None = None
    """Size of values; None: that of keys."""

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind(self.window, self.per_kv, self.softcap)

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.num_kv, self.dim, self.value_dim or self.dim)


@dataclass(frozen=True)
class Part:
    """One sequence of a step."""

    start: int
    """Number of keys before the step's own."""
    num_rows: int
    seed: int
    """Seed of its numbers: sequences with the same seed have equal numbers at equal positions."""

    @property
    def num_keys(self) -> int:
        return self.start + self.num_rows


class Step:
    """A step's rows, its cache and the attention of the rows."""

    def __init__(
        self,
        heads: Heads,
        sequences: Sequence[Part],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        shuffle: int = 0,
    ) -> None:
        """`shuffle`: seed of the assignment of blocks to sequences."""
        self.heads, self.sequences, self._dtype, self._device = heads, sequences, dtype, device
        num_blocks = [-(-sequence.num_keys // BLOCK_TOKENS) for sequence in sequences]
        # Some blocks belong to no sequence, and every table continues with one of those.
        ids = torch.randperm(sum(num_blocks) + 5, generator=torch.Generator().manual_seed(shuffle))
        self.layer = KvCache([heads.shape], num_blocks=len(ids), dtype=dtype, device=torch.device(device)).layers[0]
        self.layer.rows.fill_(torch.nan)
        tables, firsts, first = [], [], 0
        for count in num_blocks:
            firsts.append(len(tables))
            tables += [*ids[first : first + count].tolist(), int(ids[-1])]
            first += count
        first_rows = torch.tensor([0, *(sequence.num_rows for sequence in sequences)]).cumsum(0)
        self.tables = torch.tensor(tables, device=device)
        self.rows = RaggedRows(
            first_rows.to(device, torch.int32),
            torch.tensor([sequence.num_keys for sequence in sequences], device=device),
            self.tables,
            torch.tensor(firsts, device=device),
        )
        queries = []
        for sequence, first in zip(sequences, firsts, strict=True):
            query, kv = self._numbers(sequence)
            queries.append(query[sequence.start :])
            places = torch.arange(sequence.num_keys, device=device)
            slots = self.tables[first + places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS
            self.layer.rows[slots] = kv
        self.query = torch.cat(queries)

    def _numbers(self, sequence: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [num_keys, H, D] and rows of the cache [num_keys, row_width] by position."""
        heads, rows = self.heads, []
        num_queries = heads.num_kv * heads.per_kv * heads.dim
        generator = torch.Generator().manual_seed(sequence.seed)
        for _ in range(sequence.num_keys):
            rows.append(torch.randn(num_queries + heads.shape.row_width, generator=generator))
        numbers = torch.stack(rows) if rows else torch.zeros(0, num_queries + heads.shape.row_width)
        numbers = numbers.to(self._device, self._dtype)
        return numbers[:, :num_queries].unflatten(1, (-1, heads.dim)), numbers[:, num_queries:]

    def attend(self, splitting: ContextSplit = SMALL, layer: LayerKv | None = None) -> torch.Tensor:
        """Return the attention that the kernels compute, [T, H, value_dim]."""
        heads = self.heads
        return paged_attention(
            self.query, layer or self.layer, heads.kind, self.rows,
            scale=heads.dim**-0.5, softcap=heads.softcap, splitting=splitting,
        )  # fmt: skip

    def expected(self) -> torch.Tensor:
        """Return the attention in float64, row by row, from the sequences' numbers without blocks or splits."""
        heads, outputs = self.heads, []
        for sequence in self.sequences:
            query, kv = (numbers.double().cpu() for numbers in self._numbers(sequence))
            keys, values = kv.split((heads.num_kv * heads.dim, kv.shape[1] - heads.num_kv * heads.dim), dim=1)
            keys, values = (part.unflatten(1, (heads.num_kv, -1)).repeat_interleave(heads.per_kv, 1)
                            for part in (keys, values))  # fmt: skip
            for position in range(sequence.start, sequence.num_keys):
                seen = slice(0 if heads.window is None else max(0, position + 1 - heads.window), position + 1)
                scores = torch.einsum("hd,khd->hk", query[position], keys[seen]) * heads.dim**-0.5
                if heads.softcap is not None:
                    scores = (scores / heads.softcap).tanh() * heads.softcap
                outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen]))
        return torch.stack(outputs)


#: Of the largest number of an output, about 4: its rounding, and that of the shares.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def check(step: Step, splitting: ContextSplit = SMALL) -> None:
    """Check that the kernels compute the expected attention."""
    actual = step.attend(splitting)
    assert actual.dtype == step.query.dtype
    torch.testing.assert_close(actual.double().cpu(), step.expected(), rtol=0, atol=TOLERANCE[step.query.dtype])


def batch(*sizes: tuple[int, int]) -> list[Part]:
    """Return parts from (keys before, rows) of each sequence."""
    return [Part(start, num_rows, seed) for seed, (start, num_rows) in enumerate(sizes)]
