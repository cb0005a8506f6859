"""Histories that grow on the device give the same logits as `processed_logits` with the same history on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specdec.contract.types import SamplingFilters
from specdec.engine.logits.penalties import FilterContext, RunningHistory, processed_logits

NUM_TOKENS = 50
ENDS = (3, 17, 44)
ROWS: dict[str, SamplingFilters] = {
    "neutral": SamplingFilters(),
    "repeated": SamplingFilters(repetition_penalty=1.3),
    "wanted again": SamplingFilters(repetition_penalty=0.7, end_token_ids=ENDS),
    "present": SamplingFilters(presence_penalty=0.37),
    "frequent": SamplingFilters(frequency_penalty=-0.11),
    "biased": SamplingFilters(logit_bias={4: 0.3, 17: -2.5}),
    "short": SamplingFilters(min_new_tokens=13, end_token_ids=ENDS),
    "all": SamplingFilters(
        repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.3, logit_bias={3: 1.7},
        min_new_tokens=12, end_token_ids=ENDS,
    ),
    "all tokens end": SamplingFilters(min_new_tokens=15, end_token_ids=tuple(range(NUM_TOKENS))),
}  # fmt: skip


def contexts_of(filters: Sequence[SamplingFilters], histories: Sequence[list[int]], start: int) -> list[FilterContext]:
    return [
        FilterContext(f, np.array(history, np.uint32), start) for f, history in zip(filters, histories, strict=True)
    ]


@pytest.mark.parametrize("names", [*([name] for name in ROWS), list(ROWS)], ids=lambda names: "-".join(names[:2]))
@pytest.mark.parametrize("num_before", [0, 30])
def test_a_history_that_grows_on_the_device_gives_the_same_logits_as_on_the_host(
    names: list[str], num_before: int
) -> None:
    generator = torch.Generator().manual_seed(num_before)
    filters = [ROWS[name] for name in names]
    start = num_before // 3  # first output position; only the repetition penalty counts earlier tokens
    drawn = torch.randint(NUM_TOKENS // 2, (num_before + 16, len(names)), generator=generator)
    drawn[num_before + 5] = drawn[num_before + 2]
    histories = [drawn[:num_before, row].tolist() for row in range(len(names))]
    history = RunningHistory(contexts_of(filters, histories, start), NUM_TOKENS, torch.device("cpu"))
    for token_ids in drawn[num_before:]:
        logits = torch.randn(len(names), NUM_TOKENS, generator=generator) * 4
        logits[:, 7] = -torch.inf
        before = logits.clone()
        expected = processed_logits(logits, contexts_of(filters, histories, start))
        actual = history.processed_logits(logits)
        assert actual.dtype == torch.float64
        assert torch.equal(actual, expected)
        assert torch.equal(logits, before)
        history.add(token_ids)
        for row, token_id in enumerate(token_ids.tolist()):
            histories[row].append(token_id)
