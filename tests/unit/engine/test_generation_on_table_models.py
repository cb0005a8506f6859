"""Whole generations, in process, over table workers: what many sessions emit together is what each emits alone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from draft_service.proposer import DraftOptions, Proposer
from specdec.contract.types import Mode, SamplingFilters
from specdec.engine.loop.replica_engine import ReplicaOptions
from target_service.verifier import Verifier
from tests.support.round_driver import RoundDriver
from tests.support.table_worker import TableWorker

NUM_SESSIONS = 8
NUM_TOKENS = 20


def _prompt(index: int) -> list[int]:
    generator = np.random.default_rng(index)
    shared = [2, 3, 5, 7] * 9
    return shared[: 36 * (index % 2)] + generator.integers(0, 24, size=1 + 7 * index).tolist()


async def _generate_all(
    together: bool, *, mode: Mode, filters: SamplingFilters, num_blocks: int = 256
) -> list[list[int]]:
    proposer = Proposer(TableWorker(salt=1, num_blocks=num_blocks), ReplicaOptions(max_step_tokens=48))
    verifier = Verifier(TableWorker(num_blocks=num_blocks), ReplicaOptions(max_step_tokens=48))
    drivers = [
        RoundDriver(f"s{index}", _prompt(index), proposer, verifier, filters=filters, mode=mode, seed=index)
        for index in range(NUM_SESSIONS)
    ]
    jobs = [driver.generate(NUM_TOKENS, gamma=1 + index % 5) for index, driver in enumerate(drivers)]
    outputs = await asyncio.gather(*jobs) if together else [await job for job in jobs]
    proposer.check_integrity()
    verifier.check_integrity()
    await proposer.close()
    await verifier.close()
    assert proposer.stats().num_held_kv_blocks == verifier.stats().num_held_kv_blocks == 0
    return outputs


async def test_greedy_rounds_emit_the_targets_own_greedy_tokens():
    outputs = await _generate_all(True, mode=Mode.REJECTION, filters=SamplingFilters(temperature=0.0))
    for index, output in enumerate(outputs):
        assert output == TableWorker().greedy_continuation(_prompt(index), NUM_TOKENS)


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK, Mode.COUPLED, Mode.OFF])
async def test_sessions_emit_together_what_each_emits_alone(mode):
    filters = SamplingFilters(temperature=0.9, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2)
    together = await _generate_all(True, mode=mode, filters=filters)
    assert together == await _generate_all(False, mode=mode, filters=filters)


async def test_sessions_that_keep_evicting_each_other_still_emit_the_same():
    filters = SamplingFilters(temperature=0.0)
    crowded = await _generate_all(True, mode=Mode.REJECTION, filters=filters, num_blocks=24)
    assert crowded == await _generate_all(False, mode=Mode.REJECTION, filters=filters)


async def test_coupled_output_does_not_depend_on_gamma_or_draft():
    filters = SamplingFilters(temperature=1.0, top_k=12)
    outputs = set()
    for salt, gamma in ((0, 4), (1, 1), (1, 8), (2, 3), (1, 0)):
        proposer, verifier = Proposer(TableWorker(salt=salt)), Verifier(TableWorker())
        driver = RoundDriver("s", [4, 2], proposer, verifier, filters=filters, mode=Mode.COUPLED, seed=11)
        outputs.add(tuple(await driver.generate(NUM_TOKENS, gamma)))
        await proposer.close()
        await verifier.close()
    assert len(outputs) == 1


@pytest.mark.parametrize(("mode", "temperature"), [(Mode.REJECTION, 0.0), (Mode.COUPLED, 1.0), (Mode.REJECTION, 1.0)])
async def test_a_draft_equal_to_the_target_is_always_accepted(mode, temperature):
    """At T = 1 the support covers the whole law here, up to the rounding of its 16-bit weights."""
    proposer = Proposer(TableWorker(), drafting=DraftOptions(support_coverage=1.0))
    verifier = Verifier(TableWorker())
    driver = RoundDriver(
        "s", [4, 2], proposer, verifier, filters=SamplingFilters(temperature=temperature), mode=mode, seed=5
    )
    await driver.generate(200, gamma=4)
    await proposer.close()
    await verifier.close()
    num_drafted = sum(len(proposal.draft_token_ids) for proposal in driver.proposals)
    num_accepted = sum(decision.num_accepted for decision in driver.decisions)
    assert num_drafted > 100
    assert num_accepted == num_drafted
    assert driver.num_misses == 0
