"""Bias, penalties and masks over several steps whose tokens the host has not seen: the running twin of `filters`.

What the histories hold when the run begins is sent to the device once, and each step's tokens are added where they were
drawn. Every number is what `filters.processed_logits` makes of the same history, bit for bit: the same operations on
float64 in the same order, in all columns where that one picks some.

Not here: distributions, which step runs. Called by `specdec.engine.drafting.device_multi_step`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec.engine.logits.filters import FilterContext, add_bias, distinct_counts, mask_ends, row_and_column
from specdec.engine.logits.transfer import to_device


class RunningHistory:
    """The histories of R rows, each a token longer after every step."""

    def __init__(self, contexts: Sequence[FilterContext], num_tokens: int, device: torch.device) -> None:
        """
        Args:
            contexts: R, as the run begins.
            num_tokens: V.
            device: where the logits will be.
        """
        self._contexts = contexts
        self._num_drawn = 0
        filters = [context.filters for context in contexts]
        self._seen: torch.Tensor | None = None  # bool [R, V]
        if any(f.repetition_penalty != 1.0 for f in filters):
            self._seen = torch.zeros(len(contexts), num_tokens, dtype=torch.bool, device=device)
            where = row_and_column(self._seen, [(row, context.history) for row, context in enumerate(contexts)])
            self._seen.index_put_(where, self._seen.new_ones(()))  # a number of the host would be waited for
            self._repetition = _column([f.repetition_penalty for f in filters], device)
        self._counts: torch.Tensor | None = None  # float64 [R, V]: how often each token was put out
        if any(f.presence_penalty != 0.0 or f.frequency_penalty != 0.0 for f in filters):
            self._counts = torch.zeros(len(contexts), num_tokens, dtype=torch.float64, device=device)
            emitted = [distinct_counts(context.history[context.output_start :]) for context in contexts]
            where = row_and_column(self._counts, [(row, ids) for row, (ids, _) in enumerate(emitted)])
            counts = np.concatenate([counts for _, counts in emitted])
            self._counts[where] = to_device(counts, device, torch.float64)
            self._presence = _column([f.presence_penalty for f in filters], device)
            self._frequency = _column([f.frequency_penalty for f in filters], device)

    def processed_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The next step's logits, float32 [R, V], after bias, penalties and masks: float64 [R, V]."""
        scores = logits.to(torch.float64, copy=True)
        add_bias(scores, self._contexts)
        if self._seen is not None:
            penalised = torch.where(scores < 0, scores * self._repetition, scores / self._repetition)
            scores = torch.where(self._seen, penalised, scores)
        if self._counts is not None:
            # Not in one operation: rounded once instead of twice, the product would be another number.
            penalties = self._frequency * self._counts
            penalties += self._presence
            scores -= torch.where(self._counts > 0, penalties, 0.0)
        mask_ends(scores, self._contexts, self._num_drawn)
        return scores

    def add(self, token_ids: torch.Tensor) -> None:
        """Goes on after a step: int64 [R], on the device."""
        self._num_drawn += 1
        column = token_ids[:, None]
        if self._seen is not None:
            self._seen.scatter_(1, column, True)
        if self._counts is not None:
            self._counts.scatter_add_(1, column, self._counts.new_ones(column.shape))


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """float64 [R, 1]"""
    return to_device(values, device, torch.float64)[:, None]
