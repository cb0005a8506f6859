"""Offer the weights of a GGUF file to transformers, which reads each one when it fills the parameter.

So no checkpoint is written, and only one tensor at a time is in memory twice. Called by
`specdec.engine.model.checkpoint_model`, `specdec.learning.trained_model` and, for parts of tensors, by
`specdec.engine.parallel.slices`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.checkpoints.gguf.architectures import config_of
from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.gguf.values import chunks_of, exact_dtype
from specdec.checkpoints.gguf.weights import Weight, weights_of


def gguf_state(path: Path) -> dict[str, GgufWeight]:
    """Return the weights of a file by the names of transformers' parameters.

    Raises:
        InvalidRequest, Unsupported: as `GgufFile`, `config_of` and `weights_of`.
    """
    file = GgufFile(path)
    weights = weights_of(file, config_of(file))

    @cache
    def dtype() -> torch.dtype:
        found: torch.dtype = getattr(torch, exact_dtype(weights.values()))
        return found

    return {name: GgufWeight(weight, dtype) for name, weight in weights.items()}


class GgufWeight:
    """A weight that has not been read, with the operations that transformers uses on a tensor that it is to load."""

    def __init__(self, weight: Weight, dtype: Callable[[], torch.dtype]) -> None:
        """
        Args:
            weight: the weight.
            dtype: returns the narrowest dtype that holds every weight of the file, for which it may read them all.
        """
        self._weight, self._dtype = weight, dtype
        self.shape = torch.Size(weight.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which to hold the weight. Reading gives float32."""
        return self._dtype()

    def get_shape(self) -> list[int]:
        """Return the shape of the whole weight."""
        return list(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part of the weight. Of a range of the first dimension, no more is read if its rows lie together."""
        stored, is_swapped = self._weight.stored_shape, self._weight.is_transposed and len(self.shape) == 2
        first, *others = index if isinstance(index, tuple) else (index,)
        if not isinstance(first, slice) or is_swapped or len(stored) == 1:
            return self._read(range(prod(stored[:-1])), stored)[index]
        start, stop, _ = first.indices(stored[0])
        stop, inner = max(start, stop), prod(stored[1:-1])
        part = self._read(range(start * inner, stop * inner), (stop - start, *stored[1:]))
        return part[(slice(None, None, first.step), *others)]

    def _read(self, rows: range, stored: tuple[int, ...]) -> torch.Tensor:
        """Return rows, which have a shape in the file, as a tensor of the parameter.  float32"""
        read = torch.empty(len(rows), stored[-1])
        for part, numbers in chunks_of(self._weight, rows):
            own = np.require(numbers, requirements="W")  # PyTorch warns of the file's own bytes
            read[part.start - rows.start : part.stop - rows.start] = torch.from_numpy(own)
        read = read.reshape(stored)
        return read.mT.contiguous() if self._weight.is_transposed else read
