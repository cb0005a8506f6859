"""Logit bias, penalties, constraint masks and end-token masks, before the filters of `specdec.engine.logits.filters`.

`processed_logits` serves one step. `RunningHistory` serves several steps whose tokens the host has not read: the
histories go to the device once, and each step's tokens are added there. Both apply the same float64 operations in the
same order, so their results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.contract.types import SamplingFilters, TokenIds
from specdec.engine.logits.transfer import to_device


@dataclass(frozen=True, slots=True)
class FilterContext:
    """Everything besides the logits that a row's distribution depends on."""

    filters: SamplingFilters
    history: Sequence[int] | TokenIds
    """All session tokens before the row's position, draft tokens included."""
    output_start: int
    """Position of this turn's first output token."""
    mask: NDArray[np.uint8] | None = None
    """Bits of the tokens that the constraint allows (`specdec.structured.matcher.Mask`); None: all."""

    def masks_end(self, num_more: int = 0) -> bool:
        """Return whether end tokens are masked `num_more` tokens after the history."""
        num_new = len(self.history) + num_more - self.output_start
        return bool(self.filters.end_token_ids) and num_new < self.filters.min_new_tokens

    @property
    def changes_logits(self) -> bool:
        """True if bias, penalties or a mask change this row."""
        return bool(self.filters.logit_bias) or self.filters.uses_history or self.mask is not None or self.masks_end()


def processed_logits(logits: torch.Tensor, contexts: Sequence[FilterContext]) -> torch.Tensor:
    """Return a copy of the logits after bias, penalties and masks, float64 [R, V]."""
    scores = logits.to(torch.float64, copy=True)
    process_logits(scores, contexts)
    return scores


def process_logits(scores: torch.Tensor, contexts: Sequence[FilterContext]) -> None:
    """Add bias and apply penalties and masks, in place; `scores` is float64 [R, V]."""
    add_bias(scores, contexts)
    repeated = [
        (row, _distinct(c.history, scores.shape[-1]), c.filters.repetition_penalty)
        for row, c in enumerate(contexts)
        if c.filters.repetition_penalty != 1.0 and len(c.history)
    ]
    if repeated:
        where = row_and_column(scores, [(row, seen) for row, seen, _ in repeated])
        penalty = column(scores, np.concatenate([np.full(len(seen), value) for _, seen, value in repeated]))
        values = scores[where]
        scores[where] = torch.where(values < 0, values * penalty, values / penalty)
    counted = [
        (row, c.filters, *distinct_counts(c.history[c.output_start :]))
        for row, c in enumerate(contexts)
        if c.filters.presence_penalty != 0.0 or c.filters.frequency_penalty != 0.0
    ]
    if counted:
        where = row_and_column(scores, [(row, emitted) for row, _, emitted, _ in counted])
        scores[where] -= column(
            scores,
            np.concatenate([filters.presence_penalty + filters.frequency_penalty * n for _, filters, _, n in counted]),
        )
    mask_constrained(scores, contexts)
    mask_ends(scores, contexts)


def add_bias(scores: torch.Tensor, contexts: Sequence[FilterContext]) -> None:
    """Add the bias, in place; `scores` is float64 [R, V]. This is the first operation on logits."""
    biased = [(row, c.filters.logit_bias) for row, c in enumerate(contexts) if c.filters.logit_bias]
    if biased:
        where = row_and_column(scores, [(row, list(bias)) for row, bias in biased])
        scores[where] += column(scores, [value for _, bias in biased for value in bias.values()])


def mask_constrained(scores: torch.Tensor, contexts: Sequence[FilterContext]) -> None:
    """Mask the tokens that constraints do not allow, in place; `scores` is float64 [R, V]."""
    constrained = [(row, c.mask) for row, c in enumerate(contexts) if c.mask is not None]
    if constrained:
        packed = np.stack([mask for _, mask in constrained])
        allowed = np.unpackbits(packed, axis=1, count=scores.shape[-1], bitorder="little").view(np.bool_)  # [N, V]
        index = to_device([row for row, _ in constrained], scores.device, torch.int64)
        scores[index] = scores[index].masked_fill(~to_device(allowed, scores.device, torch.bool), -torch.inf)


