"""Targets by the backend `llama-cpp`: sessions in the sequences of a context give the text of our own engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.replicas.replica import DRAFT, TARGET
from specdec.contract.errors import InvalidSetting, ResourceExhausted, Unsupported
from specdec.observability.engine_metrics import EngineMetrics
from specdec.v1 import coordinator_pb2 as pb
from target_service.backends.contract import BackendShape
from target_service.backends.engine import BackendTarget
from target_service.backends.llama_context import BatchPart, LlamaOptions
from target_service.backends.llama_cpp import LlamaBackend, open_llama
from tests.support.backend_rig import CONTEXT_TOKENS, table_model
from tests.support.coordinator_rig import Coordinator, Rig, request
from tests.support.table_services import EOS, VOCABULARY, serve_engine, start_service
from tests.support.table_worker import TableWorker


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
        return np.array(rows, dtype=np.float32).reshape(num_rows, self.num_logits)


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
MODES = (pb.SPECULATION_MODE_REJECTION, pb.SPECULATION_MODE_BLOCK, pb.SPECULATION_MODE_COUPLED)


@asynccontextmanager
async def llama_system(options: LlamaOptions = OPTIONS) -> AsyncIterator[tuple[Coordinator, TableContext]]:
    """Run a coordinator with one draft and a target by this backend."""
    context = TableContext(table_model(), options)
    shape = BackendShape("llama-cpp", "table", VOCABULARY, "table", "model", CONTEXT_TOKENS, (EOS,), ())
    metrics = EngineMetrics("table", role=TARGET)
    async with Rig(targets=0, drafts=0) as rig:
        target = await serve_engine(TARGET, BackendTarget(LlamaBackend(context, shape), max_gamma=8), metrics)
        rig.services += [target, await start_service(DRAFT, salt=1)]
        yield await rig.coordinator(), context


async def own_token_ids(asked: list[pb.GenerateRequest]) -> list[list[int]]:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        return [(await coordinator.generate(each)).token_ids for each in asked]


@pytest.mark.parametrize("mode", MODES)
async def test_text_is_that_of_our_own_engine_for_every_sampler(mode: int) -> None:
    asked = [request(mode=mode, gamma=3, seed=9, **sampler) for sampler in SAMPLERS]
    async with llama_system() as (coordinator, _):
        outputs = [(await coordinator.generate(each)).token_ids for each in asked]
    assert outputs == await own_token_ids(asked)


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


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    from target_service.backends.llama_context import LlamaContext

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(Unsupported, match=r'pip install "specdec-serving\[llama-cpp\]"'):
        LlamaContext(tmp_path / "model.gguf", OPTIONS)
