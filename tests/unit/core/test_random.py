"""Philox against its published vectors, bounds of draws, and committed vectors for numpy and torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from specdec.core.random import (
    DrawKey,
    DrawStream,
    gumbel_noise,
    index_at,
    index_at_uniform,
    locate_uniform,
    philox4x32,
    seed_words,
)
from specdec.engine.logits import rows

ONES = 0xFFFFFFFF

# Random123's kat_vectors for philox4x32, 10 rounds: counter, key, answer.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# Committed vectors: with other values the text of every seeded request would change.
KEY = DrawKey(seed=0x0123456789ABCDEF, turn=3, committed_len=77)
UNIFORM_VECTORS = {
    (0, DrawStream.PROPOSE): 0.9316084507139729,
    (0, DrawStream.ACCEPT): 0.32240212931446044,
    (1, DrawStream.ACCEPT): 0.1149394702880816,
    (2, DrawStream.RESIDUAL): 0.6083554829599856,
    (0, DrawStream.TAIL): 0.9497535101281153,
    (4, DrawStream.BONUS): 0.7721107810342543,
}
UINT31_VECTOR = [692353300, 246830632, 213750851]
BELOW_VECTOR = [0, 6, 1482669512, 3184008533863415013]
GUMBEL_VECTOR = [
    -0.31950739232375075,
    0.2433291903960879,
    -0.9146627986413345,
    0.8410261809011382,
    1.1389064713478523,
    -0.22275061922882539,
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_returns_the_published_vectors_on_ints_arrays_and_tensors(counter, key, answer) -> None:
    assert philox4x32(counter, key) == answer
    arrays = philox4x32(tuple(np.full(3, word, dtype=np.uint64) for word in counter), key)
    assert [set(words.tolist()) for words in arrays] == [{word} for word in answer]
    tensors = philox4x32(
        tuple(torch.full((3,), word, dtype=torch.int64) for word in counter),
        tuple(torch.full((3,), word, dtype=torch.int64) for word in key),
    )
    assert [set(words.tolist()) for words in tensors] == [{word} for word in answer]


@pytest.mark.parametrize(("index", "stream"), UNIFORM_VECTORS)
def test_uniforms_equal_their_committed_vectors(index: int, stream: DrawStream) -> None:
    assert KEY.uniform(index, stream) == UNIFORM_VECTORS[index, stream]


def test_gumbel_noise_equals_its_committed_vector_in_numpy_and_torch() -> None:
    token_ids = np.arange(len(GUMBEL_VECTOR))
    noise = gumbel_noise(KEY.seed, KEY.turn, 1234, token_ids)
    np.testing.assert_allclose(noise, GUMBEL_VECTOR, rtol=0, atol=1e-14)
    keys = torch.tensor([[*seed_words(KEY.seed), KEY.turn, 1234]] * len(token_ids))
    np.testing.assert_allclose(rows.gumbel_noise(keys, torch.tensor(token_ids)), GUMBEL_VECTOR, atol=1e-14)


def test_integer_draws_equal_their_committed_vectors() -> None:
    assert KEY.uint31s(3, DrawStream.ACCEPT) == UINT31_VECTOR
    assert [KEY.below(n, 1, DrawStream.RESIDUAL) for n in (1, 10, 1 << 31, 1 << 62)] == BELOW_VECTOR


def test_every_part_of_the_key_changes_the_draw() -> None:
    keys = [DrawKey(seed, turn, length) for seed, turn, length in itertools.product((5, 5 << 32), (0, 1), (8, 9))]
    draws = [key.uniform(index, stream) for key in keys for index in (0, 1) for stream in DrawStream]
    assert len(set(draws)) == len(draws)


def test_the_noise_of_a_token_does_not_depend_on_the_other_tokens() -> None:
    alone = [gumbel_noise(9, 1, 50, np.array([token_id]))[0] for token_id in range(40)]
    np.testing.assert_array_equal(gumbel_noise(9, 1, 50, np.arange(40)), alone)
    sparse = torch.tensor([3, 4, 5, 9, 8, 31])
    keys = torch.tensor([[9, 0, 1, 50]] * len(sparse))
    np.testing.assert_allclose(rows.gumbel_noise(keys, sparse), np.array(alone)[sparse], atol=1e-14)


def test_draws_below_n_stay_below_n_at_both_ends_of_the_words() -> None:
    for n in (1, 2, 3, (1 << 62) - 1, 1 << 62):
        draws = [DrawKey(seed, 0, 0).below(n, 0, DrawStream.PROPOSE) for seed in range(200)]
        assert min(draws) >= 0
        assert max(draws) < n


def test_the_grid_of_uniforms_lies_strictly_inside_the_unit_interval() -> None:
    largest = (float((1 << 52) - 1) + 0.5) * 2.0**-52
    assert largest < 1.0
    assert np.isfinite(-np.log(-np.log(largest)))
    assert np.isfinite(-np.log(-np.log(0.5 * 2.0**-52)))


def test_tail_uniforms_end_with_the_bonus_draw() -> None:
    assert KEY.tail_uniforms(2) == [
        KEY.uniform(0, DrawStream.TAIL),
        KEY.uniform(1, DrawStream.TAIL),
        KEY.uniform(2, DrawStream.BONUS),
    ]


def test_each_outcome_has_as_many_points_as_its_weight() -> None:
    weights = np.array([3, 0, 1, 5, 0])
    owners = [index_at(weights, point) for point in range(9)]
    assert np.bincount(owners, minlength=5).tolist() == weights.tolist()


def test_an_outcome_without_weight_is_never_chosen() -> None:
    weights = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    for uniform in (5e-324, 0.25, 0.5, 1.0 - 2**-53, 1.0):
        assert index_at_uniform(weights, uniform) in (1, 3)
    index, offset = locate_uniform(weights, 0.5)
    assert (index, offset) == (3, 0.25)


def test_draws_of_one_pass_do_not_depend_on_their_number() -> None:
    for key in (DrawKey(0, 0, 0), DrawKey((1 << 64) - 1, 3, 4_000_000_000)):
        longest = key.uint31s(17, DrawStream.ACCEPT)
        for num_draws in (0, 1, 4):
            assert key.uint31s(num_draws, DrawStream.ACCEPT) == longest[:num_draws]
