"""Block tables on the device: a step finds each table complete and transfers only the entries that changed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.device_tables import CHANGES_PER_SEQUENCE, DeviceTables
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.sequence import BlockTable

SCRATCH = 9999
ROW_BLOCKS = 40


class Kept:
    """Tables on a device and the steps that update them."""

    def __init__(self) -> None:
        self.tables = DeviceTables(ROW_BLOCKS, SCRATCH, torch.device("cpu"))
        self.num_changes = 0
        """Sizes of the copies of the newest step."""
        self.copied: list[tuple[int, int]] = []
        copy = self.tables._copy

        def count(begin: int, end: int) -> None:
            self.copied.append((begin, end))
            copy(begin, end)

        self.tables._copy = count  # type: ignore[method-assign]

    def step(self, *slices: SequenceSlice) -> None:
        """Run a step; the device then has every table, entry for entry."""
        places = [np.empty(CHANGES_PER_SEQUENCE * len(slices), dtype=np.int64) for _ in range(2)]
        self.copied.clear()
        firsts = self.tables.place(slices, *places)
        self.num_changes = int((places[0] != self.tables.padding_entry).sum())
        for _ in range(2):  # replayed
            self.tables.apply(*(torch.from_numpy(numbers) for numbers in places))
        for piece, first in zip(slices, firsts, strict=True):
            ids = piece.block_table if piece.table is None else piece.table[:]
            assert self.tables.on_device[first : first + len(ids)].tolist() == list(ids)
        assert self.tables.on_device[self.tables.padding_entry] == SCRATCH


def piece(table: BlockTable) -> SequenceSlice:
    return SequenceSlice((1,), 0, table.first(1), 1, table=table)


def test_tables_that_grow_shrink_and_change_owners_are_complete_on_the_device() -> None:
    rng, kept, manager = random.Random(1), Kept(), BlockManager(2000)
    tables = [BlockTable() for _ in range(150)]  # more than there are rows
    for _ in range(400):
        for index in rng.sample(range(150), 12):
            manager.truncate(tables[index], rng.randrange(0, 30) * BLOCK_TOKENS)
            manager.grow(tables[index], rng.randrange(1, 20) * BLOCK_TOKENS)
            if rng.random() < 0.2:  # a session continues as one of its forks
                manager.free(tables[index])
                fork = BlockTable()
                manager.grow(fork, rng.randrange(1, 20) * BLOCK_TOKENS)
                tables[index] = fork
        chosen = [table for table in rng.sample(tables, rng.randrange(1, 64)) if table]
        strangers = [SequenceSlice((1,), 0, tuple(rng.sample(range(2000), 5)), 1)] * rng.randrange(2)
        kept.step(*map(piece, chosen), *strangers)


def test_a_step_transfers_only_added_entries() -> None:
    kept, manager, table = Kept(), BlockManager(100), BlockTable()
    manager.grow(table, 30 * BLOCK_TOKENS)
    kept.step(piece(table))
    assert (kept.num_changes, [end - begin for begin, end in kept.copied]) == (0, [30])
    kept.step(piece(table))
    assert (kept.num_changes, kept.copied) == (0, [])
    for _ in range(3):
        manager.truncate(table, 30 * BLOCK_TOKENS)
        manager.grow(table, 32 * BLOCK_TOKENS)
        kept.step(piece(table))
        assert (kept.num_changes, kept.copied) == (2, [])


def test_an_entry_that_changed_at_the_same_length_is_transferred_again() -> None:
    """The length of a table does not show the change."""
    kept, manager, one, other = Kept(), BlockManager(100), BlockTable(), BlockTable()
    manager.grow(one, 6 * BLOCK_TOKENS)
    kept.step(piece(one))
    manager.truncate(one, 4 * BLOCK_TOKENS)
    manager.grow(other, BLOCK_TOKENS)  # takes the block that was freed
    manager.grow(one, 6 * BLOCK_TOKENS)
    kept.step(piece(one), piece(other))


def test_a_table_changes_only_at_its_end() -> None:
    table = BlockTable()
    table += [4, 5, 6]
    assert (table.first(2), table.first(2) is table.first(2)) == ((4, 5), True)
    with pytest.raises(TypeError):
        table[0] = 9
    with pytest.raises(TypeError):
        del table[0]
    del table[1:]
    table.append(7)
    assert (table.first(2), table.take_kept(), table.take_kept()) == ((4, 7), 0, 2)


def test_without_a_live_table_a_step_transfers_the_ids_that_differ() -> None:
    """Follower ranks receive ids alone; sessions keep their places in most steps."""

    def known(*block_ids: int) -> SequenceSlice:
        return SequenceSlice((1,), 0, block_ids, 1)

    kept = Kept()
    kept.step(known(1, 2, 3), known(4, 5))
    assert len(kept.copied) == 1  # a step carries two entries per session, and this one had room for four
    for one, other, num_changes in (((1, 2, 3), (4, 5), 0), ((1, 2, 3, 9), (4, 5), 1), ((1, 2), (4, 6), 1),
                                    ((1, 2, 3, 9), (4, 6), 2), ((4, 6), (1, 2, 3, 9), None)):  # fmt: skip
        kept.step(known(*one), known(*other))
        assert num_changes is None or (kept.num_changes, kept.copied) == (num_changes, [])
