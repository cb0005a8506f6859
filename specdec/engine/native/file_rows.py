"""Rows of a GGUF file: their addresses, and the float32 numbers that they represent.

The kernels read the rows from the mapped file; rows of kinds that they do not know are computed here. Called by
`packing`, `file_layout` and `file_model`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.checkpoints.gguf.dequantise import dequantise
from specdec.checkpoints.gguf.file import KINDS
from specdec.checkpoints.gguf.values import chunks_of
from specdec.checkpoints.gguf.weights import Weight
from specdec.engine.native.weight_formats import Format

#: Kinds of rows of plain numbers, by ggml's type number.
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class FileRows:
    """Rows of one kind. They are addresses, so the mapped file must live longer."""

    kind: int
    """Key of `specdec.checkpoints.gguf.file.KINDS`."""
    inputs: int
    """Numbers in a row."""
    addresses: NDArray[np.uint64]
    """Address of each row's bytes.  [rows]"""

    def __len__(self) -> int:
        return len(self.addresses)

    def held_in(self, library: ctypes.CDLL) -> Format:
        """Return the format that holds the blocks as they are; FLOAT32 if there is none."""
        return Format(library.specdec_format_of(self.kind))

    def widened(self, library: ctypes.CDLL, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return the numbers, float32 [rows, inputs]; `into`: contiguous memory of that shape for them."""
        numbers = torch.empty(len(self), self.inputs) if into is None else into
        if not can_widen(self.kind, library):
            return numbers.copy_(torch.from_numpy(dequantise(self._bytes(), self.kind)))
        library.specdec_widen_rows(
            self.kind, self.addresses.ctypes.data, len(self), self.inputs, numbers.data_ptr(), torch.get_num_threads()
        )
        return numbers

    def _bytes(self) -> NDArray[np.uint8]:
        """Return the rows' bytes, uint8 [rows, bytes of a row]."""
        kind = KINDS[self.kind]
        of_row = ctypes.c_uint8 * (self.inputs // kind.num_weights * kind.num_bytes)
        return np.stack([np.ctypeslib.as_array(of_row.from_address(int(address))) for address in self.addresses])


def can_widen(kind: int, library: ctypes.CDLL) -> bool:
    """Return whether the kernels read rows of a kind."""
    return kind in PLAIN or Format(library.specdec_format_of(kind)) is not Format.FLOAT32


def rows_of(weights: Sequence[Weight]) -> list[FileRows]:
    """Return the rows of matrices, one below the other; neighbours of one kind are together.

    Args:
        weights: matrices [outputs, inputs] without a shift.
    """
    kinds, addresses = [], []
    for weight in weights:
        of_weight = np.concatenate([_addresses(part.data) for part in weight.parts])
        kind = np.concatenate([np.full(len(part.data), part.kind) for part in weight.parts])
        order = slice(None) if weight.row_order is None else weight.row_order
        addresses.append(of_weight[order])
        kinds.append(kind[order])
    kind, address = np.concatenate(kinds), np.concatenate(addresses)
    cuts = [0, *(np.flatnonzero(np.diff(kind)) + 1), len(kind)]
    return [
        FileRows(int(kind[begin]), weights[0].shape[-1], np.ascontiguousarray(address[begin:end]))
        for begin, end in pairwise(cuts)
    ]


def widened(weight: Weight, library: ctypes.CDLL) -> torch.Tensor:
    """Return the numbers of a vector or a matrix, float32."""
    if len(weight.shape) == 1:
        ((_, numbers),) = chunks_of(weight, range(1))
        return torch.tensor(numbers).view(weight.shape)
    return torch.cat([part.widened(library) for part in rows_of([weight])])


def _addresses(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the address of each row [rows, bytes]."""
    return data.ctypes.data + np.arange(len(data), dtype=np.uint64) * np.uint64(data.shape[1])
