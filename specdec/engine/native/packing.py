"""Packing of weights into the layout that the kernels read (`layout.h`), and the memory that holds them.

Number formats are in `weight_formats`. Called by `model_layout`, `draft_head` and `kept_layout`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specdec.checkpoints.gguf.weights import Weight
from specdec.engine.large_pages import LargePages
from specdec.engine.linear.int8 import LARGEST_INT8, round_to_int8
from specdec.engine.native.file_rows import PLAIN, FileRows, can_widen, rows_of, widened
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
        self._library = library
        self.group: int = library.specdec_group()
        self._panel: int = library.specdec_panel()
        self._is_compact = is_compact
        self._pages = LargePages()
        self._kept: list[torch.Tensor | NDArray[np.uint8]] = []  # the structures point to these
        self._structures: list[Product] = []  # and to these

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

    def embedding_rows(self, weight: Weight) -> dict[str, int]:
        """Return the fields of `Model` for a table of embeddings in a GGUF file, of which only used rows are read."""
        table = weight.parts[0]
        if len(weight.parts) > 1 or weight.row_order is not None or not can_widen(table.kind, self._library):
            address, format_ = self.embedding(widened(weight, self._library))
            return {"embeddings": address, "embedding_format": format_}
        return {
            "embeddings": self.hold(table.data),
            "embedding_format": table.kind,
            "embedding_row_bytes": table.data.shape[1],
        }

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_int8: bool = False) -> Product:
        """Pack the weights of a linear layer.

        Args:
            weight: [outputs, inputs]; weights in 16 bits keep their dtype.
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
            is_tried = self._is_compact and weight.dtype == torch.float32
            format_, packed = (pack_shortest if is_tried else pack)(self._pad(weight), self._panel)
        return Product(
            weights=self.keep(self._pages.copy(packed)), format=format_, scales=scales, offsets=offsets,
            bias=None if bias is None else self.keep(self._pad(bias)), inputs=inputs, outputs=outputs,
        )  # fmt: skip

    def rows_product(self, weights: Sequence[Weight], bias: torch.Tensor | None) -> Product:
        """Pack the weights of a linear layer from a GGUF file, in the formats of its blocks if the kernels have them.

        Args:
            weights: matrices, whose outputs follow each other.
            bias: [outputs] of all matrices together.
        """
        runs = rows_of(weights)
        if any(len(run) % self._panel for run in runs[:-1]):  # a panel has one format
            return self.product(torch.cat([run.widened(self._library) for run in runs]), bias)
        biases = [None] * len(runs) if bias is None else bias.split([len(run) for run in runs])
        product = self._rows_part(runs[-1], biases[-1])
        for run, of_run in zip(reversed(runs[:-1]), reversed(biases[:-1]), strict=True):
            rest, product = product, self._rows_part(run, of_run)
            product.rest, product.rest_from = ctypes.addressof(rest), len(run)
            product.outputs += rest.outputs
            self._structures.append(rest)
        return product

    def _rows_part(self, rows: FileRows, bias: torch.Tensor | None) -> Product:
        format_ = rows.held_in(self._library)
        if format_ is Format.FLOAT32:
            plain = rows.widened(self._library).to(PLAIN.get(rows.kind, torch.float32))
            return self.product(plain, bias)
        addresses = np.zeros(self.padded(len(rows)), dtype=np.uint64)
        addresses[: len(rows)] = rows.addresses
        num_panels = len(addresses) // self._panel
        packed = self.take(num_panels * self._library.specdec_panel_bytes(rows.kind, rows.inputs))
        num_failed = self._library.specdec_pack_blocks(
            rows.kind, addresses.ctypes.data, num_panels, rows.inputs, packed.ctypes.data, torch.get_num_threads()
        )
        if num_failed:  # scales so large that their offsets are not finite
            return self.product(rows.widened(self._library), bias)
        return Product(
            weights=packed.ctypes.data, format=format_, bias=None if bias is None else self.keep(self._pad(bias)),
            inputs=rows.inputs, outputs=len(rows),
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
