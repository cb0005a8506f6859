"""The draft service's program: drafts of many sessions drawn together."""

from __future__ import annotations

import asyncio

import pytest

from draft_service.proposer import Proposer
from specdec.contract.types import ProposeRequest, SamplingFilters
from specdec.engine.logits import filters
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

TOKENS = [3 + index * 7 % 20 for index in range(100)]


async def test_drafts_drawn_in_batches_are_those_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        ProposeRequest(
            make_round(TOKENS[: 5 + n], session_id=f"s{n}", filters=SamplingFilters(temperature=n % 3), seed=n), 3
        )
        for n in range(7)
    ]

    async def draft() -> list[list[int]]:
        proposer = Proposer(TableWorker())
        proposals = await asyncio.gather(*(proposer.propose(request) for request in requests))
        await proposer.close()
        return [proposal.draft_token_ids.tolist() for proposal in proposals]

    together = await draft()
    monkeypatch.setattr(filters, "MAX_BATCH_LOGITS", 2 * 24)
    assert await draft() == together
