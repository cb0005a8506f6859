"""The tokenizer of simulated systems, and the times they would take if nothing cost anything around them."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.streams import StreamRun
from bench.systems.simulated import best_gamma, ideal_round_s, ideal_tokens_per_s, write_tokenizer
from specdec.checkpoints.vocabulary import load_tokenizer, vocabulary_fingerprint
from specdec.engine.simulated.simulated_pair import PRESETS, simulated_pair
from specdec.engine.simulated.text import simulated_vocabulary_fingerprint

SYNC = simulated_pair("simulated:70b-1b,predraft=off")
PREDRAFTED = simulated_pair("simulated:70b-1b")


def test_the_tokenizer_has_the_vocabulary_that_simulated_replicas_name(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert vocabulary_fingerprint(tokenizer.get_vocab()) == simulated_vocabulary_fingerprint()
    assert tokenizer.decode([1, 2, 27], skip_special_tokens=True) == " a b aa"


def test_a_synchronous_round_is_drafts_verification_and_both_round_trips() -> None:
    assert ideal_round_s(SYNC, 4, 0.0) == pytest.approx(4 * 2.5e-3 + 20e-3)
    assert ideal_round_s(SYNC, 4, 5e-3) == pytest.approx(4 * 2.5e-3 + 20e-3 + 5e-3)


def test_a_predrafted_round_hides_the_draft_as_often_as_it_hits() -> None:
    assert ideal_round_s(PREDRAFTED, 4, 0.0) == pytest.approx(0.9 * 20e-3 + 0.1 * 30e-3)
    always = replace(PREDRAFTED, text=replace(PREDRAFTED.text, predictability=1.0))
    assert ideal_round_s(always, 4, 5e-3) == pytest.approx(25e-3)


def test_branches_longer_than_a_verification_are_what_a_hit_waits_for() -> None:
    always = replace(PREDRAFTED, text=replace(PREDRAFTED.text, predictability=1.0))
    assert ideal_round_s(always, 12, 0.0) == pytest.approx(13 * PREDRAFTED.branched_step_s(12))


def test_a_dial_that_never_agrees_makes_one_token_a_round() -> None:
    never = replace(SYNC, text=replace(SYNC.text, alphas=(0.0,)))
    assert ideal_tokens_per_s(never, 4) == pytest.approx(1 / 30e-3)
    assert best_gamma(never) == 1


@pytest.mark.parametrize("name", PRESETS)
def test_predrafting_is_worth_something_on_every_preset(name: str) -> None:
    pair = PRESETS[name]
    sync = replace(pair, predrafts=False)
    assert ideal_tokens_per_s(pair, best_gamma(pair)) > 1.1 * ideal_tokens_per_s(sync, best_gamma(sync))


def test_steady_times_leave_out_the_first_chunk_and_the_last_rounds() -> None:
    run = StreamRun(began_s=1.0, chunk_s=[3.0, 3.5, 4.0, 4.1, 4.2], chunk_tokens=[9, 2, 3, 1, 1], stats={})
    assert run.steady_round_s() == pytest.approx(0.5)
    assert run.steady_token_s() == pytest.approx(1.0 / 5)
    assert run.ttft_s == pytest.approx(2.0)
    assert run.num_tokens == 16
