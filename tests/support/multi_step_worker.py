"""Workers with multi-step drafts, as on a GPU and in the native kernels, which count them. Called by tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.engine.base import MultiStepDrafts, StepPlan
from tests.support.table_worker import TableWorker


class MultiStepWorker(TableWorker):
    """A worker with multi-step drafts whose tokens are drawn by the caller."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.multi_step_drafts = MultiStepDrafts.ANY
        self.runs: list[int] = []
        """Number of steps of each multi-step draft."""

    def draft(self, plan: StepPlan, num_steps: int, draw: Callable[[int, torch.Tensor], torch.Tensor]) -> bool:
        self.runs.append(num_steps)
        for index in range(num_steps):
            token_ids = draw(index, self.execute(plan))
            assert token_ids.dtype == torch.int64
            slices = []
            for piece, token_id in zip(plan.slices, token_ids.tolist(), strict=True):
                assert piece.table is not None
                start = piece.start + len(piece.token_ids)
                slices.append(replace(piece, token_ids=(token_id,), start=start, block_table=tuple(piece.table[:])))
            plan = StepPlan(tuple(slices))
        return True


class GreedyMultiStepWorker(MultiStepWorker):
    """A worker with greedy multi-step drafts only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.multi_step_drafts = MultiStepDrafts.GREEDY

    def draft_greedy(self, plan: StepPlan, num_steps: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        maxima: list[NDArray[np.float32]] = []
        chosen: list[NDArray[np.int64]] = []

        def draw(_: int, logits: torch.Tensor) -> torch.Tensor:
            rows = logits.numpy()
            chosen.append(rows.argmax(axis=-1))
            maxima.append(np.take_along_axis(rows, chosen[-1][:, None], axis=-1)[:, 0])
            return torch.from_numpy(chosen[-1])

        self.draft(plan, num_steps, draw)
        return np.stack(maxima), np.stack(chosen)
