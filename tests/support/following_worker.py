"""A worker that drafts by itself, as a device does, and counts how often it did. Called by tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from specdec.engine.base import StepPlan
from tests.support.table_worker import TableWorker


class FollowingWorker(TableWorker):
    """Steps that follow one another: their tokens are nobody's business but the drawer's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.may_draft = True
        self.runs: list[int] = []
        """Steps of each run."""

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
