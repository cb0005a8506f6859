"""The verifier's program: rows of many sessions answered together, in batches of bounded size."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import target_service.program
from specdec.contract.errors import Internal
from specdec.contract.types import DrawRule, SamplingFilters, Verification, VerifyRequest
from specdec.engine.logits import filters
from target_service.verifier import Verifier
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

TOKENS = [3 + index * 7 % 20 for index in range(100)]
NO_DRAFT = np.empty(0, dtype=np.uint32)


async def verified_in_one_step(
    worker: TableWorker, verifier: Verifier, requests: list[VerifyRequest]
) -> list[Verification | BaseException]:
    """Answers of calls that all arrive while a step of another session is held up."""
    worker.gate.clear()
    before = asyncio.create_task(verifier.verify(VerifyRequest(make_round(TOKENS[:20]), NO_DRAFT, ())))
    await asyncio.to_thread(worker.entered.acquire)
    together = [asyncio.create_task(verifier.verify(request)) for request in requests]
    await asyncio.sleep(0)  # lets them put themselves into the inbox
    worker.gate.set()
    await before
    return await asyncio.gather(*together, return_exceptions=True)


@pytest.mark.parametrize("draw_rule", [DrawRule.DISTRIBUTION, DrawRule.COUPLED])
@pytest.mark.parametrize("max_logits", [1, 4 * 24, 1 << 24])
async def test_a_step_of_many_rows_is_answered_in_batches_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch, max_logits: int, draw_rule: DrawRule
) -> None:
    monkeypatch.setattr(filters, "MAX_BATCH_LOGITS", max_logits)
    sizes: list[int] = []
    make_distributions = filters.filtered_distributions
    monkeypatch.setattr(
        target_service.program,
        "filtered_distributions",
        lambda logits, contexts: sizes.append(len(logits)) or make_distributions(logits, contexts),
    )
    draft = np.array([4, 5], dtype=np.uint32)
    requests = [
        VerifyRequest(
            make_round(
                TOKENS[: 5 + n], session_id=f"s{n}", filters=SamplingFilters(top_p=0.9), seed=n, draw_rule=draw_rule
            ),
            draft[: n % 3],
            (draft[:1],) * (n % 3) if draw_rule is DrawRule.DISTRIBUTION else (),
            num_logprobs=2,
        )
        for n in range(6)
    ]
    worker = TableWorker()
    verifier, alone = Verifier(worker), Verifier(TableWorker())
    answers = await verified_in_one_step(worker, verifier, requests)
    assert sizes == {1: [1, 2, 3, 1, 2, 3], 96: [3, 4, 2, 3], 1 << 24: [12]}[max_logits]
    for request, answer in zip(requests, answers, strict=True):
        expected = await alone.verify(request)
        assert answer.choice_token_ids.tolist() == expected.choice_token_ids.tolist()
        assert [(row.weights.tolist(), row.tail_token_id) for row in answer.rows] == [
            (row.weights.tolist(), row.tail_token_id) for row in expected.rows
        ]
        assert [row.top_token_ids.tolist() for row in answer.logit_rows] == [
            row.top_token_ids.tolist() for row in expected.logit_rows
        ]
    await verifier.close()
    await alone.close()


@pytest.mark.parametrize(
    ("temperature", "draw_rule"), [(0.0, DrawRule.DISTRIBUTION), (1.0, DrawRule.DISTRIBUTION), (1.0, DrawRule.COUPLED)]
)
async def test_a_session_without_finite_logits_fails_alone_however_its_tokens_are_drawn(
    temperature: float, draw_rule: DrawRule
) -> None:
    worker = TableWorker()
    worker.non_finite = {23: np.nan}
    verifier = Verifier(worker)
    options = {"filters": SamplingFilters(temperature=temperature), "draw_rule": draw_rule}
    requests = [
        VerifyRequest(make_round(tokens, session_id=f"s{index}", **options), NO_DRAFT, ())
        for index, tokens in enumerate((TOKENS[:9], [5, 23], TOKENS[:7]))
    ]
    first, bad, last = await verified_in_one_step(worker, verifier, requests)
    assert isinstance(bad, Internal)
    for request, answer in ((requests[0], first), (requests[2], last)):
        alone = Verifier(TableWorker())
        expected = await alone.verify(request)
        assert answer.choice_token_ids.tolist() == expected.choice_token_ids.tolist()
        assert [row.tail_token_id for row in answer.rows] == [row.tail_token_id for row in expected.rows]
        await alone.close()
    await verifier.close()
