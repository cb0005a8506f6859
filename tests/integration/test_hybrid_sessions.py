"""Sessions of hybrids where other engines go wrong: states that do not follow the tokens they are used after.

One family for each kind of recurrence: short convolutions, the gated delta rule, Mamba 2. The expected texts are those
of Hugging Face's `generate()` in float32.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.fan_out_policy import Predraft
from draft_service.proposer import DraftOptions, Proposer
from specdec.checkpoints.model_size import model_size
from specdec.contract.errors import SpecdecError, Unsupported
from specdec.contract.types import BLOCK_TOKENS, SLOTS_PER_SESSION, Mode, RunLimit, SamplingFilters, VerifyRequest
from specdec.engine.loader import load_worker
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.engine.sessions.recurrent_states import SNAPSHOT_TOKENS, RecurrentStates, snapshot_lengths
from specdec.settings.draft_specs import parse_local_draft
from target_service.verifier import Verifier
from tests.support.greedy_texts import generate
from tests.support.round_driver import RoundDriver, make_round
from tests.support.tiny_hybrids import HYBRIDS
from tests.support.tiny_models import build_tiny_model, build_tiny_pair

PROMPT = [5, 17, 3, 99, 42, 7, 7, 12, 88, 31, 64, 2, 9]


@dataclass
class _Model:
    target: Path
    draft: Path
    oracle: torch.nn.Module

    def text(self, prompt: list[int], num_tokens: int) -> list[int]:
        return generate(self.oracle, prompt, num_tokens)


@pytest.fixture(
    scope="module",
    params=["qwen3_5", *(pytest.param(name, marks=pytest.mark.full) for name in ("lfm2", "granite_hybrid"))],
)
def model(request, tmp_path_factory) -> _Model:
    folder = tmp_path_factory.mktemp(request.param)
    target, draft = build_tiny_pair(request.param, folder, seed=5, num_layers=4, context=4096)
    return _Model(target, draft, AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval())


def _worker(path: Path, **options):
    fixed = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 400, "num_threads": 1}
    return load_worker(LoadRequest(str(path), **(fixed | options)))


#: Sessions that tests leave behind.
SESSIONS = ["s", "first", "second", *(f"s{index}" for index in range(9))]


@pytest.fixture(scope="module")
def engines(model) -> Iterator[tuple[Proposer, Verifier]]:
    limits = ReplicaOptions(max_step_tokens=64)
    both = Proposer(_worker(model.draft), limits), Verifier(_worker(model.target), limits)
    yield both
    for engine in both:
        engine.check_integrity()
        asyncio.run(engine.close())


@pytest.fixture
async def verifier(engines) -> AsyncIterator[Verifier]:
    yield engines[1]
    await engines[1].release(SESSIONS)


@pytest.fixture
async def proposer(engines) -> AsyncIterator[Proposer]:
    yield engines[0]
    await engines[0].release(SESSIONS)


async def test_rounds_with_and_without_drafts_in_turn(model, proposer, verifier):
    """Rows of a round without drafts once left the state of accepted drafts behind in other engines."""
    driver = RoundDriver("s", list(PROMPT), proposer, verifier)
    gammas = [4, 0, 8, 1, 0, 0, 3, 6, 0, 2]
    while len(driver.output) < 48:
        await driver.run_round(min(gammas[len(driver.decisions) % 10], 47 - len(driver.output)))
    assert driver.output == model.text(PROMPT, 48)
    accepted = {decision.num_accepted for decision in driver.decisions}
    assert 0 in accepted
    assert max(accepted) > 1


@pytest.mark.parametrize("kills", [("target",), ("draft",), ("target", "draft")], ids=" and ".join)
async def test_a_session_goes_on_after_the_loss_of_its_states(model, proposer, verifier, kills):
    """At odd lengths, so that no block and no snapshot ends where the session was."""
    driver = RoundDriver("s", list(PROMPT), proposer, verifier)
    for length in (7, 19, 40):
        await driver.generate(length, gamma=4)
        for name, engine in (("target", verifier), ("draft", proposer)):
            if name in kills:
                await engine.release(["s"])
    await driver.generate(60, gamma=4)
    assert driver.output == model.text(PROMPT, 60)
    assert driver.num_misses >= len(kills)


async def test_a_new_coordinator_takes_back_tokens_and_repeats_rounds(model, proposer, verifier):
    driver = RoundDriver("s", list(PROMPT), proposer, verifier)
    for length in (9, 10, 26, 33):
        await driver.generate(length, gamma=5)
        # The store lost the newest rounds: a new epoch goes on from fewer tokens.
        driver.tokens = driver.tokens[: len(driver.tokens) - 4]
        driver.epoch, driver.round_id = driver.epoch + 1, 0
        driver.draft_start = driver.target_start = 0
    await driver.generate(48, gamma=5)
    assert driver.output == model.text(PROMPT, 48)


async def test_a_second_turn_begins_at_the_snapshot_before_the_end_of_the_prompt(model, proposer, verifier):
    """The second prompt repeats the first one without its last tokens, as the next turn of a chat does."""
    prompt = (PROMPT * 9)[:100]
    first = RoundDriver("first", list(prompt), proposer, verifier)
    await first.generate(20, gamma=4)
    second_prompt = [*prompt[:-5], 77, 78, *first.output[:11], 12, 99, 3]
    second = RoundDriver("second", list(second_prompt), proposer, verifier)
    await second.generate(24, gamma=3)
    assert second.output == model.text(second_prompt, 24)
    cached = [proposal.num_cached_tokens for proposal in second.proposals[:1]]
    assert cached == [80]


async def test_a_long_shared_prompt_is_computed_once(model, verifier):
    shared = (PROMPT * 200)[: 2 * SNAPSHOT_TOKENS + 40]
    first = RoundDriver("first", [*shared, 4, 4], None, verifier)
    await first.generate(3, gamma=0)
    second_prompt = [*shared[: SNAPSHOT_TOKENS + 200], 9, 8, 7]
    request = VerifyRequest(make_round(second_prompt, session_id="second"), np.empty(0, np.uint32), ())
    answer = await verifier.verify(request)
    assert answer.num_cached_tokens == SNAPSHOT_TOKENS
    second = RoundDriver("second", list(second_prompt), None, verifier, round_id=1)
    await second.generate(6, gamma=0)
    assert second.output == model.text(second_prompt, 6)


async def test_coupled_text_is_one_text_whatever_drafts_there_are(model, proposer, verifier):
    texts = []
    for gamma in (0, 1, 4, 8):
        driver = RoundDriver(
            f"s{gamma}", list(PROMPT), proposer if gamma else None, verifier, mode=Mode.COUPLED, seed=9,
            filters=SamplingFilters(temperature=1.0),
        )  # fmt: skip
        texts.append(await driver.generate(40, gamma=gamma))
    assert texts[1:] == texts[:-1]


async def test_a_run_advances_the_state_and_a_round_follows_it(model, proposer, verifier):
    tokens = list(PROMPT)
    request = VerifyRequest(
        make_round(tokens, session_id="s", output_start=len(PROMPT)), np.empty(0, np.uint32), (),
        run=RunLimit(len(tokens) + 17, frozenset()),
    )  # fmt: skip
    answers: list = []
    answers.append(await verifier.verify(request, answers.append))
    tokens += [answer.decided_token_id for answer in answers]
    assert tokens[len(PROMPT) :] == model.text(PROMPT, len(answers))
    # The client saw fewer tokens of the run than the target computed.
    driver = RoundDriver("s", tokens[:-5], proposer, verifier, round_id=1, epoch=2)
    await driver.generate(20, gamma=4)
    assert driver.output == model.text(tokens[:-5], 20)


async def test_a_session_holds_two_states_whatever_gamma_is(model, proposer, verifier):
    shape = verifier._shape
    before = verifier.stats().num_replayed_tokens
    for gamma in (0, 8):
        driver = RoundDriver(f"s{gamma}", list(PROMPT), proposer, verifier)
        await driver.generate(30, gamma=gamma)
        assert verifier.stats().session_state_bytes <= SLOTS_PER_SESSION * shape.state_bytes
        assert proposer.stats().session_state_bytes <= SLOTS_PER_SESSION * shape.state_bytes
        await verifier.release([f"s{gamma}"])
        await proposer.release([f"s{gamma}"])
    assert verifier.stats().session_state_bytes == 0
    assert verifier.stats().num_replayed_tokens - before == sum(
        decision.num_accepted for decision in driver.decisions[:-1]
    )  # of the round before each


async def test_more_sessions_than_states_take_turns(model, proposer):
    """24 slots, which 12 sessions fill."""
    engine = Verifier(_worker(model.target, num_kv_blocks=100), ReplicaOptions(max_step_tokens=64))
    drivers = [RoundDriver(f"s{index}", [*PROMPT, index], proposer, engine) for index in range(30)]
    outputs = await asyncio.gather(*(driver.generate(9, gamma=2) for driver in drivers))
    engine.check_integrity()
    await engine.close()
    for driver, output in zip(drivers, outputs, strict=True):
        assert output == model.text(driver.tokens[: len(PROMPT) + 1], 9)


REFUSED = {
    "local drafts": (
        {"local_drafts": (parse_local_draft("early-exit:2"),)},
        "recurrent layers, with which local drafts do not run",
    ),
    "graphs": ({"compiling": CompileOptions("inductor")}, "recurrent layers, whose steps run by --compile-backend"),
    "no room": ({"num_kv_blocks": None, "kv_cache_bytes": 3000}, "no room for one block of"),
}


@pytest.mark.parametrize(("options", "told"), REFUSED.values(), ids=REFUSED)
def test_what_a_hybrid_cannot_do_is_refused_in_one_line(model, options, told):
    with pytest.raises(SpecdecError, match=told) as refused:
        _worker(model.target, **options)
    assert "\n" not in refused.value.message


def test_a_hybrid_does_not_draft_ahead(model):
    with pytest.raises(Unsupported, match="remove --predraft"):
        Proposer(_worker(model.draft), drafting=DraftOptions(predraft=Predraft.ON))


def test_snapshots_stand_on_whole_blocks_within_the_slice():
    assert snapshot_lengths(0, 100, 100) == [80]
    assert snapshot_lengths(80, 100, 100) == []
    assert snapshot_lengths(0, 79, 100) == []
    assert snapshot_lengths(0, 3000, 16) == [1024, 2048]
    assert snapshot_lengths(1024, 2048, 2064) == [2048]


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_planner_counts_the_states_that_a_worker_of_two_bytes_a_weight_holds(architecture, tmp_path):
    layers = 6 if architecture == "nemotron_h" else 4
    path = build_tiny_model(architecture, tmp_path, num_layers=layers, dtype=torch.bfloat16)
    worker = load_worker(LoadRequest(str(path), device="cpu", dtype="bfloat16", num_kv_blocks=40, num_threads=1))
    size = model_size(str(path))
    assert worker.shape.state_bytes == size.state_bytes
    assert sum(worker.shape.kv_layout.layer_bytes) == BLOCK_TOKENS * size.kv_bytes_per_token


async def test_a_state_that_took_in_rejected_drafts_changes_the_text(model, proposer, verifier, monkeypatch):
    """The negative control: the fault of other engines. States go where they should, but after all rows."""
    plan = RecurrentStates.plan

    def faulty(self, start, end, committed, **options):
        source, saves = plan(self, start, end, committed, **options)
        return source, tuple((end - start, slot) for _, slot in saves)

    monkeypatch.setattr(RecurrentStates, "plan", faulty)
    driver = RoundDriver("s", list(PROMPT), proposer, verifier)
    assert await driver.generate(40, gamma=4) != model.text(PROMPT, 40)
