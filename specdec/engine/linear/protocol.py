"""Contract of a linear layer, for every way of storing and multiplying its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class AnyProjection(Protocol):
    """Replacement of a linear layer, or of several that share their input."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `forward(x)`."""
        ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., out] of x [..., in]."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [T, out] + forward(x [T, in])."""
        ...


#: Makes a projection of a weight [out, in] and a bias [out].
ProjectionMaker = Callable[[torch.Tensor, torch.Tensor | None], AnyProjection]
