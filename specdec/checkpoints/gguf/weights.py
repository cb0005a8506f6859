"""Weights of a model in transformers' classes, as the tensors of a GGUF file hold them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.checkpoints.gguf.file import StoredTensor


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A parameter of a model: rows of one or more tensors, in another order, each number plus a constant."""

    parts: tuple[StoredTensor, ...]
    """Tensors whose rows follow each other."""
    row_order: NDArray[np.int64] | None = None
    """Row r of the parameter is row `row_order[r]` of the parts; None: they have the same order.  [rows]"""
    shift: float = 0.0
    """Number that is added to each number of the parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        rows = sum(part.shape[0] for part in self.parts)
        return (rows, *self.parts[0].shape[1:])
