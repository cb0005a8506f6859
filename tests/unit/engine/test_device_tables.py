"""Block tables kept on the device: whatever happens to a sequence's table, a step finds it there, and brings little."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.device_tables import CHANGES_PER_SEQUENCE, DeviceTables
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.block_table import BlockTable
from specdec.types import BLOCK_TOKENS

SCRATCH = 9999
ROW_BLOCKS = 40


class Kept:
    """Tables on a device, and the steps that bring them there."""

    def __init__(self) -> None:
        self.tables = DeviceTables(ROW_BLOCKS, SCRATCH, torch.device("cpu"))
        self.num_changes = 0
        """Of the newest step."""
        self.copied: list[tuple[int, int]] = []
        copy = self.tables._copy

        def count(begin: int, end: int) -> None:
            self.copied.append((begin, end))
            copy(begin, end)

        self.tables._copy = count  # type: ignore[method-assign]

    def step(self, *slices: SequenceSlice) -> None:
        """A step of a captured worker: the device then has every table, entry for entry."""
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


def test_tables_that_grow_are_cut_and_change_owners_are_always_there() -> None:
    rng, kept, manager = random.Random(1), Kept(), BlockManager(2000)
    tables = [BlockTable() for _ in range(150)]  # more than there are rows
    for _ in range(400):
        for index in rng.sample(range(150), 12):
            manager.truncate(tables[index], rng.randrange(0, 30) * BLOCK_TOKENS)
            manager.grow(tables[index], rng.randrange(1, 20) * BLOCK_TOKENS)
            if rng.random() < 0.2:  # a session goes on as one of its forks
                manager.free(tables[index])
                fork = BlockTable()
                manager.grow(fork, rng.randrange(1, 20) * BLOCK_TOKENS)
                tables[index] = fork
        chosen = [table for table in rng.sample(tables, rng.randrange(1, 64)) if table]
        strangers = [SequenceSlice((1,), 0, tuple(rng.sample(range(2000), 5)), 1)] * rng.randrange(2)
        kept.step(*map(piece, chosen), *strangers)


def test_a_step_brings_what_was_added_and_nothing_else() -> None:
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


def test_a_block_that_came_back_as_another_is_brought_again() -> None:
    """The length alone says nothing."""
    kept, manager, one, other = Kept(), BlockManager(100), BlockTable(), BlockTable()
    manager.grow(one, 6 * BLOCK_TOKENS)
    kept.step(piece(one))
    manager.truncate(one, 4 * BLOCK_TOKENS)
    manager.grow(other, BLOCK_TOKENS)  # takes the block that was given back
    manager.grow(one, 6 * BLOCK_TOKENS)
    kept.step(piece(one), piece(other))


def test_a_table_is_changed_at_its_end_alone() -> None:
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


def test_of_ids_alone_a_step_brings_those_that_differ() -> None:
    """As a rank has them that follows: sessions keep their places in most steps."""

    def known(*block_ids: int) -> SequenceSlice:
        return SequenceSlice((1,), 0, block_ids, 1)

    kept = Kept()
    kept.step(known(1, 2, 3), known(4, 5))
    assert len(kept.copied) == 1  # the step itself brings two entries a session, and four it had room for
    for one, other, num_changes in (((1, 2, 3), (4, 5), 0), ((1, 2, 3, 9), (4, 5), 1), ((1, 2), (4, 6), 1),
                                    ((1, 2, 3, 9), (4, 6), 2), ((4, 6), (1, 2, 3, 9), None)):  # fmt: skip
        kept.step(known(*one), known(*other))
        assert num_changes is None or (kept.num_changes, kept.copied) == (num_changes, [])
