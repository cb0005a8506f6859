"""Values of the cold tier: a value that differs from the one written under its key is a miss."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from specdec.state.kv_values import KvSpace

SPACE = KvSpace("model", "float32", "tp1.0", (96, 64), 2)
NAME = bytes(range(16))
PAYLOAD = np.random.default_rng(0).integers(0, 256, (2, 160), dtype=np.uint8)
NUM_CASES = 9_800  # and 200 through replicas, in tests/failure/test_kv_tier_faults.py


def damaged(value: bytes, random_: random.Random) -> bytes:
    """Return the bytes with a random kind of damage."""
    kind = random_.randrange(7)
    changed = bytearray(value)
    first = random_.randrange(len(value))
    length = random_.randint(1, 40)
    if kind == 0:
        changed[first] ^= 1 << random_.randrange(8)
    elif kind == 1:
        changed[first : first + length] = random_.randbytes(len(changed[first : first + length]))
    elif kind == 2:
        del changed[first:]
    elif kind == 3:
        changed += random_.randbytes(length)
    elif kind == 4:
        del changed[first : first + length]
    elif kind == 5:
        other = random_.randrange(len(value))
        changed[first : first + length], changed[other : other + length] = (
            changed[other : other + length],
            changed[first : first + length],
        )
    else:
        changed[:] = random_.randbytes(len(value))
    return bytes(changed)


def test_a_value_returns_the_blocks_that_were_written() -> None:
    value = bytes(SPACE.encode(NAME, PAYLOAD))
    decoded = SPACE.decode(NAME, value)
    assert decoded is not None
    assert np.array_equal(decoded, PAYLOAD)


def test_a_damaged_value_is_a_miss() -> None:
    value = bytes(SPACE.encode(NAME, PAYLOAD))
    random_ = random.Random(1)
    cases = [damaged(value, random_) for _ in range(NUM_CASES)]
    assert sum(case != value for case in cases) > 0.97 * NUM_CASES
    for case in cases:
        assert (SPACE.decode(NAME, case) is None) == (case != value)


@pytest.mark.parametrize(
    "other",
    [
        replace(SPACE, model_fingerprint="another"),
        replace(SPACE, dtype="bfloat16"),
        replace(SPACE, rank="tp2.0"),
        replace(SPACE, layer_bytes=(64, 96)),
        replace(SPACE, layer_bytes=(48, 32), run_blocks=4),
    ],
    ids=["model", "dtype", "rank", "layers", "blocks"],
)
def test_a_value_of_another_space_is_a_miss(other: KvSpace) -> None:
    value = bytes(other.encode(NAME, PAYLOAD.reshape(other.run_blocks, -1)))
    assert other.decode(NAME, value) is not None
    assert SPACE.decode(NAME, value) is None


def test_a_value_of_another_run_is_a_miss() -> None:
    other = bytes(reversed(NAME))
    assert SPACE.decode(NAME, bytes(SPACE.encode(other, PAYLOAD))) is None
    assert SPACE.key(NAME) != SPACE.key(other)


@pytest.mark.parametrize("field", ["model_fingerprint", "dtype", "rank"])
def test_models_types_and_ranks_have_different_keys(field: str) -> None:
    assert replace(SPACE, **{field: "another"}).key(NAME) != SPACE.key(NAME)


def test_two_clusters_share_no_value() -> None:
    other = replace(SPACE, cluster="blue")
    assert SPACE.key(b"n").startswith("specdec-kv:1:")
    assert other.key(b"n").startswith("specdec-kv@blue:1:")
    assert other.probe_key(8) != SPACE.probe_key(8)
    value = SPACE.encode(b"n", np.zeros(SPACE.payload_bytes, np.uint8))
    assert other.decode(b"n", bytes(value)) is None
