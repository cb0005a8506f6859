"""Pools of the recurrent states of hybrids: one slot holds the states of all recurrent layers of one sequence.

`engine.sessions.recurrent_states` decides which slot holds what. `engine.model.recurrence` reads and writes them. Built
by `engine.load_pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from specdec.engine import large_pages


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Sizes of what a hybrid's recurrent layers keep per sequence."""

    windows: tuple[tuple[int, ...], ...]
    """Per convolution: the number of rows before a row that it reads, and its channels."""
    states: tuple[tuple[int, ...], ...]
    """Per recurrence: the shape of its state."""
    dtype: torch.dtype
    """Dtype of the convolutions; recurrences compute in float32."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(map(prod, self.windows)) * self.dtype.itemsize + sum(map(prod, self.states)) * 4


class StatePools:
    """`num_slots` slots of every recurrent layer."""

    def __init__(self, layout: StateLayout, num_slots: int, device: torch.device) -> None:
        self.windows = [_empty(num_slots, window, layout.dtype, device) for window in layout.windows]
        """Per convolution, [num_slots, rows, channels]: the newest rows that went into it."""
        self.states = [_empty(num_slots, state, torch.float32, device) for state in layout.states]
        """Per recurrence, [num_slots, *shape]."""


def _empty(num_slots: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory that, on a CPU, is occupied only once written."""
    if device.type != "cpu":
        return torch.empty((num_slots, *shape), dtype=dtype, device=device)
    return large_pages.zeros(num_slots * prod(shape) * dtype.itemsize).view(dtype).view(num_slots, *shape)
