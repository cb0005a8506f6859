"""Greedy rounds of hybrids, proposer and verifier in this process, against Hugging Face `generate()`.

The recurrent layers of a hybrid cannot go back, so accepted tokens run again from the state before them. Each family is
a target and a perturbed copy of it as draft, so that drafts of all lengths are partly accepted. The oracle runs in
float32; a difference passes only where its two best logits tie within 1e-4.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.proposer import Proposer
from specdec.engine.loader import load_worker
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.options import LoadRequest
from target_service.verifier import Verifier
from tests.support.greedy_texts import generate, greedy_of_whole_passes, require_same_but_for_ties
from tests.support.round_driver import RoundDriver
from tests.support.tiny_hybrids import HYBRIDS
from tests.support.tiny_models import build_tiny_pair

NUM_TOKENS = 28


@dataclass
class _Pair:
    target: Path
    draft: Path
    oracle: torch.nn.Module
    prompts: list[list[int]]
    expected: list[list[int]]


#: A family for each kind of recurrence, one of which recurs and attends in every layer.
_QUICK = ("lfm2", "qwen3_5", "falcon_h1")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in _QUICK else pytest.mark.full) for name in HYBRIDS],
)
def pair(request, tmp_path_factory) -> _Pair:
    layers = 6 if request.param == "nemotron_h" else 4
    target, draft = build_tiny_pair(request.param, tmp_path_factory.mktemp(request.param), seed=3, num_layers=layers)
    oracle = _oracle(target)
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(2, 256, (70,), generator=generator).tolist()
    prompts = [
        (shared if index % 2 else []) + torch.randint(2, 256, (3 + 9 * index,), generator=generator).tolist()
        for index in range(8)
    ]
    expected = [generate(oracle, prompt, NUM_TOKENS) for prompt in prompts]
    return _Pair(target, draft, oracle, prompts, expected)


def _oracle(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _worker(path: Path, **options):
    fixed = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 200, "num_threads": 1}
    return load_worker(LoadRequest(str(path), **(fixed | options)))


async def _outputs(pair: _Pair, *, together: bool, **options) -> tuple[list[list[int]], float]:
    """Return the output of each prompt's session, and the share of accepted drafts."""
    limits = ReplicaOptions(max_step_tokens=40)
    proposer, verifier = (
        Proposer(_worker(pair.draft, **options), limits), Verifier(_worker(pair.target, **options), limits)
    )  # fmt: skip
    drivers = [RoundDriver(f"s{index}", list(prompt), proposer, verifier) for index, prompt in enumerate(pair.prompts)]
    jobs = [driver.generate(NUM_TOKENS, gamma=index + 1) for index, driver in enumerate(drivers)]
    outputs = await asyncio.gather(*jobs) if together else [await job for job in jobs]
    for engine in (proposer, verifier):
        engine.check_integrity()
        await engine.close()
    drafted = sum(len(proposal.draft_token_ids) for driver in drivers for proposal in driver.proposals)
    return outputs, sum(decision.num_accepted for driver in drivers for decision in driver.decisions) / drafted


def _require_same(pair: _Pair, outputs: list[list[int]]) -> None:
    for texts in zip(pair.prompts, pair.expected, outputs, strict=True):
        require_same_but_for_ties(pair.oracle, *texts)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "all at once"])
async def test_rounds_reproduce_generate(pair, together):
    outputs, accepted = await _outputs(pair, together=together)
    _require_same(pair, outputs)
    assert 0.1 < accepted < 0.95


async def test_rounds_reproduce_generate_while_sessions_take_each_others_blocks(pair):
    outputs, _ = await _outputs(pair, together=True, num_kv_blocks=18)
    _require_same(pair, outputs)


async def test_every_row_of_mamba_2_has_the_shortest_step_of_time_of_a_whole_pass(tmp_path):
    """`generate()` leaves it out in rows after the prompt, so its text is another one (docs/adr/0054)."""
    shortest = {"time_step_min": 0.05}
    target, draft = build_tiny_pair("nemotron_h", tmp_path, seed=3, num_layers=6, config_overrides=shortest)
    oracle, prompt = _oracle(target), list(range(2, 55))
    expected = greedy_of_whole_passes(oracle, prompt, NUM_TOKENS)
    outputs, _ = await _outputs(_Pair(target, draft, oracle, [prompt], [expected]), together=False)
    require_same_but_for_ties(oracle, prompt, expected, outputs[0])
