"""Logits over a draft's own tokens, seen through the tokens that it has in common with its target."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draft_service.cross_vocabulary.translating_program import SharedTokens
from specdec.checkpoints.cross_vocabulary.pair import TokenizerPair
from specdec.checkpoints.vocabulary import load_vocabulary
from specdec.engine.logits.step_logits import StepLogits
from tests.support.other_tokenizers import load_pair, save_byte_level_vocabulary, save_piece_vocabulary

OWN = ["<unk>", "</s>", "▁", "a", "b", "<0x61>", "<0x20>", "ab"]
THEIRS = ["<|end|>", "b", "a", "Ġ", "aa"]
LOGITS = np.array([[-1.0, 0.5, 2.0, 1.0, 0.0, 0.7, -0.3, 1.5], [3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]], np.float32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TokenizerPair:
    folder = tmp_path_factory.mktemp("pair")
    save_piece_vocabulary(folder / "own", OWN, [])
    save_byte_level_vocabulary(folder / "theirs", THEIRS, [])
    ids = load_vocabulary(folder / "own")
    assert sorted(ids, key=lambda token: ids[token]) == OWN
    return load_pair(folder / "own", folder / "theirs")


def test_own_tokens_of_the_same_bytes_are_summed_and_all_others_left_out(pair: TokenizerPair) -> None:
    restricted = SharedTokens(pair, torch.device("cpu")).restrict(torch.from_numpy(LOGITS))
    row = LOGITS[0].astype(np.float64)
    expected = [row[1], row[4], np.logaddexp(row[3], row[5]), np.logaddexp(row[2], row[6]), -np.inf]
    np.testing.assert_allclose(restricted[0].numpy(), expected, rtol=1e-6)


def test_the_mass_that_is_lost_is_that_of_all_others_at_the_requests_temperature(pair: TokenizerPair) -> None:
    shared, logits = SharedTokens(pair, torch.device("cpu")), StepLogits.read(torch.from_numpy(LOGITS))
    for temperature in (1.0, 0.7):
        weights = np.exp(LOGITS.astype(np.float64) / temperature)
        expected = weights[:, [0, 7]].sum(axis=1) / weights.sum(axis=1)
        np.testing.assert_allclose(shared.lost_masses(logits, [temperature] * 2), expected, rtol=1e-5)


def test_of_a_greedy_draft_the_likeliest_token_is_lost_or_nothing_is(pair: TokenizerPair) -> None:
    logits = StepLogits.read(torch.from_numpy(LOGITS))
    assert SharedTokens(pair, torch.device("cpu")).lost_masses(logits, [0.0, 0.0]) == [0.0, 1.0]
