"""Constrained requests through running services: the text of the masked target, whichever drafts and runs there are.

The models are tables, and their tokenizer has bytes (`tests/support/byte_tokenizer.py`). The expected text is computed
token by token without services (`tests/support/masked_target.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from jsonschema import Draft202012Validator

from coordinator.replicas.replica import TARGET
from specdec.contract.constraint import Constraint
from specdec.contract.errors import SpecdecError
from specdec.rpc.status_mapping import from_rpc_error
from specdec.structured import mask_threads
from specdec.structured.known_constraints import KnownConstraints
from specdec.structured.token_table import TokenTable
from specdec.v1 import coordinator_pb2 as pb
from tests.integration.test_audit import counted
from tests.support.byte_tokenizer import EOS, TOKENS, VOCABULARY
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.masked_target import MaskedTarget
from tests.support.output import Output
from tests.support.round_rig import NotedEngine
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]

NUM_TOKENS = 20
MODES = {
    "rejection": pb.SPECULATION_MODE_REJECTION,
    "block": pb.SPECULATION_MODE_BLOCK,
    "coupled": pb.SPECULATION_MODE_COUPLED,
}
LOCAL = {"early-exit": 1}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "b": {"enum": ["ab", "abc"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "choice": Constraint.choice(["abcabcabc", "abcab", '{"a":12}', "[12,12,12,é]"]),
    "regular expression": Constraint.regex("(ab|c|é){2,6}[12]*"),
    "schema": Constraint.json_schema(SCHEMA),
    "any JSON": Constraint.json_object(),
    "grammar": Constraint.grammar('start: "[" (start | /[12]/ | "é")* "]"'),
    "structural tags": Constraint.structural_tag(
        {"structures": [{"begin": "[ab", "schema": {"enum": [1, 12]}, "end": "]"}], "triggers": ["["]}
    ),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties and bias": {
        "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3,
        "logit_bias": {TOKENS.index(b"12"): 1.5, EOS: 0.5},
    },
    "at least 8 tokens": {"min_new_tokens": 8},
    "stop ids": {"stop_token_ids": [TOKENS.index(b"c"), TOKENS.index(b"]")]},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A constrained request that has one text."""

    constraint: Constraint
    seed: int | None
    """Seed of the mode coupled; None: greedy."""
    sampling: dict[str, Any]
    prompt: Sequence[int]

    def asked(self, *, mode: int, **options: Any) -> pb.GenerateRequest:
        drawn = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return request(
            self.prompt, constraint=self.constraint, mode=mode, max_new_tokens=NUM_TOKENS, **drawn, **self.sampling,
            **options,
        )  # fmt: skip

    def expected(self, rig: Rig) -> list[int]:
        temperature = 0.0 if self.seed is None else 1.0
        target = MaskedTarget(
            rig.target.worker, rig.directory, self.constraint, self.prompt, temperature=temperature, **self.sampling
        )
        return target.greedy(NUM_TOKENS) if self.seed is None else target.coupled(NUM_TOKENS, self.seed)


CASES = [
    Case(constraint, seed, sampling, [*PROMPT, number])
    for number, (constraint, sampling) in enumerate(
        (constraint, sampling) for constraint in CONSTRAINTS.values() for sampling in SAMPLINGS.values()
    )
    for seed in (None, number)
]


async def texts_of(coordinator: Coordinator, asked: Sequence[pb.GenerateRequest]) -> list[Output]:
    return list(await asyncio.gather(*(coordinator.generate(each) for each in asked)))


def check_texts(cases: Sequence[Case], outputs: Sequence[Output], rig: Rig) -> None:
    for case, output in zip(cases, outputs, strict=True):
        assert output.token_ids == case.expected(rig), case


async def error_of(coordinator: Coordinator, asked: pb.GenerateRequest) -> SpecdecError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await coordinator.generate(asked)
    return from_rpc_error(caught.value)


