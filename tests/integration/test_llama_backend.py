"""Targets by the backend `llama-cpp`: sessions in the sequences of a context give the text of our own engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.replicas.replica import DRAFT, TARGET
from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest, InvalidSetting, ResourceExhausted, Unsupported
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from specdec.observability.engine_metrics import EngineMetrics
from specdec.structured import mask_threads
from specdec.structured.known_constraints import KnownConstraints
from specdec.structured.mask_threads import MasksInWork, MaskThreads
from specdec.structured.matcher import LegalTokens
from specdec.structured.paced_threads import Pace
from specdec.v1 import coordinator_pb2 as pb
from target_service.backends import llama_cpp
from target_service.backends.contract import BackendShape, RowsRequest
from target_service.backends.engine import BackendTarget
from target_service.backends.llama_context import BatchPart, LlamaOptions
from target_service.backends.llama_cpp import LlamaBackend, open_llama
from tests.integration.test_constrained_requests import (
    CASES,
    CONSTRAINTS,
    SAMPLINGS,
    check_texts,
    error_of,
    texts_of,
)
from tests.support.backend_rig import CONTEXT_TOKENS, table_model
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.gguf_models import write
from tests.support.round_driver import make_round
from tests.support.round_rig import NotedEngine
from tests.support.table_services import EOS, VOCABULARY, serve_engine, start_service
from tests.support.table_worker import TableWorker
from tests.support.tool_models import DEMO


class TableContext:
    """Implements the methods of `LlamaContext`, which needs a compiled llama.cpp, over a table model.

    It refuses what llama.cpp refuses: a gap in a sequence, a batch that is too long, and tokens beyond its memory.
    """

    version = "table"

    def __init__(self, worker: TableWorker, options: LlamaOptions) -> None:
        self.options = options
        self.num_logits = worker.shape.vocabulary_size
        self.max_context_tokens = worker.shape.max_context_tokens
        self.batch_sizes: list[int] = []
        """Number of parts of each batch."""
        self.impossible: tuple[int, ...] = ()
        """Tokens whose logits are -inf."""
        self.fail_on: int | None = None
        """A batch with a prompt of three tokens that ends with this token fails like a broken library."""
        self._worker = worker
        self._tokens: list[list[int]] = [[] for _ in range(options.num_sequences)]

    def decode(self, parts: Sequence[BatchPart]) -> list[NDArray[np.float32]]:
        assert sum(len(part.token_ids) for part in parts) <= self.options.batch_tokens
        longer = {part.sequence: [*self._tokens[part.sequence], *part.token_ids] for part in parts}
        if any(len(tokens) >= 3 and tokens[2] == self.fail_on for tokens in longer.values()):
            raise OSError("NULL pointer access")
        for part in parts:
            assert part.start == len(self._tokens[part.sequence]), "a gap in a sequence"
        held = [longer.get(sequence, tokens) for sequence, tokens in enumerate(self._tokens)]
        # Tokens that sequences share have one cell.
        if len({tuple(tokens[: end + 1]) for tokens in held for end in range(len(tokens))}) > self.options.num_tokens:
            raise ResourceExhausted("the KV memory of llama.cpp is full", reason="KV_EXHAUSTED")
        self._tokens = held
        self.batch_sizes.append(len(parts))
        return [self._rows(held[part.sequence], part.num_rows) for part in parts]

    def truncate(self, sequence: int, length: int) -> bool:
        del self._tokens[sequence][length:]
        return True

    def copy(self, source: int, destination: int, length: int) -> None:
        self._tokens[destination] = self._tokens[source][:length]

    def close(self) -> None:
        self._tokens.clear()

    def _rows(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        rows = [self._worker.logits_after(tokens[: len(tokens) - back]) for back in range(num_rows - 1, -1, -1)]
        logits = np.array(rows, dtype=np.float32).reshape(num_rows, self.num_logits)
        logits[:, list(self.impossible)] = -np.inf
        return logits


OPTIONS = LlamaOptions(num_tokens=1024, num_sequences=16, batch_tokens=32, num_threads=1)
SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {3: 2.0}},
    {"temperature": 0.9, "min_new_tokens": 12, "ignore_eos": False},
]
SHAPE = BackendShape("llama-cpp", "table", VOCABULARY, "table", "model", CONTEXT_TOKENS, (EOS,), ())
MODES = (pb.SPECULATION_MODE_REJECTION, pb.SPECULATION_MODE_BLOCK, pb.SPECULATION_MODE_COUPLED)


@asynccontextmanager
async def llama_system(options: LlamaOptions = OPTIONS) -> AsyncIterator[tuple[Coordinator, TableContext]]:
    """Run a coordinator with one draft and a target by this backend."""
    async with llama_rig(options) as (rig, context):
        yield await rig.coordinator(), context


@asynccontextmanager
async def llama_rig(
    options: LlamaOptions = OPTIONS,
    *,
    constrained: bool = False,
    max_run: int = 0,
    between: Callable[[Any], Any] = lambda engine: engine,
) -> AsyncIterator[tuple[Rig, TableContext]]:
    """Run one draft and a target by this backend, which may follow constraints."""
    context = TableContext(table_model(), options)
    metrics = EngineMetrics("table", role=TARGET)
    async with Rig(targets=0, drafts=0, constrained=constrained) as rig:
        known = KnownConstraints(str(rig.directory), (EOS,), VOCABULARY) if constrained else None
        backend = LlamaBackend(context, SHAPE)
        engine = BackendTarget(backend, max_gamma=8, max_run=max_run, observer=metrics, constraints=known)
        target = await serve_engine(TARGET, engine, metrics, table_model(), between=between)
        rig.services += [target, await start_service(DRAFT, salt=1)]
        yield rig, context


async def own_token_ids(asked: list[pb.GenerateRequest], **options: Any) -> list[list[int]]:
    async with Rig(**options) as rig:
        coordinator = await rig.coordinator()
        return [(await coordinator.generate(each)).token_ids for each in asked]


@pytest.mark.parametrize("mode", MODES)
async def test_text_is_that_of_our_own_engine_for_every_sampler(mode: int) -> None:
    asked = [request(mode=mode, gamma=3, seed=9, **sampler) for sampler in SAMPLERS]
    async with llama_system() as (coordinator, _):
        outputs = [(await coordinator.generate(each)).token_ids for each in asked]
    assert outputs == await own_token_ids(asked)


async def test_a_text_of_runs_is_that_of_our_own_engine_constrained_or_not() -> None:
    """Runs end at their limits, and go on with a renewal; a run has a call, and a step has none."""
    noted: list[NotedEngine] = []

    def between(engine: Any) -> NotedEngine:
        noted.append(NotedEngine(engine))
        return noted[-1]

    # Tokens that are forced would be drafts, of which the modes rejection and block have other texts.
    free = Constraint.regex("[abc12 ]*")
    asked = [
        request([5, 6, number], mode=mode, constraint=constraint, gamma=0, seed=number, **SAMPLERS[number % 8])
        for number, (mode, constraint) in enumerate(
            [*itertools.product(MODES[:2], (None, free)),
             *itertools.product((MODES[2], pb.SPECULATION_MODE_OFF), CONSTRAINTS.values())]
        )
    ]  # fmt: skip
    async with llama_rig(constrained=True, max_run=5, between=between) as (rig, _):
        coordinator = await rig.coordinator()
        outputs = await asyncio.gather(*(coordinator.generate(each) for each in asked))
    assert len(noted[0].asked) < sum(len(output.token_ids) for output in outputs)
    assert [output.token_ids for output in outputs] == await own_token_ids(asked, constrained=True)


async def test_a_constrained_text_of_every_mode_and_sampler_is_that_of_our_own_engine() -> None:
    """With forced tokens, drafts that are often illegal, and no draft. Our own engine's is the masked target's."""
    asked = [
        request(
            constraint=constraint, mode=(*MODES, pb.SPECULATION_MODE_OFF)[(number + place) % 4], gamma=1 + number % 3,
            seed=number, **sampler,
        )
        for place, sampler in enumerate(SAMPLERS)
        for number, constraint in list(enumerate(CONSTRAINTS.values()))[place % 2 :: 2]
    ]  # fmt: skip
    async with llama_rig(constrained=True) as (rig, _):
        coordinator = await rig.coordinator()
        outputs = await asyncio.gather(*(coordinator.generate(each) for each in asked))
        rejected = sum(
            output.finished.stats.num_draft_tokens - output.finished.stats.num_accepted_tokens for output in outputs
        )
        assert rejected > 25
    assert [output.token_ids for output in outputs] == await own_token_ids(asked, constrained=True)


async def test_logprobs_of_a_constrained_request_are_the_models_before_the_mask() -> None:
    asked = request(constraint=CONSTRAINTS["schema"], temperature=1.0, seed=3, logprobs=2)
    async with llama_rig(constrained=True) as (rig, _):
        output = await (await rig.coordinator()).generate(asked)
        tokens, has_illegal_top = list(PROMPT), False
        for token_id, detail in zip(output.token_ids, output.details, strict=True):
            logits = rig.target.worker.logits_after(tokens).astype(np.float64)
            logprobs = logits - np.log(np.exp(logits).sum())
            assert detail.logprob == pytest.approx(logprobs[token_id], abs=1e-4)
            has_illegal_top |= detail.logprob < np.sort(logprobs)[-2]
            tokens.append(token_id)
        assert has_illegal_top


async def test_a_constraint_that_allows_no_possible_token_fails_its_own_question_alone() -> None:
    """The others of its batch are answered, and keep what they hold."""
    context = TableContext(table_model(), OPTIONS)
    context.impossible = (3, 4)
    backend = LlamaBackend(context, SHAPE)
    mask = np.packbits(np.isin(np.arange(VOCABULARY), (3, 4)), bitorder="little")
    questions = [
        RowsRequest(make_round([5, 6, number], session_id=f"s{number}"), np.array([5, 6, number], np.uint32), 1)
        for number in range(3)
    ]
    computed: Future[LegalTokens] = Future()
    computed.set_result(LegalTokens([mask], []))
    hopeless = replace(questions[1], masks=MasksInWork(Constraint.regex("b"), computed, Pace()))
    for _ in range(2):
        answers = await asyncio.gather(
            *(backend.ask(each) for each in (questions[0], hopeless, questions[2])), return_exceptions=True
        )
        assert isinstance(answers[1], InvalidRequest)
        assert (answers[1].reason, answers[1].field) == ("NO_LEGAL_TOKEN", "constraint.regex")
    assert [answer.num_cached_tokens for answer in (answers[0], answers[2])] == [2, 2]
    await backend.close()


async def test_masks_that_are_late_change_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread waits for no mask, so that most are applied after it has gone on."""
    monkeypatch.setattr(llama_cpp, "_MASK_PATIENCE_S", 0.0)
    compute = MaskThreads._compute

    def compute_late(*arguments: Any) -> LegalTokens:
        time.sleep(0.005)
        return compute(*arguments)

    monkeypatch.setattr(MaskThreads, "_compute", compute_late)
    cases = CASES[:: len(SAMPLINGS)]
    async with llama_rig(constrained=True) as (rig, _):
        coordinator = await rig.coordinator()
        check_texts(cases, await texts_of(coordinator, [case.asked(mode=MODES[2], gamma=3) for case in cases]), rig)


