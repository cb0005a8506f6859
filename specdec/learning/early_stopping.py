"""Ends a training on held-out text: keeps the parameters that are best there, and stops when they stop improving.

On little data a draft memorises the log after a few passes and then gets worse on other text. `training` calls this
after each pass over the log.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec.learning.samples import Row

#: Number of checks in a row without an improvement after which training stops.
_MAX_CHECKS_WITHOUT_GAIN = 5

#: Least number of tokens trained on between two checks, in multiples of the tokens that a check reads. A check reads
#: each token once forwards, which costs about a third of a training step, so checks take at most 8 % of the time.
_CHECK_INTERVAL = 4

#: Limit on the tokens that a check reads.
_MAX_CHECK_TOKENS = 8192

#: Number of held-out rows from which on some are kept for the verdict alone.
_MIN_ROWS_TO_SPLIT = 4


def split_held_out(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the held-out rows for the checks and those for the verdict at the end.

    They differ, so that choosing the best check does not flatter the verdict; too few rows serve for both.
    """
    if len(rows) < _MIN_ROWS_TO_SPLIT:
        return list(rows), list(rows)
    return first_rows(rows[0::2], _MAX_CHECK_TOKENS), list(rows[1::2])


def first_rows(rows: Sequence[Row], max_tokens: int) -> list[Row]:
    """Return the first rows with fewer than `max_tokens` learned tokens in all, but at least one row."""
    ends = np.cumsum([row.num_learned for row in rows])
    return list(rows[: max(1, int(np.searchsorted(ends, max_tokens)))])


class EarlyStopping:
    """The best parameters so far, by their divergence on held-out rows."""

    def __init__(self, parameters: Sequence[torch.Tensor], kl_nats: float, num_check_tokens: int) -> None:
        """Start with the untrained parameters.

        Args:
            parameters: tensors that training changes in place.
            kl_nats: their divergence before training.
            num_check_tokens: number of held-out tokens that a check reads.
        """
        self._parameters = parameters
        self._best = [parameter.detach().clone() for parameter in parameters]
        self._best_kl_nats = kl_nats
        self._interval_tokens = _CHECK_INTERVAL * num_check_tokens
        self._checked_at_tokens = 0
        self._num_without_gain = 0

    @property
    def is_over(self) -> bool:
        """True once the last checks have all been without an improvement."""
        return self._num_without_gain >= _MAX_CHECKS_WITHOUT_GAIN

    def is_due(self, num_seen_tokens: int) -> bool:
        """Return whether enough tokens have been trained on since the last check."""
        return num_seen_tokens - self._checked_at_tokens >= self._interval_tokens

    def add(self, kl_nats: float, num_seen_tokens: int) -> None:
        """Record a check of the current parameters, and keep a copy of them if they are the best so far."""
        self._checked_at_tokens = num_seen_tokens
        if kl_nats < self._best_kl_nats:
            self._best_kl_nats, self._num_without_gain = kl_nats, 0
            for kept, parameter in zip(self._best, self._parameters, strict=True):
                kept.copy_(parameter.detach())
        else:
            self._num_without_gain += 1

    @torch.no_grad()
    def restore_best(self) -> None:
        """Set the parameters to the best ones."""
        for parameter, kept in zip(self._parameters, self._best, strict=True):
            parameter.copy_(kept)