# ---- one text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_run", [1, 3, 32])
async def test_a_constrained_text_is_the_masked_targets_in_runs_of_any_length(max_run: int) -> None:
    async with Rig(constrained=True, drafts=0, max_run=max_run) as rig:
        coordinator = await rig.coordinator()
        cases = CASES[max_run % 3 :: 3]
        asked = [
            case.asked(mode=pb.SPECULATION_MODE_OFF if number % 4 < 2 else MODES["coupled"], gamma=0)
            for number, case in enumerate(cases)
        ]
        check_texts(cases, await texts_of(coordinator, asked), rig)


async def test_the_text_of_a_seed_does_not_depend_on_where_its_runs_end() -> None:
    """Forced tokens are drafts: found at other places, they would change the text in the modes rejection and block."""
    asked = [
        request(constraint=CONSTRAINTS[name], mode=MODES[mode], gamma=0, temperature=1.0, top_p=0.9, seed=seed)
        for name in ("regular expression", "schema")
        for mode in ("rejection", "block")
        for seed in range(2, 6)
    ]
    texts: list[list[list[int]]] = []
    for max_run in (1, 2, 64):
        async with Rig(constrained=True, drafts=0, max_run=max_run) as rig:
            outputs = await texts_of(await rig.coordinator(), asked)
            texts.append([output.token_ids for output in outputs])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(("pool", "first"), [("default", 0), ("ngram", 1), ("early-exit", 1)])
