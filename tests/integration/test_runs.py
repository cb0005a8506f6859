"""Runs of a target against single calls of the same engine: the same tokens, probabilities and logits, bit for bit.

The engine runs a tiny real model in fp32. A run of any length must answer what as many calls of one step each answer,
in every mode and with every filter, because its draws are keyed by the length that the session has at each step.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from specdec.contract.types import DrawRule, RunLimit, SamplingFilters, Verification, VerifyRequest
from specdec.engine.loader import load_worker
from specdec.engine.loop.job import Job
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.options import LoadRequest
from target_service.verifier import Verifier
from tests.support.round_driver import make_round
from tests.support.tiny_models import build_tiny_model

NUM_TOKENS = 33
PROMPT = [5, 17, 3, 99, 42, 7, 7, 12]
NO_IDS = np.empty(0, dtype=np.uint32)

FILTERS = {
    "greedy": SamplingFilters(temperature=0.0),
    "greedy with penalties": SamplingFilters(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3),
    "sampled": SamplingFilters(),
    "top-k, top-p and min-p": SamplingFilters(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01),
    "penalties and bias": SamplingFilters(presence_penalty=0.7, repetition_penalty=1.2, logit_bias={9: 1.5}),
    "no end before 20 tokens": SamplingFilters(min_new_tokens=20, end_token_ids=(2, 11)),
}


class _Step(NamedTuple):
    """The token of one step and its probability."""

    token_id: int
    probability: float
    logprobs: tuple[float, ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(build_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed=3))


@pytest.fixture
async def verifier(model):
    request = LoadRequest(model, device="cpu", dtype="float32", num_kv_blocks=40, num_threads=1)
    engine = Verifier(load_worker(request), ReplicaOptions(max_step_tokens=40))
    yield engine
    engine.check_integrity()
    await engine.close()


def _request(
    tokens: list[int], filters: SamplingFilters, rule: DrawRule, *, session_id: str, round_id: int, until: int = 0
) -> VerifyRequest:
    position = make_round(
        tokens, session_id=session_id, round_id=round_id, filters=filters, seed=11, output_start=len(PROMPT),
        draw_rule=rule,
    )  # fmt: skip
    run = RunLimit(until, frozenset()) if until else None
    return VerifyRequest(position, NO_IDS, (), num_logprobs=2, run=run)


def _step(verification: Verification) -> _Step:
    rows = verification.rows
    (logits,) = verification.logit_rows
    return _Step(
        verification.decided_token_id,
        rows[0].tail_probability if rows else float(verification.choice_probabilities[0]),
        (logits.tail_logit, logits.logsumexp, *logits.top_logits.tolist()),
    )


async def _single_steps(verifier: Verifier, filters: SamplingFilters, rule: DrawRule) -> list[_Step]:
    tokens, steps = list(PROMPT), []
    for round_id in range(NUM_TOKENS):
        request = _request(tokens, filters, rule, session_id="single", round_id=round_id)
        steps.append(_step(await verifier.verify(request)))
        tokens.append(steps[-1].token_id)
    return steps


async def _runs(verifier: Verifier, filters: SamplingFilters, rule: DrawRule, length: int) -> list[_Step]:
    """Return the steps of runs of `length` tokens each, one after the other."""
    tokens, steps = list(PROMPT), []
    while len(steps) < NUM_TOKENS:
        until = min(len(tokens) + length, len(PROMPT) + NUM_TOKENS)
        request = _request(tokens, filters, rule, session_id=f"{length}", round_id=len(steps), until=until)
        answers: list[Verification] = []
        answers.append(await verifier.verify(request, answers.append))
        steps += [_step(answer) for answer in answers]
        tokens += [step.token_id for step in steps[len(tokens) - len(PROMPT) :]]
    return steps


@pytest.mark.parametrize("rule", list(DrawRule), ids=["distribution", "coupled"])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
async def test_runs_of_any_length_answer_what_single_steps_answer(verifier, filters, rule):
    expected = await _single_steps(verifier, filters, rule)
    for length in (1, 2, 8, 32):
        assert await _runs(verifier, filters, rule, length) == expected


async def test_a_run_whose_key_stays_behind_answers_other_tokens(verifier, monkeypatch):
    expected = await _single_steps(verifier, FILTERS["sampled"], DrawRule.DISTRIBUTION)
    monkeypatch.setattr(Job, "round_start", property(lambda job: job.call.position.committed_len))
    assert await _runs(verifier, FILTERS["sampled"], DrawRule.DISTRIBUTION, 8) != expected


async def test_a_renewed_run_goes_on_and_repeated_or_smaller_renewals_change_nothing(verifier):
    greedy = FILTERS["greedy"]
    expected = await _single_steps(verifier, greedy, DrawRule.COUPLED)
    request = _request(PROMPT, greedy, DrawRule.COUPLED, session_id="renewed", round_id=0, until=len(PROMPT) + 12)
    steps: list[_Step] = []

    def take(answer: Verification) -> None:
        steps.append(_step(answer))
        for until in (len(PROMPT) + 20, len(PROMPT) + 20, len(PROMPT) + 5):
            verifier.renew(request.position, until, len(PROMPT) + len(steps))

    steps.append(_step(await verifier.verify(request, take)))
    assert steps == expected[:20]


async def test_a_run_ends_with_an_end_token(verifier):
    greedy = FILTERS["greedy"]
    expected = [step.token_id for step in await _single_steps(verifier, greedy, DrawRule.COUPLED)]
    end = expected[6]
    request = _request(PROMPT, greedy, DrawRule.COUPLED, session_id="ended", round_id=0, until=len(PROMPT) + 30)
    request.run = RunLimit(len(PROMPT) + 30, frozenset({end}))
    tokens: list[int] = []
    last = await verifier.verify(request, lambda answer: tokens.append(answer.decided_token_id))
    assert [*tokens, last.decided_token_id] == expected[: expected.index(end) + 1]


async def test_a_newer_call_ends_a_run_and_its_unseen_tokens_are_drawn_again(verifier):
    sampled = FILTERS["sampled"]
    expected = await _single_steps(verifier, sampled, DrawRule.DISTRIBUTION)
    answers: list[Verification] = []
    has_begun = asyncio.Event()

    def take(answer: Verification) -> None:
        answers.append(answer)
        has_begun.set()

    run = _request(PROMPT, sampled, DrawRule.DISTRIBUTION, session_id="cut", round_id=0, until=len(PROMPT) + 30)
    running = asyncio.create_task(verifier.verify(run, take))
    await has_begun.wait()
    tokens = [*PROMPT, answers[0].decided_token_id]
    following = _request(tokens, sampled, DrawRule.DISTRIBUTION, session_id="cut", round_id=1)
    assert _step(await verifier.verify(following)) == expected[1]
    with pytest.raises(Exception, match="superseded"):
        await running


async def test_a_run_that_is_called_again_answers_from_its_beginning(verifier):
    sampled = FILTERS["sampled"]
    expected = await _single_steps(verifier, sampled, DrawRule.DISTRIBUTION)
    request = _request(PROMPT, sampled, DrawRule.DISTRIBUTION, session_id="again", round_id=0, until=len(PROMPT) + 4)
    for _ in range(2):
        answers: list[Verification] = []
        answers.append(await verifier.verify(request, answers.append))
        assert [_step(answer) for answer in answers] == expected[:4]


async def test_a_run_never_publishes_tokens_that_are_not_committed(verifier):
    greedy = FILTERS["greedy"]
    request = _request(PROMPT, greedy, DrawRule.COUPLED, session_id="ahead", round_id=0, until=len(PROMPT) + 40)
    tokens: list[int] = []
    last = await verifier.verify(request, lambda answer: tokens.append(answer.decided_token_id))
    tokens.append(last.decided_token_id)
    # Another session with the same 48 tokens finds no block of them, since none was said to be committed.
    other = _request([*PROMPT, *tokens], greedy, DrawRule.COUPLED, session_id="other", round_id=0)
    assert (await verifier.verify(other)).num_cached_tokens == 0
    renewed = replace(request, position=make_round(PROMPT, session_id="ahead", round_id=1, filters=greedy))
    assert (await verifier.verify(renewed)).num_cached_tokens == len(PROMPT) - 1


async def test_a_run_stays_within_the_limit_of_its_replica(model):
    load = LoadRequest(model, device="cpu", dtype="float32", num_kv_blocks=40, num_threads=1)
    engine = Verifier(load_worker(load), ReplicaOptions(max_run=4))
    request = _request(PROMPT, FILTERS["greedy"], DrawRule.COUPLED, session_id="s", round_id=0, until=1 << 31)
    steps: list[Verification] = []
    await engine.verify(request, steps.append)
    assert len(steps) == 3
    assert engine.info().max_run == 4
    await engine.close()
