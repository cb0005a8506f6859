"""Runs under a constraint: forced tokens share a pass with the token before them, and nothing that is drawn changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from specdec.contract.constraint import Constraint
from specdec.contract.types import DrawRule, RunLimit, SamplingFilters, Verification, VerifyRequest
from specdec.core.random import DrawKey
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.structured.known_constraints import KnownConstraints
from target_service import program
from target_service.verifier import Verifier
from tests.support.byte_tokenizer import EOS, TOKENS, VOCABULARY, bytes_of, write_byte_tokenizer
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

PROMPT = [5, 17, 3, 9]
#: Two choices, before each of which a long text is forced.
CONSTRAINT = Constraint.regex(r'\{"abcabcabc":(1|2|a),"cabcabc":(b|c|12)\}')
FILTERS = {
    "greedy": SamplingFilters(temperature=0.0),
    "sampled": SamplingFilters(),
    "penalties": SamplingFilters(repetition_penalty=1.4, presence_penalty=0.5),
}


class _Step(NamedTuple):
    """A token with what is shown of it."""

    token_id: int
    probability: float
    logprobs: tuple[float, ...]
    position: int


class _Target:
    """A target that follows constraints, and counts its passes."""

    def __init__(self, directory: Path) -> None:
        write_byte_tokenizer(directory)
        self._known = KnownConstraints(str(directory), (EOS,), VOCABULARY)
        self._worker = TableWorker(vocabulary_size=VOCABULARY, num_blocks=64, context=512, salt=0, eos_token_ids=(EOS,))
        self._session_ids = count()
        self.engine = Verifier(self._worker, ReplicaOptions(max_run=64), constraints=self._known)

    async def steps(
        self,
        filters: SamplingFilters,
        rule: DrawRule,
        *,
        length: int,
        seed: int = 3,
        ends: frozenset[int] = frozenset(),
    ) -> list[_Step]:
        """Return the steps of runs of `length` tokens each, up to the end of the output; 0: single calls."""
        identity = self._known.table.identity_of(CONSTRAINT)
        filters = replace(filters, constraint_id=identity, end_token_ids=(EOS, *ends))
        tokens, steps, session_id = list(PROMPT), list[_Step](), str(next(self._session_ids))
        while not steps or steps[-1].token_id not in {EOS, *ends}:
            position = make_round(
                tokens, session_id=session_id, round_id=len(steps), filters=filters, seed=seed,
                output_start=len(PROMPT), draw_rule=rule,
            )  # fmt: skip
            position = replace(position, constraint=CONSTRAINT)
            run = RunLimit(len(tokens) + length, frozenset({EOS, *ends})) if length else None
            request = VerifyRequest(position, np.empty(0, dtype=np.uint32), (), num_logprobs=2, run=run)
            answers: list[Verification] = []
            answers.append(await self.engine.verify(request, answers.append))
            steps += map(_step, answers)
            tokens += [answer.decided_token_id for answer in answers]
        return steps

    @property
    def num_passes(self) -> int:
        return self.engine.info().num_steps


def _step(answer: Verification) -> _Step:
    (logits,) = answer.logit_rows
    probability = answer.rows[0].tail_probability if answer.rows else float(answer.choice_probabilities[0])
    raw = (logits.tail_logit, logits.logsumexp, *logits.top_logits.tolist())
    return _Step(answer.decided_token_id, probability, raw, answer.kv_len)


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[_Target]:
    opened = _Target(tmp_path)
    yield opened
    opened.engine.check_integrity()
    await opened.engine.close()


@pytest.mark.parametrize("rule", list(DrawRule), ids=["distribution", "coupled"])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
async def test_runs_under_a_constraint_answer_what_single_calls_answer(
    target: _Target, filters: SamplingFilters, rule: DrawRule
) -> None:
    expected = await target.steps(filters, rule, length=0)
    assert [step.position for step in expected] == list(range(len(PROMPT), len(PROMPT) + len(expected)))
    for length in (1, 2, 5, 60):
        assert await target.steps(filters, rule, length=length) == expected


def _uniforms_of_one_round(rows: Any) -> list[float]:
    position = rows.request.position
    return DrawKey(position.seed, position.turn, rows.job.round_start).tail_uniforms(rows.num_draft_tokens)


async def test_a_run_whose_rows_share_one_key_answers_other_tokens(
    target: _Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [await target.steps(FILTERS["sampled"], DrawRule.DISTRIBUTION, length=0, seed=seed) for seed in range(9)]
    monkeypatch.setattr(program._Rows, "tail_uniforms", property(_uniforms_of_one_round))
    shared = [await target.steps(FILTERS["sampled"], DrawRule.DISTRIBUTION, length=60, seed=seed) for seed in range(9)]
    assert [[step.token_id for step in each] for each in shared] != [
        [step.token_id for step in each] for each in expected
    ]


async def test_forced_tokens_of_a_run_take_no_passes_of_their_own(target: _Target) -> None:
    before = target.num_passes
    steps = await target.steps(FILTERS["greedy"], DrawRule.COUPLED, length=60)
    assert bytes_of(step.token_id for step in steps[:-1]).startswith(b'{"abcabcabc":')
    # A pass for the first token of each forced text, one for the others, and one for what is chosen after it.
    assert target.num_passes - before <= len(steps) - 6


async def test_a_run_ends_with_an_end_token_that_is_forced(target: _Target) -> None:
    brace = frozenset({TOKENS.index(b"}")})
    expected = await target.steps(FILTERS["greedy"], DrawRule.COUPLED, length=0)
    assert await target.steps(FILTERS["greedy"], DrawRule.COUPLED, length=60) == expected
    with pytest.raises(Exception, match="allow no next token"):  # a stop id is legal only where the text may end
        await target.steps(FILTERS["greedy"], DrawRule.COUPLED, length=60, ends=brace)
