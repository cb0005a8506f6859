"""KV blocks: who holds them, who may adopt them, which go first."""

from __future__ import annotations

import pytest

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.sessions.block_manager import BlockManager, blocks_for


def test_blocks_are_counted_up():
    assert [blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_growing_takes_just_the_blocks_that_are_missing():
    blocks, table = BlockManager(4), []
    assert blocks.grow(table, 17)
    assert blocks.grow(table, 20)
    assert len(table) == len(set(table)) == 2
    assert blocks.num_available == 2
    blocks.check_integrity([table])


def test_growing_beyond_the_pool_changes_nothing():
    blocks, table = BlockManager(2), []
    blocks.grow(table, 1)
    assert not blocks.grow(table, 3 * BLOCK_TOKENS)
    assert len(table) == 1
    blocks.check_integrity([table])


def test_truncating_keeps_the_block_of_the_last_token():
    blocks, table = BlockManager(4), []
    blocks.grow(table, 64)
    first_two = table[:2]
    blocks.truncate(table, 17)
    assert table == first_two
    assert blocks.num_available == 2
    blocks.free(table)
    assert blocks.num_available == 4
    blocks.check_integrity([table])


def test_a_published_block_outlives_its_table_and_is_adopted():
    blocks, table, other = BlockManager(4), [], []
    blocks.grow(table, 32)
    blocks.publish(table[0], b"first")
    published = table[0]
    blocks.free(table)
    assert blocks.num_available == 4
    assert blocks.adopt(other, [b"first", b"second"]) == 1
    assert other == [published]
    blocks.check_integrity([table, other])


def test_a_shared_block_is_free_only_when_the_last_table_lets_go():
    blocks, table, other = BlockManager(2), [], []
    blocks.grow(table, 16)
    blocks.publish(table[0], b"first")
    blocks.adopt(other, [b"first"])
    blocks.free(table)
    assert blocks.num_held == 1
    assert not blocks.grow([], 32)
    blocks.free(other)
    assert blocks.num_held == 0


def test_unpublished_blocks_are_used_before_cached_ones_and_the_end_of_a_chain_before_its_root():
    blocks, table, other = BlockManager(4), [], []
    blocks.grow(table, 48)
    for index, block_id in enumerate(table[:2]):
        blocks.publish(block_id, bytes([index]))
    blocks.free(table)
    blocks.grow(other, 32)
    assert blocks.is_published(b"\0")
    assert blocks.is_published(b"\1")
    blocks.grow(other, 48)
    assert blocks.is_published(b"\0")
    assert not blocks.is_published(b"\1")
    blocks.check_integrity([other])


def test_the_first_block_published_under_a_hash_stays_the_one():
    blocks, table, other, third = BlockManager(3), [], [], []
    blocks.grow(table, 16)
    blocks.grow(other, 16)
    blocks.publish(table[0], b"same")
    blocks.publish(other[0], b"same")
    blocks.adopt(third, [b"same"])
    assert third == table
    blocks.check_integrity([table, other, third])


def test_a_stamp_holds_as_long_as_the_block_cannot_be_written():
    blocks, table, other = BlockManager(2), [], []
    blocks.grow(table, 32)
    blocks.publish(table[0], b"first")
    assert blocks.stamps([b"first", b"second"]) is None
    blocks.publish(table[1], b"second")
    stamps = blocks.stamps([b"first", b"second"])
    assert [block_id for block_id, _ in stamps] == table
    blocks.free(table)  # it is cached
    assert blocks.stamps([b"first", b"second"]) == stamps
    blocks.grow(other, 16)  # the second is evicted, written, and published as before
    assert blocks.stamps([b"first", b"second"]) is None
    blocks.publish(other[0], b"second")
    again = blocks.stamps([b"first", b"second"])
    assert again[0] == stamps[0]
    assert again[1] != stamps[1]
    assert again[1][0] == stamps[1][0]


@pytest.mark.parametrize("tables", [[], [[0, 1]], [[0], [0]]])
def test_the_integrity_check_sees_a_table_that_is_not_as_counted(tables):
    blocks = BlockManager(3)
    blocks.grow([], 0)
    held: list[int] = []
    blocks.grow(held, 16)
    wrong = [[held[0] if block_id == 0 else 2 for block_id in table] for table in tables]
    with pytest.raises(RuntimeError, match="counted"):
        blocks.check_integrity(wrong)
