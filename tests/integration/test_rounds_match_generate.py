"""Greedy rounds, proposer and verifier in this process, against Hugging Face `generate()` on the same checkpoint.

Small token budgets and a small pool, so that prefill chunks mix with draft steps and verifications, and sessions evict
each other. The oracle runs in fp32; a difference passes only where the oracle's two best logits tie within 1e-4.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.fan_out_policy import Predraft
from draft_service.proposer import DraftOptions, Proposer
from specdec.contract.types import Mode, SamplingFilters
from specdec.engine.loader import load_worker
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.options import CompileOptions, LoadRequest, row_counts
from target_service.verifier import Verifier
from tests.support.cuda_graphs_rig import CountedCapture
from tests.support.greedy_texts import generate, require_same_but_for_ties
from tests.support.round_driver import RoundDriver
from tests.support.tiny_models import build_tiny_pair

AUTO_OPTIONS = CompileOptions()

NUM_TOKENS = 28
NUM_PROMPTS = 6


@dataclass
class _Pair:
    """A target, a perturbed copy of it as draft, and the output of the target's `generate()`."""

    target: Path
    draft: Path
    prompts: list[list[int]] = field(default_factory=list)
    expected: list[list[int]] = field(default_factory=list)
    oracle: torch.nn.Module | None = None


@pytest.fixture(scope="module", params=["llama", "mistral"])
def pair(request, tmp_path_factory) -> _Pair:
    target, draft = build_tiny_pair(request.param, tmp_path_factory.mktemp(request.param), seed=3)
    generator = torch.Generator().manual_seed(7)
    built = _Pair(target, draft, oracle=AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval())
    shared = torch.randint(2, 256, (40,), generator=generator).tolist()
    for index in range(NUM_PROMPTS):
        own = torch.randint(2, 256, (3 + 9 * index,), generator=generator).tolist()
        built.prompts.append((shared if index % 2 else []) + own)
        built.expected.append(generate(built.oracle, built.prompts[-1], NUM_TOKENS))
    return built


async def _outputs(
    pair: _Pair,
    *,
    together: bool,
    predraft: Predraft,
    num_kv_blocks: int = 200,
    compiling: CompileOptions = AUTO_OPTIONS,
) -> tuple[list[list[int]], float]:
    """Return the output of each prompt's session, and alpha."""
    proposer, verifier = (
        engine(
            load_worker(
                LoadRequest(
                    str(path),
                    device="cpu",
                    dtype="float32",
                    num_kv_blocks=num_kv_blocks,
                    num_threads=1,
                    compiling=compiling,
                )
            ),
            ReplicaOptions(max_step_tokens=40),
        )
        for engine, path in (
            (partial(Proposer, drafting=DraftOptions(predraft=predraft)), pair.draft),
            (Verifier, pair.target),
        )
    )
    drivers = [RoundDriver(f"s{index}", list(prompt), proposer, verifier) for index, prompt in enumerate(pair.prompts)]
    jobs = [driver.generate(NUM_TOKENS, gamma=1 + 3 * index % 8) for index, driver in enumerate(drivers)]
    outputs = await asyncio.gather(*jobs) if together else [await job for job in jobs]
    for engine in (proposer, verifier):
        engine.check_integrity()
        await engine.close()
    num_tested = num_accepted = 0
    for driver in drivers:
        for proposal, decision in zip(driver.proposals, driver.decisions, strict=True):
            num_accepted += decision.num_accepted
            num_tested += min(decision.num_accepted + 1, len(proposal.draft_token_ids))
    return outputs, num_accepted / num_tested


def _require_same(pair: _Pair, outputs: list[list[int]]) -> None:
    for texts in zip(pair.prompts, pair.expected, outputs, strict=True):
        require_same_but_for_ties(pair.oracle, *texts)


@pytest.mark.parametrize("predraft", [Predraft.OFF, Predraft.ON])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "all at once"])
async def test_greedy_rounds_reproduce_generate(pair, together, predraft):
    outputs, alpha = await _outputs(pair, together=together, predraft=predraft)
    _require_same(pair, outputs)
    assert 0.3 < alpha < 0.95


@pytest.mark.parametrize("predraft", [Predraft.OFF, Predraft.ON])
async def test_greedy_rounds_reproduce_generate_while_sessions_evict_each_other(pair, predraft):
    outputs, _ = await _outputs(pair, together=True, predraft=predraft, num_kv_blocks=16)
    _require_same(pair, outputs)


async def test_greedy_rounds_through_captured_steps_reproduce_generate(pair):
    capture = CountedCapture()
    compiling = CompileOptions("cuda-graphs", row_counts(17), capture=capture)
    outputs, _ = await _outputs(pair, together=True, predraft=Predraft.ON, compiling=compiling)
    _require_same(pair, outputs)
    assert capture.num_replays > NUM_TOKENS


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.REJECTION])
async def test_a_draft_equal_to_the_target_is_accepted_also_after_the_loss_of_its_sessions(pair, mode):
    """At T = 1 with the whole distribution as support, p equals q up to the rounding of 16-bit weights."""
    same = [
        load_worker(LoadRequest(str(pair.target), device="cpu", dtype="float32", num_kv_blocks=64)) for _ in range(2)
    ]
    proposer, verifier = Proposer(same[0], drafting=DraftOptions(support_coverage=1.0)), Verifier(same[1])
    driver = RoundDriver(
        "s", [5, 6, 7], proposer, verifier, filters=SamplingFilters(temperature=1.0), mode=mode, seed=9
    )
    await driver.generate(60, gamma=4)
    await proposer.release(["s"])
    await driver.generate(120, gamma=4)
    assert driver.num_misses == 1
    num_accepted = sum(decision.num_accepted for decision in driver.decisions)
    num_drafted = sum(len(proposal.draft_token_ids) for proposal in driver.proposals)
    assert num_accepted >= num_drafted - 2
    await proposer.close()
    await verifier.close()