async def test_a_constraint_whose_masks_take_too_much_time_ends_by_name_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask_threads, "MAX_MASK_CPU_S", 0.0)
    async with llama_rig(constrained=True) as (rig, _):
        coordinator = await rig.coordinator()
        slow, plain = await asyncio.gather(
            error_of(coordinator, request(constraint=CONSTRAINTS["grammar"])), coordinator.generate(request())
        )
        assert (slow.reason, slow.field) == ("CONSTRAINT_INVALID", "constraint.grammar")
        assert plain.token_ids == table_model().greedy_continuation(PROMPT, 24)


async def test_sessions_that_wait_run_in_one_batch_and_keep_their_texts() -> None:
    asked = [request([5, 6, first], temperature=0.8, seed=first) for first in range(2, 14)]
    async with llama_system() as (coordinator, context):
        outputs = await asyncio.gather(*(coordinator.generate(each) for each in asked))
        assert max(context.batch_sizes) > 1
    assert [output.token_ids for output in outputs] == await own_token_ids(asked)


async def test_a_full_memory_drops_sequences_that_wait_for_nothing() -> None:
    """Twelve sessions of 80 tokens do not fit into 400 tokens, so later turns find their tokens dropped."""
    options = LlamaOptions(num_tokens=400, num_sequences=16, batch_tokens=32, num_threads=1)
    prompts = [[first, *range(2, 22), *range(2, 22)] for first in range(2, 14)]
    asked = [request(prompt, session_id=f"s{prompt[0]}", max_new_tokens=40) for prompt in prompts]
    async with llama_system(options) as (coordinator, _):
        outputs = [(await coordinator.generate(each)).token_ids for each in asked]
    assert outputs == [table_model().greedy_continuation(prompt, 40) for prompt in prompts]


