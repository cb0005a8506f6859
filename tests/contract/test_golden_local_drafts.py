"""Golden recordings: wire bytes and draws of three generations with local drafts must not change unnoticed.

As `test_golden_rounds`, with what only these rounds have: the request's `local_draft` and the answer's `drafted`.

`python -m tests.contract.test_golden_local_drafts` records afresh, after a change that is meant to alter draws or
bytes.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from specdec.contract.types import Mode, SamplingFilters
from target_service.verifier import Verifier
from tests.contract.test_golden_rounds import GAMMA, NUM_TOKENS, PROMPT, Case, RecordedLink, decisions_of
from tests.support.round_driver import RoundDriver
from tests.support.table_worker import TableWorker

RECORDING = Path(__file__).with_name("golden_local_drafts.json")

CASES = {
    "greedy": Case(SamplingFilters(temperature=0.0)),
    "rejection with top-k and top-p": Case(SamplingFilters(temperature=0.7, top_k=12, top_p=0.9), num_logprobs=2),
    "coupled": Case(SamplingFilters(top_p=0.95), Mode.COUPLED),
}


async def run_case(case: Case) -> dict[str, Any]:
    """Return messages and decisions of a generation; halfway the target forgets the session."""
    verifier = Verifier(TableWorker(local_drafts={"early-exit": 1}))
    link = RecordedLink(verifier, case.num_logprobs)
    driver = RoundDriver("golden", list(PROMPT), None, link, filters=case.filters, mode=case.mode, seed=20_260_101,
                         local_pool="early-exit")  # fmt: skip
    try:
        await driver.generate(NUM_TOKENS // 2, GAMMA)
        await verifier.release(["golden"])
        await driver.generate(NUM_TOKENS, GAMMA)
    finally:
        await verifier.close()
    return {"target_link": link.items, "decisions": decisions_of(driver)}


@pytest.mark.parametrize("name", CASES)
async def test_a_generation_with_local_drafts_sends_the_recorded_bytes_and_draws_the_recorded_tokens(name: str) -> None:
    recorded = json.loads(RECORDING.read_text())[name]
    seen = await run_case(CASES[name])
    assert seen["decisions"] == recorded["decisions"]
    assert seen["target_link"] == recorded["target_link"]


async def test_the_recording_notices_another_seed_of_the_draft() -> None:
    """Negative control."""
    recorded = json.loads(RECORDING.read_text())["rejection with top-k and top-p"]
    other = await run_case(Case(SamplingFilters(temperature=0.7 + 1e-3, top_k=12, top_p=0.9), num_logprobs=2))
    assert other["target_link"] != recorded["target_link"]


if __name__ == "__main__":
    RECORDING.write_text(json.dumps({name: asyncio.run(run_case(case)) for name, case in CASES.items()}, indent=1))
