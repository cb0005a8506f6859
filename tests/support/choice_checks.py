"""Comparison of the kernels' coupled choices with the reference, for kernels of several kinds of processor."""

from __future__ import annotations

import numpy as np
import torch

from specdec.core.reference import coupled_choice
from specdec.engine.logits import kernel_choices


def check_coupled_choices() -> None:
    """Check that the loaded kernels choose like the reference, also in rows that end within a vector."""
    rng = np.random.default_rng(1)
    for num_tokens in (1, 3, 16, 1001):
        laws = rng.dirichlet(np.ones(num_tokens), size=8) ** rng.uniform(0.0, 3.0, (8, 1))
        laws *= rng.random(laws.shape) < rng.uniform(0.1, 1.0, (8, 1))
        laws[:, -1] += 1e-3
        laws /= laws.sum(axis=-1, keepdims=True)
        seeds, turns, positions = [*range(7), (1 << 64) - 1], [0, 1] * 4, [*range(100, 108)]
        choices = kernel_choices.coupled_choices(torch.tensor(laws), seeds, turns, positions)
        assert choices is not None
        expected = [coupled_choice(*of_row) for of_row in zip(laws, seeds, turns, positions, strict=True)]
        assert choices.tolist() == expected
