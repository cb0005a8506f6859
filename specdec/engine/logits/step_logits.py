"""The logits of a step, and what is asked of every row of them before anything else.

They come from the worker and go to the service's program (`draft_service.drafting`, `target_service.program`), which
makes distributions of them in `specdec.engine.logits.filters` or takes the likeliest.

Whether a distribution can be made of a row and which token is its likeliest are read together: a greedy step then needs
nothing more from the device. Not here: distributions. Made by `specdec.engine.loop.job`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from specdec.engine.logits import kernel_choices
from specdec.engine.logits.transfer import to_device, to_host


class StepLogits:
    """Rows of logits. Nobody writes into them."""

    def __init__(self, values: torch.Tensor, top_ids: list[int], maxima: list[float]) -> None:
        self.values = values
        """float32 [R, V]"""
        self.top_ids = top_ids
        """R ids; ties go to the lower one, and a NaN counts as larger than anything."""
        self._maxima = maxima

    @classmethod
    def read(cls, values: torch.Tensor) -> StepLogits:
        """Takes float32 [R, V]; one copy to the host."""
        if values.device.type == "cpu":
            chosen = kernel_choices.argmax(values)
            if chosen is not None:
                return cls(values, *chosen)
            array = values.numpy()  # whose argmax takes an eighth of the time of PyTorch's
            ids: list[int] = array.argmax(axis=-1).tolist()
            return cls(values, ids, [float(row[token_id]) for row, token_id in zip(array, ids, strict=True)])
        maxima, top_ids = (column.tolist() for column in to_host(*values.max(dim=-1)))
        return cls(values, top_ids, maxima)

    def __len__(self) -> int:
        return len(self.top_ids)

    @property
    def num_tokens(self) -> int:
        """V"""
        return self.values.shape[-1]

    @property
    def is_finite(self) -> list[bool]:
        """Whether a distribution can be made of each row: no NaN, no +inf, not -inf throughout."""
        return [math.isfinite(maximum) for maximum in self._maxima]

    def select(self, rows: Sequence[int]) -> StepLogits:
        """Some of the rows, in ascending order."""
        if len(rows) == len(self):
            return self
        values = self.values.index_select(0, to_device(rows, self.values.device, torch.int64))
        return StepLogits(values, [self.top_ids[row] for row in rows], [self._maxima[row] for row in rows])
