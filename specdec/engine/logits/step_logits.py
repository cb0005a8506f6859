"""The logits of a step with the argmax of each row.

They come from the worker and go to the service's program (`draft_service.drafting`, `target_service.program`), which
turns them into distributions in `specdec.engine.logits.filters` or takes the argmax tokens. The argmax and whether a
row is finite are read from the device together, so a greedy step needs no further read. Built by
`specdec.engine.loop.job`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from specdec.engine.logits import kernel_choices
from specdec.engine.logits.transfer import to_device, to_host


class StepLogits:
    """Rows of logits, which must not be changed."""

    def __init__(self, values: torch.Tensor, top_ids: list[int], maxima: list[float]) -> None:
        self.values = values
        """float32 [R, V]"""
        self.top_ids = top_ids
        """Argmax ids of the R rows; the lower of equal ones, and a NaN counts as the largest."""
        self._maxima = maxima

    @classmethod
    def read(cls, values: torch.Tensor) -> StepLogits:
        """Read float32 [R, V] with one copy to the host."""
        if values.device.type == "cpu":
            chosen = kernel_choices.argmax(values)
            if chosen is not None:
                return cls(values, *chosen)
            array = values.numpy()  # NumPy's argmax takes an eighth of the time of PyTorch's
            ids: list[int] = array.argmax(axis=-1).tolist()
            return cls(values, ids, [float(row[token_id]) for row, token_id in zip(array, ids, strict=True)])
        maxima, top_ids = (column.tolist() for column in to_host(*values.max(dim=-1)))
        return cls(values, top_ids, maxima)

    def __len__(self) -> int:
        return len(self.top_ids)

    @property
    def num_tokens(self) -> int:
        """V, the vocabulary size."""
        return self.values.shape[-1]

    @property
    def is_finite(self) -> list[bool]:
        """List of one flag per row: True if the row has a distribution (no NaN, no +inf, not only -inf)."""
        return [math.isfinite(maximum) for maximum in self._maxima]

    def select(self, rows: Sequence[int]) -> StepLogits:
        """Return some of the rows, in ascending order."""
        if len(rows) == len(self):
            return self
        values = self.values.index_select(0, to_device(rows, self.values.device, torch.int64))
        return StepLogits(values, [self.top_ids[row] for row in rows], [self._maxima[row] for row in rows])
