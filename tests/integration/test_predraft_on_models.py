"""Pre-drafting over real models: at a fixed gamma hit and miss give the same tokens, and acceptance does not suffer.

That laws are equal to the last bit is shown over table models (tests/unit/draft): a real forward pass of another batch
shape may round otherwise, which here moves a 16-bit weight by a few units. Every branch is given the time to grow to
its end, so that the share of hits does not depend on the machine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_service.fan_out_policy import Predraft
from draft_service.proposer import DraftOptions, Proposer
from specdec.contract.engine_api import EngineInfo
from specdec.contract.types import Mode, Proposal, ProposeRequest, SamplingFilters
from specdec.engine.base import Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from specdec.observability.engine_metrics import EngineMetrics
from target_service.verifier import Verifier
from tests.support.round_driver import RoundDriver
from tests.support.tiny_models import build_tiny_pair
from tests.support.watched_worker import WatchedWorker

NUM_TOKENS = 60
GAMMA = 4
LAWS = {
    "greedy": (Mode.REJECTION, SamplingFilters(temperature=0.0, repetition_penalty=1.2)),
    "coupled": (Mode.COUPLED, SamplingFilters(temperature=0.8, frequency_penalty=0.3)),
    "law": (Mode.REJECTION, SamplingFilters(temperature=0.8, top_k=40, presence_penalty=0.3)),
    "block": (Mode.BLOCK, SamplingFilters(temperature=1.0)),
}


class _PatientDraft:
    """A draft engine whose caller comes back only when all branches have grown. One session at a time."""

    def __init__(self, worker: Worker, **options: Any) -> None:
        self.worker = WatchedWorker(worker)
        self.metrics = EngineMetrics("m", role="draft")
        self.proposer = Proposer(
            self.worker,
            drafting=DraftOptions(predraft=Predraft.ON, **options),
            observer=self.metrics,
            clock=lambda: 0.0,
        )

    async def propose(self, request: ProposeRequest) -> Proposal:
        proposal = await self.proposer.propose(request)
        await self.worker.grown(len(proposal.draft_token_ids) + 1)
        self.proposer.check_integrity()
        return proposal

    async def release(self, session_ids: list[str]) -> None:
        await self.proposer.release(session_ids)

    def info(self) -> EngineInfo:
        return self.proposer.info()

    async def close(self) -> None:
        await self.proposer.close()

    def rounds(self, outcome: str) -> float:
        labels = {"model_name": "m", "role": "draft", "pool": "default", "outcome": outcome}
        return self.metrics.registry.get_sample_value("specdec:predraft_rounds_total", labels) or 0.0


def _load(path: Path) -> Worker:
    return load_worker(LoadRequest(str(path), device="cpu", dtype="float32", num_kv_blocks=128, num_threads=1))


@pytest.fixture(scope="module", params=["llama", "mistral"])
def pair(request, tmp_path_factory) -> tuple[Path, Path]:
    return build_tiny_pair(request.param, tmp_path_factory.mktemp(request.param), seed=3)


@pytest.mark.parametrize("filters", LAWS)
async def test_hits_and_misses_give_the_same_tokens(pair, filters):
    target, draft = pair
    mode, params = LAWS[filters]
    ahead, plain = _PatientDraft(_load(draft)), Proposer(_load(draft))
    verifiers = [Verifier(_load(target)) for _ in range(2)]
    drivers = [
        RoundDriver("s", list(range(3, 24)), engine, verifier, filters=params, mode=mode, seed=5)
        for engine, verifier in zip((ahead, plain), verifiers, strict=True)
    ]
    for driver in drivers:
        while len(driver.output) < NUM_TOKENS:  # the same gamma to the end
            await driver.run_round(GAMMA)
    assert drivers[0].tokens == drivers[1].tokens
    for ours, theirs in zip(drivers[0].proposals, drivers[1].proposals, strict=True):
        assert ours.draft_token_ids.tolist() == theirs.draft_token_ids.tolist()
        assert ours.kv_len == theirs.kv_len
        for left, right in zip(ours.supports, theirs.supports, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()
            assert np.abs(left.weights.astype(int) - right.weights.astype(int)).max() <= 4
    num_hits, num_misses = ahead.rounds("hit"), ahead.rounds("miss")
    print(f"{filters}: {num_hits:.0f} hits, {num_misses:.0f} misses")
    assert num_hits >= 3
    assert ahead.rounds("extended") == 0
    for engine in (ahead, plain, *verifiers):
        await engine.close()


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.REJECTION])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_draft_equal_to_the_target_is_always_accepted_and_nearly_always_foreseen(pair, mode, temperature):
    """At T = 1 with the whole law as support, p = q up to the rounding of 16-bit weights."""
    target, _ = pair
    ahead, verifier = _PatientDraft(_load(target), support_coverage=1.0), Verifier(_load(target))
    driver = RoundDriver(
        "s", [5, 6, 7], ahead, verifier, filters=SamplingFilters(temperature=temperature), mode=mode, seed=9
    )
    while len(driver.output) < 2 * NUM_TOKENS:
        await driver.run_round(GAMMA)
    num_accepted = sum(decision.num_accepted for decision in driver.decisions)
    num_drafted = sum(len(proposal.draft_token_ids) for proposal in driver.proposals)
    assert num_accepted >= num_drafted - 1
    assert driver.num_misses == 0
    assert ahead.rounds("hit") >= len(driver.decisions) - 2  # the first round is nobody's outcome
    await ahead.close()
    await verifier.close()


async def test_sessions_that_come_as_they_like_emit_what_they_emit_without_pre_drafting(pair):
    """No patience: branches are cut short, dropped for blocks and crowded out."""
    target, draft = pair
    outputs = []
    for policy in (Predraft.ON, Predraft.AUTO, Predraft.OFF):
        worker = load_worker(LoadRequest(str(draft), device="cpu", dtype="float32", num_kv_blocks=24, num_threads=1))
        proposer, verifier = Proposer(worker, drafting=DraftOptions(predraft=policy)), Verifier(_load(target))
        drivers = [
            RoundDriver(
                f"s{n}",
                list(range(3, 12 + 9 * n)),
                proposer,
                verifier,
                filters=LAWS["law"][1],
                mode=LAWS["law"][0],
                seed=n,
            )
            for n in range(4)
        ]
        outputs.append(await asyncio.gather(*(driver.generate(30, gamma=1 + n) for n, driver in enumerate(drivers))))
        proposer.check_integrity()
        await proposer.close()
        await verifier.close()
    assert outputs[0] == outputs[1] == outputs[2]