async def test_a_constrained_text_is_the_masked_targets_with_drafts_of_any_kind_and_length(
    pool: str, first: int
) -> None:
    """A draft model of another salt, tokens found in the text, and the target's own drafts, with 1 to 8 tokens."""
    async with Rig(constrained=True, local_drafts=LOCAL) as rig:
        coordinator = await rig.coordinator(lookup=("ngram",))
        cases, asked = [case for number, case in enumerate(CASES) if number // 2 % 2 == first], []
        for number, case in enumerate(cases):
            mode = MODES["coupled"] if case.seed is not None else list(MODES.values())[number % 3]
            asked.append(case.asked(mode=mode, gamma=1 + number // 2 % 8, draft_pool=pool))
        outputs = await texts_of(coordinator, asked)
        check_texts(cases, outputs, rig)
        assert sum(output.finished.stats.num_draft_tokens for output in outputs) > 50


async def test_a_draft_goes_on_behind_forced_tokens_in_the_same_round() -> None:
    async with Rig(constrained=True) as rig:
        coordinator = await rig.coordinator()
        for mode in MODES.values():
            asked = request(constraint=CONSTRAINTS["schema"], temperature=0.0, mode=mode, gamma=3, provenance=True)
            output = await coordinator.generate(asked)
            pools = [detail.draft_pool for detail in output.details]
            # A bonus token, which no pool drafted, would stand between two rounds.
            assert ("grammar", "default") in itertools.pairwise(pools)
            assert output.finished.stats.num_draft_tokens > pools.count("grammar") > 0


async def test_every_constrained_text_is_valid_unless_its_limit_cut_it() -> None:
    async with Rig(constrained=True) as rig:
        coordinator = await rig.coordinator()
        asked = [
            request(constraint=CONSTRAINTS["schema"], temperature=1.5, seed=seed, mode=mode, max_new_tokens=120)
            for seed, mode in enumerate([*MODES.values()] * 4)
        ]
        outputs = await texts_of(coordinator, asked)
        ended = [output for output in outputs if output.finished.reason == pb.FINISH_REASON_STOP]
        assert len(ended) >= len(outputs) - 2
        for output in ended:
            assert Draft202012Validator(SCHEMA).is_valid(json.loads(output.text)), output.text


async def test_ignore_eos_does_not_hold_a_constrained_output_open() -> None:
    async with Rig(constrained=True) as rig:
        coordinator = await rig.coordinator()
        output = await coordinator.generate(request(constraint=Constraint.choice(["ab"]), ignore_eos=True))
        assert (output.text, output.finished.reason) == ("ab", pb.FINISH_REASON_STOP)


async def test_logprobs_of_a_constrained_request_are_the_models_before_the_mask() -> None:
    async with Rig(constrained=True) as rig:
        coordinator = await rig.coordinator()
        for mode in MODES.values():
            asked = request(constraint=CONSTRAINTS["schema"], temperature=1.0, seed=3, mode=mode, logprobs=2)
            output = await coordinator.generate(asked)
            tokens, has_illegal_top = list(PROMPT), False
            for token_id, detail in zip(output.token_ids, output.details, strict=True):
                logits = rig.target.worker.logits_after(tokens).astype(np.float64)
                logprobs = logits - np.log(np.exp(logits).sum())
                assert detail.logprob == pytest.approx(logprobs[token_id], abs=1e-4)
                best = np.argsort(-logprobs)[:2].tolist()
                assert [top.token_id for top in detail.top_logprobs] == best
                has_illegal_top |= detail.logprob < logprobs[best[1]]
                tokens.append(token_id)
            assert has_illegal_top


async def test_audits_of_constrained_requests_report_no_mismatch() -> None:
    samplings: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}]
    async with Rig(constrained=True) as rig:
        coordinator = await rig.coordinator(audit_share=1.0)
        for number, constraint in enumerate(CONSTRAINTS.values()):
            for mode in (*MODES.values(), pb.SPECULATION_MODE_OFF):
                sampling = samplings[(number + mode) % 2]
                await coordinator.generate(request(constraint=constraint, mode=mode, max_new_tokens=12, **sampling))
        await coordinator.audits_settled()
        assert counted(coordinator, "equal") > 40
        assert counted(coordinator, "mismatch") == counted(coordinator, "tie") == 0


# ---- bad constraints -----------------------------------------------------------------------------------------------

#: Requests that fail, with the reason: some are refused, and some end within their output.
BAD = {
    "no schema": (Constraint.json_schema("[]"), "CONSTRAINT_INVALID"),
    "a keyword that is not enforced": (Constraint.json_schema({"uniqueItems": True}), "CONSTRAINT_INVALID"),
    "recursion without end": (Constraint.json_schema({"$ref": "#"}), "CONSTRAINT_INVALID"),
    "an unclosed group": (Constraint.regex("(a"), "CONSTRAINT_INVALID"),
    "an unknown rule": (Constraint.grammar("start: foo"), "CONSTRAINT_INVALID"),
    "a rule that calls itself for ever": (Constraint.grammar('start: "a" start'), "CONSTRAINT_INVALID"),
    "a text that the tokens cannot spell": (Constraint.choice(["abx"]), "NO_LEGAL_TOKEN"),
}


async def test_a_bad_constraint_fails_its_own_session_alone() -> None:
    async with Rig(constrained=True) as rig:
        coordinator = await rig.coordinator()
        good = CASES[::3]
        tasks = [asyncio.create_task(texts_of(coordinator, [case.asked(mode=MODES["coupled"]) for case in good]))]
        bad = [
            asyncio.create_task(error_of(coordinator, request(constraint=constraint, session_id=f"bad-{number}")))
            for number, (constraint, _) in enumerate(BAD.values())
        ]
        for (name, (constraint, reason)), task in zip(BAD.items(), bad, strict=True):
            error = await task
            assert (error.code, error.reason) == ("INVALID_ARGUMENT", reason), name
            assert error.field == f"constraint.{constraint.kind.name.lower()}"
        check_texts(good, await tasks[0], rig)
        assert not coordinator.generations.num_running
        rig.target.engine.check_integrity()
        again = await coordinator.generate(CASES[0].asked(mode=MODES["rejection"]))
        assert again.token_ids == CASES[0].expected(rig)


class HeldConstraints(KnownConstraints):
    """Constraints of which the first to be compiled beside a step waits for a gate."""

    def __init__(self, model: str) -> None:
        super().__init__(model, (EOS,), VOCABULARY)
        self.entered = threading.Event()
        self.gate = threading.Event()

    @property
    def table(self) -> TokenTable:  # type: ignore[override]
        if threading.current_thread().name.startswith("specdec-masks") and not self.entered.is_set():
            self.entered.set()
            self.gate.wait()
        return super().table


@asynccontextmanager
async def held_constraints(rig: Rig) -> AsyncIterator[HeldConstraints]:
    """Put a target in the place of the rig's own, whose first masks are late."""
    await rig.target.kill()
    rig.services.remove(rig.target)
    held = HeldConstraints(str(rig.directory))
    rig.services.append(await rig.start(TARGET, constraints=held))
    try:
        yield held
    finally:
        held.gate.set()


async def test_late_masks_delay_their_own_session_alone() -> None:
    async with Rig(constrained=True) as rig, held_constraints(rig) as held:
        coordinator = await rig.coordinator()
        slow = asyncio.create_task(coordinator.generate(CASES[0].asked(mode=MODES["rejection"])))
        await asyncio.to_thread(held.entered.wait)
        others = CASES[1:16]
        check_texts(others, await texts_of(coordinator, [case.asked(mode=MODES["coupled"]) for case in others]), rig)
        plain = await coordinator.generate(request())
        assert plain.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        assert not slow.done()
        held.gate.set()
        assert (await slow).token_ids == CASES[0].expected(rig)


async def test_masks_that_do_not_come_end_their_request_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "MAX_MASK_S", 0.05)
    async with Rig(constrained=True) as rig, held_constraints(rig):
        coordinator = await rig.coordinator()
        error = await error_of(coordinator, request(constraint=CONSTRAINTS["schema"]))
        assert (error.reason, error.field) == ("CONSTRAINT_INVALID", "constraint.json_schema")
        assert "takes more than" in error.message
        rig.target.engine.check_integrity()


