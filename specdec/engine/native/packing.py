"""Packing of weights into the layout that the kernels read (`layout.h`), and the memory that holds them.

Number formats are in `weight_formats`. Called by `model_layout`, `draft_head` and `kept_layout`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specdec.engine.large_pages import LargePages
from specdec.engine.linear.int8 import LARGEST_INT8, round_to_int8
from specdec.engine.native.structures import Model, Product
from specdec.engine.native.weight_formats import FORMAT_OF, Format, halved, pack, pack_shortest

#: Byte that stands for 0 in a row of integers: the kernels read unsigned bytes (`ZERO` in `layout.h`).
_ZERO_BYTE = 128
#: Maximum number of inputs of an int8 product: the sum for an output must fit into 32 bits.
MOST_INT8_INPUTS = (1 << 31) // (255 * LARGEST_INT8)


class Packing:
    """Packs the weights of one worker and keeps them as long as it lives."""

    def __init__(self, library: ctypes.CDLL, *, is_compact: bool) -> None:
        """`is_compact`: use the shortest format that holds the weights exactly; the logits have the same bits."""
        self.group: int = library.specdec_group()
        self._panel: int = library.specdec_panel()
        self._is_compact = is_compact
        self._pages = LargePages()
        self._kept: list[torch.Tensor | NDArray[np.uint8]] = []  # the structures point to these

    @property
    def num_bytes(self) -> int:
        """Total size of what is kept."""
        return sum(kept.nbytes for kept in self._kept)

    def pieces(self) -> dict[int, NDArray[np.uint8]]:
        """Return the bytes of everything that is kept, by its address."""
        arrays = [kept.view(torch.uint8).numpy() if isinstance(kept, torch.Tensor) else kept for kept in self._kept]
        return {array.ctypes.data: array.reshape(-1) for array in arrays}

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return room that is kept, in large pages, to be filled with bytes that were packed before."""
        room: NDArray[np.uint8] = self._pages.take(num_bytes).numpy()  # keeps the pages alive
        self._kept.append(room)
        return room

    def hold(self, piece: NDArray[np.uint8]) -> int:
        """Keep bytes that were packed before, such as a part of a mapped file, and return their address."""
        self._kept.append(piece)
        return piece.ctypes.data

    def padded(self, outputs: int) -> int:
        """Return the number of outputs rounded up to whole panels."""
        return -(-outputs // self._panel) * self._panel

    def keep(self, tensor: torch.Tensor) -> int:
        """Keep a contiguous tensor and return its address."""
        kept = tensor.detach().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def embedding(self, table: torch.Tensor) -> tuple[int, Format]:
        """Keep a table [rows, H] and return its address and format."""
        table = halved(table.detach()) if self._is_compact else table
        return self.keep(table), FORMAT_OF[table.dtype]

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_int8: bool = False) -> Product:
        """Pack the weights of a linear layer.

        Args:
            weight: [outputs, inputs].
            bias: [outputs].
            is_int8: whether to round the weights to integers.
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
        """Append zeros to [outputs, ...] up to whole panels."""
        padding = self.padded(len(rows)) - len(rows)
        return torch.cat((rows, rows.new_zeros(padding, *rows.shape[1:]))) if padding else rows


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model in the layout that the kernels read."""

    packing: Packing
    """Holds the memory that `model` points to."""
    model: Model
    num_embeddings: int
    """Rows of the embedding table."""
