"""Chain hashes."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.core.chain import ChainHasher
from specdec.core.reference import chain_hash

# With other values, KV of replicas and cold blocks of other versions would be missed.
VECTORS = [
    "5a8e614793a69f779f0ff0afe8939d4a",
    "35703ea893483e286ab0f078605ac8e0",
    "e277e9a3ee2cb4e9c859090e9425f649",
    "b8579d40f9f1dd48392536298d933408",
]


def test_chain_hashes_equal_their_committed_vectors() -> None:
    assert [chain_hash(range(length)).hex() for length in (0, 1, 16, 40)] == VECTORS


def test_a_hasher_returns_the_hash_of_every_length() -> None:
    tokens = np.arange(100, 153, dtype=np.uint32)
    hasher = ChainHasher(tokens)
    assert [hasher.at(length) for length in range(54)] == [chain_hash(tokens[:length]) for length in range(54)]
    assert hasher.block_hash(1) == hasher.at(32)


def test_one_token_changes_every_hash_after_it() -> None:
    ours, theirs = ChainHasher(range(40)), ChainHasher([*range(17), 99, *range(18, 40)])
    assert [ours.at(length) == theirs.at(length) for length in range(41)] == [True] * 18 + [False] * 23


def test_lengths_outside_the_sequence_are_refused() -> None:
    hasher = ChainHasher(range(5))
    for length in (-1, 6):
        with pytest.raises(ValueError, match=r"outside 0\.\.5"):
            hasher.at(length)
    with pytest.raises(ValueError, match="negative"):
        hasher.truncate(-1)
    hasher.truncate(9)
    assert len(hasher) == 5