async def test_a_grammar_whose_masks_take_too_much_processor_time_ends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask takes more than this limit."""
    monkeypatch.setattr(mask_threads, "MAX_MASK_CPU_S", 0.0)
    async with Rig(constrained=True) as rig:
        coordinator = await rig.coordinator()
        slow, plain = await asyncio.gather(
            error_of(coordinator, request(constraint=CONSTRAINTS["grammar"])), coordinator.generate(request())
        )
        assert (slow.reason, slow.field) == ("CONSTRAINT_INVALID", "constraint.grammar")
        assert re.search(r"takes more than 0 s for the legal tokens of a step", slow.message)
        assert plain.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)


# ---- targets of older versions -------------------------------------------------------------------------------------


async def test_a_constraint_is_refused_by_name_if_no_target_follows_it() -> None:
    async with Rig(constrained=True, targets=0) as rig:
        rig.services.append(await rig.start(TARGET, constraints=None))
        coordinator = await rig.coordinator()
        error = await error_of(coordinator, request(constraint=CONSTRAINTS["choice"]))
        assert (error.code, error.reason, error.field) == ("UNIMPLEMENTED", "UNSUPPORTED", "constraint")
        assert "cannot be followed by the connected targets" in error.message
        assert (await coordinator.generate(request())).token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)


async def test_a_target_that_would_ignore_a_constraint_gets_no_constrained_request() -> None:
    noted: list[NotedEngine] = []

    def between(engine: Any) -> NotedEngine:
        noted.append(NotedEngine(engine))
        return noted[-1]

    async with Rig(constrained=True) as rig:
        rig.services.append(await rig.start(TARGET, constraints=None, between=between))
        coordinator = await rig.coordinator()
        outputs = await texts_of(coordinator, [case.asked(mode=MODES["coupled"]) for case in CASES[:12]])
        check_texts(CASES[:12], outputs, rig)
        assert not noted[0].asked
        await texts_of(coordinator, [request() for _ in range(8)])
        assert noted[0].asked  # it serves the others