async def test_more_sessions_than_sequences_take_turns() -> None:
    options = LlamaOptions(num_tokens=1024, num_sequences=2, batch_tokens=32, num_threads=1)
    asked = [request([5, 6, first]) for first in range(2, 10)]
    async with llama_system(options) as (coordinator, _):
        outputs = await asyncio.gather(*(coordinator.generate(each) for each in asked))
    assert [output.token_ids for output in outputs] == [
        table_model().greedy_continuation([5, 6, first], 24) for first in range(2, 10)
    ]


async def test_a_question_that_fails_fails_alone_and_the_others_of_its_batch_are_answered() -> None:
    async with llama_system() as (coordinator, context):
        context.fail_on = 9
        asked = [request([5, 6, first], session_id=f"s{first}") for first in (2, 3, 9, 4)]
        outcomes = await asyncio.gather(*(coordinator.generate(each) for each in asked), return_exceptions=True)
        assert isinstance(outcomes[2], grpc.aio.AioRpcError)
        context.fail_on = None
        for each, outcome in zip(asked, outcomes, strict=True):
            prompt = list(each.prompt_token_ids.ids)
            if prompt[-1] != 9:
                assert not isinstance(outcome, BaseException)
                # Texts that reach the token are cut off with it.
                assert outcome.token_ids == table_model().greedy_continuation(prompt, 24)
        again = await coordinator.generate(request([5, 6, 9]))
        assert again.token_ids == table_model().greedy_continuation([5, 6, 9], 24)


def test_a_model_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="model: --backend llama-cpp takes a GGUF file"):
        open_llama(model=str(tmp_path), max_context_tokens=None, num_threads=1)


@pytest.mark.parametrize("key", ["ssm.conv_kernel", "shortconv.l_cache", "wkv.head_size"])
def test_a_hybrid_is_refused_because_llama_cpp_cannot_take_back_its_states(key: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "hybrid", {key: 4}, {}, tokenizer=DEMO / "target")
    with pytest.raises(Unsupported, match=r"m\.gguf has recurrent layers, which --backend llama-cpp does not serve"):
        open_llama(model=str(path), max_context_tokens=None, num_threads=1)
    with pytest.raises(Unsupported, match=r"unsupported type: hybrid; .* Serve its checkpoint in safetensors files"):
        load_worker(LoadRequest(str(path), device="cpu", dtype="float32"))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    from target_service.backends.llama_context import LlamaContext

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(Unsupported, match=r'pip install "specdec-serving\[llama-cpp\]"'):
        LlamaContext(tmp_path / "model.gguf", OPTIONS)
