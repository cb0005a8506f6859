"""A table worker with recurrent states: a state is the tokens that it took in.

A slice that begins with the state of other tokens than its KV holds is refused. Called by tests of hybrids' sessions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from specdec.engine.base import SequenceSlice, SliceStates, StepPlan
from tests.support.table_worker import TableWorker

STATE_BYTES = 1000


class RecurrentTableWorker(TableWorker):
    """A `TableWorker` that is a hybrid with slots for `num_states` states."""

    def __init__(self, *, num_states: int, **options: Any) -> None:
        super().__init__(**options)
        self.shape = replace(self.shape, num_states=num_states, state_bytes=STATE_BYTES)
        self.states: list[tuple[int, ...] | None] = [None] * num_states
        """Tokens that the state in each slot has taken in; None: nothing was saved there."""
        self.damaged: set[int] = set()
        """Slots whose states give logits that are not finite, until they are saved again."""

    def execute(self, plan: StepPlan) -> torch.Tensor:
        saved: dict[int, tuple[int, ...]] = {}
        is_damaged = [self._run_states(part, saved) for part in plan.slices]
        logits = super().execute(plan)
        for slot, tokens in saved.items():
            self.states[slot] = tokens
        damaged = {slot for part, bad in zip(plan.slices, is_damaged, strict=True) if bad for slot in _saved_by(part)}
        self.damaged = self.damaged - saved.keys() | damaged
        counts = [part.num_logit_rows for part in plan.slices]
        logits[torch.from_numpy(np.repeat(is_damaged, counts))] = float("nan")
        return logits

    def _run_states(self, part: SequenceSlice, saved: dict[int, tuple[int, ...]]) -> bool:
        """Note the states that a slice saves; return whether it begins with a damaged one."""
        states = part.states or SliceStates(None)
        before = () if states.source is None else self.states[states.source]
        blocks = self._blocks()[list(part.block_table)].reshape(-1, 2)
        held = tuple(int(token_id) for token_id in blocks[: part.start, 0])
        if before != held:
            raise ValueError(f"a slice after {held} begins with the state after {before}")
        for num_tokens, slot in states.saves:
            if slot in saved:
                raise ValueError(f"two states are saved in slot {slot}")
            saved[slot] = (*held, *part.token_ids[:num_tokens])
        return states.source in self.damaged


def _saved_by(part: SequenceSlice) -> list[int]:
    return [] if part.states is None else [slot for _, slot in part.states.saves]
