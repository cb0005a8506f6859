"""Run a draft head on paged slots: its features and KV are in layers of the target's own cache.

After a full step of the worker it stores the features of the layers that the head reads (`note_step`); a draft step
runs the head alone (`draft`). Both take the worker's plan. Implements `engine.model.model_runner.LocalHead`; called by
a worker, on the device thread, in inference mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.heads.interface import DraftHead, HeadTokens
from specdec.engine.model.attention import PagedContext
from specdec.engine.model.batch import AttentionKind, StepBatch, build_batch
from specdec.engine.model.feature_layer import FeatureLayer
from specdec.engine.model.kv_cache import KvCache, LayerKv, LayerShape

#: Placeholder kind of a head that does not attend.
_NO_ATTENTION = AttentionKind(window=None, queries_per_kv_head=1, softcap=None)


def layers_of(head: DraftHead) -> list[LayerShape]:
    """Return the cache layers that a head needs, in order: its features, then its KV."""
    return [LayerShape(num_kv_heads=1, key_dim=head.feature_size, value_dim=0), *(shape for shape, _ in head.kv_layers)]


class PagedHead:
    """One head with its part of a worker's cache."""

    def __init__(self, head: DraftHead, cache: KvCache, first_layer: int, *, dtype: torch.dtype) -> None:
        """
        Args:
            head: the head's modules.
            cache: cache of the worker, with `layers_of(head)` from `first_layer` on.
            first_layer: index into the cache's layers.
            dtype: dtype of the cache.
        """
        kinds = [kind for _, kind in head.kv_layers] or [_NO_ATTENTION]
        self.feature_layers = head.feature_layers
        self.cached: Sequence[LayerKv] = cache.layers[first_layer : first_layer + 1 + len(head.kv_layers)]
        self._head = head
        self._cache = cache
        self._features = cache.layers[first_layer]
        self._first_kv_layer = first_layer + 1
        self._kinds = tuple(dict.fromkeys(kinds))
        # The layers before are the target's, which this object does not use.
        self._kind_of_layer = (*[0] * self._first_kv_layer, *(self._kinds.index(kind) for kind in kinds))
        self._dtype = dtype
        self._device = self._features.rows.device

    @property
    def layer(self) -> FeatureLayer | None:
        """See `model_runner.LocalHead.layer`."""
        return self._head.layer

    def note_step(self, plan: StepPlan, hidden: Sequence[torch.Tensor], slots: torch.Tensor | None = None) -> None:
        """Write features and the head's KV of the tokens of a full step; see `model_runner.LocalHead.note_step`."""
        if slots is None:
            slots = _index(_slots(plan.slices, 0), self._device)
        self._features.write(slots, self._head.features(hidden))
        if not self._head.kv_layers:
            return
        batch = self._batch(plan)
        self._head.extend(self._tokens(plan, batch))

    def draft(self, plan: StepPlan) -> torch.Tensor:
        """Run one draft step; return the logits, float [B, V], in the order of the plan."""
        batch = self._batch(plan)
        # Slices whose previous position is the last that a full step has run.
        before = [
            SequenceSlice((0,), part.start - part.draft_index, part.block_table, 0, part.draft_index)
            for part in plan.slices
        ]
        order = _order(plan, batch)
        verified = self._read(_slots(before, -1), [part.start for part in before])[order]
        draft_index = torch.tensor([part.draft_index for part in plan.slices], device=self._device)[order]
        draft = self._head.draft(self._tokens(plan, batch), verified, draft_index)
        if draft.features is not None:
            self._features.write(batch.slots, draft.features)
        return draft.logits.index_select(0, batch.logit_rows)

    def _batch(self, plan: StepPlan) -> StepBatch:
        return build_batch(plan, self._kinds, dtype=self._dtype, device=self._device)

    def _tokens(self, plan: StepPlan, batch: StepBatch) -> HeadTokens:
        """Return the plan's tokens in the order of the batch."""
        positions = [part.start + offset for part in plan.slices for offset in range(len(part.token_ids))]
        previous = self._read(_slots(plan.slices, -1), positions)
        context = PagedContext(batch, self._cache, self._kind_of_layer)

        def attend(layer: int, query: torch.Tensor, kv_rows: torch.Tensor, scale: float) -> torch.Tensor:
            return context.attend_rows(self._first_kv_layer + layer, query, kv_rows, scale, None)

        return HeadTokens(batch.token_ids[0], batch.position_ids[0], previous[_order(plan, batch)], attend)

    def _read(self, slots: NDArray[np.int64], positions: Sequence[int]) -> torch.Tensor:
        """Return the features [T, F] in `slots`, which precede `positions`; zeros before a session's first token."""
        features = self._features.rows.index_select(0, _index(slots, self._device))
        is_first = torch.tensor([position == 0 for position in positions], device=self._device)
        return features.masked_fill_(is_first.unsqueeze(1), 0.0)


def _slots(slices: Sequence[SequenceSlice], shift: int) -> NDArray[np.int64]:
    """Return the slot of the position `shift` after each token of the slices, or of position 0 if that is negative."""
    found = []
    for part in slices:
        positions = np.maximum(np.arange(part.start, part.start + len(part.token_ids)) + shift, 0)
        table = np.asarray(part.block_table, dtype=np.int64)
        found.append(table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS)
    return np.concatenate(found)


def _order(plan: StepPlan, batch: StepBatch) -> torch.Tensor:
    """Return int64 [T]: index in the plan of each token of the batch; no slot is written twice in a step."""
    by_slot = np.argsort(_slots(plan.slices, 0))
    ranks = torch.argsort(torch.argsort(batch.slots))
    return _index(by_slot, batch.slots.device)[ranks]


def _index(values: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)
