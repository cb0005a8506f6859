"""Weights as the kernels read them (`layout.h`), and the memory that holds them.

Not here: which products a model has (`runner`, `draft_head`), the formats of their numbers (`weight_formats`).
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from specdec.engine.large_pages import LargePages
from specdec.engine.linear.int8 import LARGEST_INT8, round_to_int8
from specdec.engine.native.structures import Product
from specdec.engine.native.weight_formats import FORMAT_OF, Format, halved, pack, pack_shortest

#: Of a row as integers: the kernels take bytes of 0..255, and this one is 0 (`ZERO` in `layout.h`).
_ZERO_BYTE = 128
#: Beyond, the sums of an output's products would leave 32 bits.
MOST_INT8_INPUTS = (1 << 31) // (255 * LARGEST_INT8)


class Packing:
    """Lays weights out for one worker, and keeps them as long as that lives."""

    def __init__(self, library: ctypes.CDLL, *, is_compact: bool) -> None:
        """`is_compact`: in the shortest format that holds them exactly; the logits have the same bits either way."""
        self.group: int = library.specdec_group()
        self._panel: int = library.specdec_panel()
        self._is_compact = is_compact
        self._pages = LargePages()
        self._kept: list[torch.Tensor] = []  # what the structures point to

    @property
    def num_bytes(self) -> int:
        """Of all that is kept."""
        return sum(tensor.nbytes for tensor in self._kept)

    def padded(self, outputs: int) -> int:
        """So many outputs in whole panels."""
        return -(-outputs // self._panel) * self._panel

    def keep(self, tensor: torch.Tensor) -> int:
        """The address of a contiguous copy that lives as long as this."""
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()

    def embedding(self, table: torch.Tensor) -> tuple[int, Format]:
        """Address and format of a table [rows, H]."""
        table = halved(table.detach()) if self._is_compact else table
        return self.keep(table), FORMAT_OF[table.dtype]

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_int8: bool = False) -> Product:
        """One product.

        Args:
            weight: [outputs, inputs].
            bias: [outputs].
            is_int8: round the weight to integers.
        """
        weight = weight.detach().contiguous()
        outputs, inputs = weight.shape
        scales = offsets = None
        format_ = Format.INT8
        if is_int8:
            integers, scale = round_to_int8(weight)
            rounded = self._pad(nn.functional.pad(integers, (0, -inputs % self.group)))
            scales = self.keep(self._pad(scale))
            offsets = self.keep((rounded.sum(dim=1, dtype=torch.float64) * _ZERO_BYTE).to(torch.int32))
            groups = rounded.view(-1, self._panel, rounded.shape[1] // self.group, self.group)
            packed = groups.transpose(1, 2)
        else:
            format_, packed = (pack_shortest if self._is_compact else pack)(self._pad(weight), self._panel)
        return Product(
            weights=self.keep(self._pages.copy(packed)), format=format_, scales=scales, offsets=offsets,
            bias=None if bias is None else self.keep(self._pad(bias)), inputs=inputs, outputs=outputs,
        )  # fmt: skip

    def _pad(self, rows: torch.Tensor) -> torch.Tensor:
        """[outputs, ...] -> [whole panels of outputs, ...], zeros appended."""
        padding = self.padded(len(rows)) - len(rows)
        return torch.cat((rows, rows.new_zeros(padding, *rows.shape[1:]))) if padding else rows
