"""Number of times that a step waits for the device, as docs/history/performance.md states."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

from specdec.contract.types import SamplingFilters
from specdec.engine.logits.filters import distributions_of, filtered_distributions, greedy_choices
from specdec.engine.logits.penalties import FilterContext, RunningHistory
from specdec.engine.logits.rows import cut_supports, distribution_rows
from specdec.engine.logits.step_logits import StepLogits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine: no wait was counted"),
]
NUM_ROWS, NUM_TOKENS, S_MAX = 5, 32_000, 64
SUPPORTS = [np.arange(row, row + S_MAX, dtype=np.uint32) for row in range(NUM_ROWS)]
GREEDY = SamplingFilters(temperature=0.0)
LAWS = {
    "no filter": SamplingFilters(temperature=0.7),
    "top-k": SamplingFilters(temperature=0.7, top_k=50, top_p=0.95),
    "top-p": SamplingFilters(top_p=0.9),
}


def num_waits(action: Callable[[], object]) -> int:
    action()  # the first call loads and allocates
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in seen)


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    rows = torch.randn(NUM_ROWS, NUM_TOKENS, generator=torch.Generator().manual_seed(1)) * 6
    return rows.to("cuda")


def contexts(filters: SamplingFilters) -> list[FilterContext]:
    return [FilterContext(filters, [], 0)] * NUM_ROWS


def test_a_greedy_step_waits_once(logits: torch.Tensor) -> None:
    assert num_waits(lambda: greedy_choices(StepLogits.read(logits), contexts(GREEDY))) == 1


@pytest.mark.parametrize(("filters", "expected"), [("no filter", 2), ("top-k", 2), ("top-p", 3)])
def test_a_sampled_draft_step_waits_only_for_its_reads(filters: str, expected: int, logits: torch.Tensor) -> None:
    def step() -> None:
        read = StepLogits.read(logits)
        cut_supports(filtered_distributions(read.values, contexts(LAWS[filters])), S_MAX)

    assert num_waits(step) == expected


@pytest.mark.parametrize(("filters", "expected"), [("no filter", 3), ("top-k", 3), ("top-p", 4)])
def test_a_sampled_verification_waits_only_for_its_reads(filters: str, expected: int, logits: torch.Tensor) -> None:
    def step() -> None:
        read = StepLogits.read(logits)
        distribution_rows(filtered_distributions(read.values, contexts(LAWS[filters])), SUPPORTS, [0.5] * NUM_ROWS)

    assert num_waits(step) == expected


def test_a_multi_step_draft_with_penalties_does_not_wait_and_equals_the_cpu(logits: torch.Tensor) -> None:
    filters = SamplingFilters(
        repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.7, logit_bias={5: 1.5},
        min_new_tokens=20, end_token_ids=(1, 2),
    )  # fmt: skip
    known = [FilterContext(filters, [3, 9, 9, row], 1) for row in range(NUM_ROWS)]
    drawn = torch.tensor([9, 10, 11, 9, 9])
    on_device = drawn.cuda()

    def run(device: str, token_ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        history = RunningHistory(known, NUM_TOKENS, torch.device(device))
        for _ in range(2):
            history.processed_logits(values)
            history.add(token_ids)
        return history.processed_logits(values)

    assert num_waits(lambda: run("cuda", on_device, logits)) == 0
    assert torch.equal(run("cuda", on_device, logits).cpu(), run("cpu", drawn, logits.cpu()))


@pytest.mark.parametrize("filters", LAWS)
def test_distributions_of_a_multi_step_draft_do_not_wait(filters: str, logits: torch.Tensor) -> None:
    scores, params = logits.to(torch.float64), [LAWS[filters]] * NUM_ROWS
    short = torch.zeros(NUM_ROWS, dtype=torch.bool, device="cuda")
    assert num_waits(lambda: distributions_of(scores.clone(), params, short)) == 0


@pytest.mark.parametrize("filters", LAWS)
def test_distributions_supports_and_rows_equal_those_of_the_cpu(filters: str, logits: torch.Tensor) -> None:
    tied = logits.round()
    laws = filtered_distributions(tied, contexts(LAWS[filters]))
    expected = filtered_distributions(tied.cpu(), contexts(LAWS[filters]))
    torch.testing.assert_close(laws.cpu(), expected, rtol=0, atol=1e-12)
    for (here, lost_here), (there, lost_there) in zip(
        cut_supports(expected.to("cuda"), S_MAX), cut_supports(expected, S_MAX), strict=True
    ):
        np.testing.assert_array_equal(here.token_ids, there.token_ids)
        np.testing.assert_array_equal(here.weights, there.weights)
        assert lost_here == pytest.approx(lost_there, abs=1e-12)
