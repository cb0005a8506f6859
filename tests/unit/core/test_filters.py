"""Filters against Hugging Face's processors, and the torch version against the numpy reference."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from specdec.contract.types import SamplingFilters
from specdec.core.reference import filtered_distribution, processed_logits
from specdec.engine.logits.filters import filtered_distributions, greedy_choices
from specdec.engine.logits.penalties import FilterContext
from specdec.engine.logits.step_logits import StepLogits

V = 200
OUTPUT_START = 12

LAWS = {
    "neutral": SamplingFilters(),
    "temperature": SamplingFilters(temperature=0.7),
    "hot": SamplingFilters(temperature=1.9),
    "top_k": SamplingFilters(top_k=7),
    "top_k wider than the vocabulary": SamplingFilters(top_k=5 * V),
    "top_p": SamplingFilters(top_p=0.9),
    "a narrow top_p": SamplingFilters(top_p=0.01, temperature=0.7),
    "a wide top_p": SamplingFilters(top_p=0.9999, temperature=2.5),
    "top_k and top_p": SamplingFilters(top_k=20, top_p=0.8, temperature=0.7),
    "min_p": SamplingFilters(min_p=0.05),
    "all cuts": SamplingFilters(temperature=1.3, top_k=40, top_p=0.95, min_p=0.02),
    "repetition": SamplingFilters(repetition_penalty=1.3),
    "repetition rewarded": SamplingFilters(repetition_penalty=0.8, top_p=0.9),
    "bias": SamplingFilters(logit_bias={3: 5.0, 17: -2.5, 190: 1.25}),
    "min_new_tokens": SamplingFilters(min_new_tokens=9, end_token_ids=(0, 5)),
    "min_new_tokens reached": SamplingFilters(min_new_tokens=8, end_token_ids=(0, 5)),
    "everything": SamplingFilters(
        temperature=0.7,
        top_k=50,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.2,
        logit_bias={3: 5.0, 100: -1.0},
        min_new_tokens=20,
        end_token_ids=(3,),
    ),
}


def random_logits(seed: int, rows: int) -> np.ndarray:
    logits = (np.random.default_rng(seed).normal(size=(rows, V)) * 3).astype(np.float32)
    logits[:, -4:] = -np.inf  # ids beyond the vocabulary
    return logits


def random_history(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 40, OUTPUT_START + 8).tolist()


def hugging_face_distribution(logits: np.ndarray, filters: SamplingFilters, history: list[int]) -> np.ndarray:
    processors = []
    if filters.logit_bias:
        processors.append(hf.SequenceBiasLogitsProcessor([[[k], v] for k, v in filters.logit_bias.items()]))
    if filters.repetition_penalty != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(filters.repetition_penalty))
    if filters.min_new_tokens:
        processors.append(
            hf.MinNewTokensLengthLogitsProcessor(OUTPUT_START, filters.min_new_tokens, list(filters.end_token_ids))
        )
    processors.append(hf.TemperatureLogitsWarper(filters.temperature))
    if filters.top_k:
        processors.append(hf.TopKLogitsWarper(filters.top_k))
    if filters.top_p < 1.0:
        processors.append(hf.TopPLogitsWarper(filters.top_p))
    if filters.min_p:
        processors.append(hf.MinPLogitsWarper(filters.min_p))
    scores = torch.tensor(logits[None], dtype=torch.float64)
    for processor in processors:
        scores = processor(torch.tensor([history]), scores)
    return scores.softmax(dim=-1)[0].numpy()


@pytest.mark.parametrize("name", LAWS)
def test_distributions_equal_those_of_hugging_face(name: str) -> None:
    for seed in range(10):
        logits, history = random_logits(seed, 1)[0], random_history(seed)
        filters = filtered_distribution(logits, LAWS[name], history, OUTPUT_START)
        np.testing.assert_allclose(filters, hugging_face_distribution(logits, LAWS[name], history), rtol=0, atol=1e-12)


def test_presence_and_frequency_penalties_count_this_turns_output_only() -> None:
    logits, history = random_logits(0, 1)[0], random_history(0)
    filters = SamplingFilters(presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.astype(np.float64)
    for token_id, count in Counter(history[OUTPUT_START:]).items():
        expected[token_id] -= 0.5 + 0.25 * count
    np.testing.assert_array_equal(processed_logits(logits, filters, history, OUTPUT_START), expected)


def test_repetition_comes_before_presence_and_bias_before_both() -> None:
    filters = SamplingFilters(logit_bias={1: 3.0}, repetition_penalty=2.0, presence_penalty=1.0)
    scores = processed_logits(np.array([0.0, 1.0, -1.0], dtype=np.float32), filters, [1, 2], 0)
    assert scores.tolist() == [0.0, (1.0 + 3.0) / 2.0 - 1.0, -1.0 * 2.0 - 1.0]


@pytest.mark.parametrize(
    "filters", [SamplingFilters(top_k=3), SamplingFilters(top_k=3, top_p=0.99), SamplingFilters(top_p=0.3)]
)
def test_ties_go_to_the_lower_ids_and_top_k_keeps_exactly_k(filters: SamplingFilters) -> None:
    logits = np.zeros((1, 10), dtype=np.float32)
    for kept in (
        np.flatnonzero(filtered_distribution(logits[0], filters, [], 0)).tolist(),
        np.flatnonzero(
            filtered_distributions(torch.tensor(logits), [FilterContext(filters, [], 0)])[0].numpy()
        ).tolist(),
    ):
        assert kept == [0, 1, 2]


def test_a_mask_that_would_leave_no_token_is_not_applied() -> None:
    filters = SamplingFilters(min_new_tokens=5, end_token_ids=(0, 1))
    logits = np.array([[1.0, 2.0, -np.inf]], dtype=np.float32)
    expected = filtered_distribution(logits[0], SamplingFilters(), [], 0)
    np.testing.assert_array_equal(filtered_distribution(logits[0], filters, [], 0), expected)
    np.testing.assert_allclose(
        filtered_distributions(torch.tensor(logits), [FilterContext(filters, [], 0)])[0], expected, atol=1e-15
    )


def test_greedy_distributions_are_one_hot_after_bias_penalties_and_masks() -> None:
    logits = np.array([5.0, 5.0, 4.0, 3.0], dtype=np.float32)
    assert filtered_distribution(logits, SamplingFilters(temperature=0.0), [], 0).tolist() == [1, 0, 0, 0]
    filters = SamplingFilters(temperature=0.0, min_new_tokens=1, end_token_ids=(0,), frequency_penalty=2.0)
    assert filtered_distribution(logits, filters, [9], 1).tolist() == [0, 1, 0, 0]
    assert filtered_distribution(logits, filters, [1], 0).tolist() == [1, 0, 0, 0]


def test_the_torch_version_equals_the_reference_on_a_batch_of_every_filter() -> None:
    params = [
        *LAWS.values(),
        SamplingFilters(presence_penalty=0.5, frequency_penalty=0.2, temperature=0.7),
        SamplingFilters(temperature=0.0, repetition_penalty=1.5),
    ]
    for seed in range(5):
        logits = random_logits(seed, len(params))
        if seed % 2:
            logits = logits.round()  # equal values everywhere, as in bf16 models
        before = logits.copy()
        histories = [random_history(100 * seed + row) for row in range(len(params))]
        contexts = [
            FilterContext(filters, history, OUTPUT_START) for filters, history in zip(params, histories, strict=True)
        ]
        distributions = filtered_distributions(torch.tensor(logits), contexts).numpy()
        expected = [
            filtered_distribution(logits[row], filters, histories[row], OUTPUT_START)
            for row, filters in enumerate(params)
        ]
        np.testing.assert_allclose(distributions, expected, rtol=0, atol=1e-14)
        np.testing.assert_array_equal(logits, before)
        choices = greedy_choices(StepLogits.read(torch.tensor(logits)), contexts)
        assert choices == [
            int(processed_logits(logits[row], filters, histories[row], OUTPUT_START).argmax())
            for row, filters in enumerate(params)
        ]


@pytest.mark.parametrize("temperature", [0.7, 40.0])
def test_a_nucleus_wider_than_the_first_candidates_is_cut_correctly(temperature: float) -> None:
    logits = np.random.default_rng(4).normal(size=(3, 12_000)).astype(np.float32) * np.array([[0.2], [1], [8]])
    filters = SamplingFilters(top_p=0.97, temperature=temperature, min_p=1e-9)
    distributions = filtered_distributions(
        torch.tensor(logits.astype(np.float32)), [FilterContext(filters, [], 0)] * 3
    ).numpy()
    for row in range(3):
        expected = filtered_distribution(logits[row].astype(np.float32), filters, [], 0)
        np.testing.assert_allclose(distributions[row], expected, rtol=0, atol=1e-13)
