"""What the layers of a model require of a linear layer, however it is stored and multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class AnyProjection(Protocol):
    """What takes the place of a linear layer, or of several that share their input."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The same as `forward`."""
        ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [T, out] + forward(x [T, in])."""
        ...


#: Makes a projection of a weight [out, in] and a bias [out].
ProjectionMaker = Callable[[torch.Tensor, torch.Tensor | None], AnyProjection]
