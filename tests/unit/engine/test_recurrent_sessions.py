"""The states of a hybrid's session in the session table, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.table import SessionTable
from tests.support.round_driver import make_round

NO_TOKENS = np.empty(0, dtype=np.uint32)
PROMPT = [3 + index % 17 for index in range(100)]


@pytest.mark.parametrize("num_states", [2, 3, 8])
def test_a_step_that_came_before_its_masks_saves_its_snapshot_once(num_states: int) -> None:
    table = SessionTable(BlockManager(16), BlockManager(num_states))
    position = make_round(PROMPT)
    sequence = table.fence(position)
    table.align(sequence, position, NO_TOKENS)
    assert table.reserve(sequence, committed_len=100, max_kv_len=101)
    for _ in range(2):
        num_tokens = sequence.num_pending
        sequence.plan_states(len(sequence), 100, 100, goes_on=False)
        table.note_run(sequence, num_tokens)
        sequence.run_again(1)
    sequence.plan_states(len(sequence), 100, 100, goes_on=False)
    table.note_run(sequence, sequence.num_pending)
    table.publish(sequence, 100)
    table.settle(sequence)
    table.check_integrity()
    table.release("s")
    table.check_integrity()
    assert table.states is not None
    assert table.states.num_available == num_states
    assert table.states.num_free == num_states - (num_states > 2)  # the snapshot stays