def mask_ends(scores: torch.Tensor, contexts: Sequence[FilterContext], num_more: int = 0) -> None:
    """Mask end tokens `num_more` tokens after the contexts, in place. This is the last operation on logits.

    Args:
        scores: float64 [R, V].
        contexts: R contexts.
        num_more: number of tokens drawn after each context's history.
    """
    masked = [(row, c.filters.end_token_ids) for row, c in enumerate(contexts) if c.masks_end(num_more)]
    if masked:
        where = row_and_column(scores, masked)
        before = scores[where]
        # A Python number would be copied to the device, and the copy would wait for the device's work.
        scores.index_put_(where, scores.new_full((), -torch.inf))
        # The mask is not applied to a row in which it would leave no token.
        is_empty = scores.amax(dim=-1) == -torch.inf  # [R]
        scores[where] = torch.where(is_empty[where[0]], before, scores[where])


def _distinct(token_ids: Sequence[int] | TokenIds, num_tokens: int) -> NDArray[np.int64]:
    """Return each id once, ascending. Sorting a long history would take as long as the step."""
    is_there = np.zeros(num_tokens, dtype=bool)
    is_there[np.asarray(token_ids, dtype=np.int64)] = True
    return np.flatnonzero(is_there)


def distinct_counts(token_ids: Sequence[int] | TokenIds) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each id once, ascending, and how often it occurs."""
    ids, counts = np.unique(np.asarray(token_ids, dtype=np.uint32), return_counts=True)
    return ids.astype(np.int64), counts


def row_and_column(
    scores: torch.Tensor, ids_by_row: Iterable[tuple[int, Sequence[int] | NDArray[np.integer[Any]]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column indices of many (row, ids), for one gather or scatter."""
    pairs = list(ids_by_row)
    rows = np.repeat([row for row, _ in pairs], [len(ids) for _, ids in pairs])
    columns = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in pairs])
    device = scores.device
    return to_device(rows, device, torch.int64), to_device(columns, device, torch.int64)


def column(scores: torch.Tensor, values: Sequence[float] | NDArray[np.float64]) -> torch.Tensor:
    """Return values as float64 on the device of `scores`."""
    return to_device(values, scores.device, torch.float64)


class RunningHistory:
    """The histories of R rows, each one token longer after every step."""

    def __init__(self, contexts: Sequence[FilterContext], num_tokens: int, device: torch.device) -> None:
        """
        Args:
            contexts: R contexts before the first step.
            num_tokens: V.
            device: device of the logits.
        """
        self._contexts = contexts
        self._num_drawn = 0
        filters = [context.filters for context in contexts]
        self._seen: torch.Tensor | None = None  # bool [R, V]
        if any(f.repetition_penalty != 1.0 for f in filters):
            self._seen = torch.zeros(len(contexts), num_tokens, dtype=torch.bool, device=device)
            where = row_and_column(self._seen, [(row, context.history) for row, context in enumerate(contexts)])
            self._seen.index_put_(where, self._seen.new_ones(()))  # a Python number would be waited for
            self._repetition = _row_column([f.repetition_penalty for f in filters], device)
        self._counts: torch.Tensor | None = None  # float64 [R, V]: how often each token was emitted
        if any(f.presence_penalty != 0.0 or f.frequency_penalty != 0.0 for f in filters):
            self._counts = torch.zeros(len(contexts), num_tokens, dtype=torch.float64, device=device)
            emitted = [distinct_counts(context.history[context.output_start :]) for context in contexts]
            where = row_and_column(self._counts, [(row, ids) for row, (ids, _) in enumerate(emitted)])
            counts = np.concatenate([counts for _, counts in emitted])
            self._counts[where] = to_device(counts, device, torch.float64)
            self._presence = _row_column([f.presence_penalty for f in filters], device)
            self._frequency = _row_column([f.frequency_penalty for f in filters], device)

    def processed_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next step's logits, float32 [R, V], after bias, penalties and masks: float64 [R, V]."""
        scores = logits.to(torch.float64, copy=True)
        add_bias(scores, self._contexts)
        if self._seen is not None:
            penalised = torch.where(scores < 0, scores * self._repetition, scores / self._repetition)
            scores = torch.where(self._seen, penalised, scores)
        if self._counts is not None:
            # Two operations, because `process_logits` rounds twice and a fused one would round once.
            penalties = self._frequency * self._counts
            penalties += self._presence
            scores -= torch.where(self._counts > 0, penalties, 0.0)
        mask_ends(scores, self._contexts, self._num_drawn)
        return scores

    def add(self, token_ids: torch.Tensor) -> None:
        """Add a step's tokens: int64 [R] on the device."""
        self._num_drawn += 1
        column = token_ids[:, None]
        if self._seen is not None:
            self._seen.scatter_(1, column, True)
        if self._counts is not None:
            self._counts.scatter_add_(1, column, self._counts.new_ones(column.shape))


def _row_column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return values as float64 [R, 1]."""
    return to_device(values, device, torch.float64)[:, None]
