"""Multi-step drafts in one call of the native kernels equal single steps bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_service.proposer import Proposer
from specdec.contract.types import ProposeRequest
from specdec.engine.base import MultiStepDrafts, SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.loop import steps
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.sequence import BlockTable
from tests.support.cuda_graphs_rig import random_tokens
from tests.support.round_driver import make_round
from tests.support.tiny_models import SLIDING_WINDOW, build_tiny_model

NUM_STEPS = 6
#: No whole number of vectors, nor of panels.
VOCABULARY_SIZE = 101
NUM_BLOCKS = 64
CONTEXT = 128

#: Lengths of sequences, and how many of their tokens the first step runs: several, blocks that end, one that begins.
CASES = [((30, 14, 1, 33), (1, 2, 1, 5)), ((15,), (1,)), ((40, 20), (7, 1)), ((SLIDING_WINDOW - 2,), (1,))]


def change_head(directory: Path, change: Callable[[torch.Tensor], None]) -> Path:
    file = directory / "model.safetensors"
    weights = load_file(file)
    change(weights["lm_head.weight"])
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def load(directory: Path, **options: object) -> Worker:
    fixed = {"device": "cpu", "dtype": "float32", "num_kv_blocks": NUM_BLOCKS}
    return load_worker(LoadRequest(str(directory), compiling=CompileOptions("native"), **(fixed | options)))


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {"head_dim": 32} if request.param == "qwen3" else {}  # the kernels need whole vectors
    return build_tiny_model(request.param, tmp_path_factory.mktemp("model"), vocabulary_size=VOCABULARY_SIZE,
                            context=CONTEXT, config_overrides=overrides)  # fmt: skip


class Sequences:
    """Sequences with room for all steps, whose last tokens the first step runs."""

    def __init__(
        self, worker: Worker, lengths: tuple[int, ...], num_last: tuple[int, ...], num_steps: int = NUM_STEPS
    ) -> None:
        self.num_steps = num_steps
        self.worker = worker
        self._manager = BlockManager(NUM_BLOCKS)
        self._tokens = [random_tokens(seed, length) for seed, length in enumerate(lengths)]
        self._tokens = [[token % VOCABULARY_SIZE for token in tokens] for tokens in self._tokens]
        self._tables = [BlockTable() for _ in lengths]
        self._starts = [length - num for length, num in zip(lengths, num_last, strict=True)]
        for table, length in zip(self._tables, lengths, strict=True):
            self._manager.grow(table, length + num_steps)
        if any(self._starts):
            worker.execute(StepPlan(tuple(self._slice(index, 0, end, 0)
                                          for index, end in enumerate(self._starts) if end)))  # fmt: skip

    def _slice(self, index: int, start: int, end: int, num_rows: int) -> SequenceSlice:
        table = self._tables[index]
        return SequenceSlice(tuple(self._tokens[index][start:end]), start, table.first(-(-end // 16)), num_rows,
                             table=table)  # fmt: skip

    @property
    def plan(self) -> StepPlan:
        pieces = enumerate(zip(self._starts, self._tokens, strict=True))
        return StepPlan(tuple(self._slice(index, start, len(tokens), 1) for index, (start, tokens) in pieces))

    def one_by_one(self) -> tuple[np.ndarray, np.ndarray]:
        """Return logits and tokens as `Worker.draft_greedy` does."""
        maxima, chosen = [], []
        for _ in range(self.num_steps):
            rows = self.worker.execute(self.plan).numpy()
            chosen.append(rows.argmax(axis=-1))
            maxima.append(rows[np.arange(len(rows)), chosen[-1]])
            self.go_on(chosen[-1])
        return np.stack(maxima), np.stack(chosen)

    def go_on(self, token_ids: np.ndarray) -> None:
        self._starts = [len(tokens) for tokens in self._tokens]
        for tokens, token_id in zip(self._tokens, token_ids.tolist(), strict=True):
            tokens.append(token_id)

    def last_logits(self) -> np.ndarray:
        """Return the logits of one more step, which reads the KV of the others."""
        return self.worker.execute(self.plan).numpy()


def check_run(
    worker: Worker, lengths: tuple[int, ...], num_last: tuple[int, ...], num_steps: int = NUM_STEPS
) -> np.ndarray:
    """Check a multi-step draft against single steps, and return its tokens."""
    single = Sequences(worker, lengths, num_last, num_steps)
    maxima, chosen = single.one_by_one()
    expected_after = single.last_logits()
    together = Sequences(worker, lengths, num_last, num_steps)
    run_maxima, run_chosen = worker.draft_greedy(together.plan, num_steps)
    np.testing.assert_array_equal(run_chosen, chosen)
    np.testing.assert_array_equal(run_maxima, maxima)
    for token_ids in run_chosen:
        together.go_on(token_ids)
    np.testing.assert_array_equal(together.last_logits(), expected_after)
    return chosen


@pytest.mark.parametrize(("num_threads", "dtype"), [(1, "float32"), (2, "int8")])
@pytest.mark.parametrize(("lengths", "num_last"), CASES)
def test_a_multi_step_draft_equals_its_steps_bit_for_bit(
    directory: Path, lengths: tuple[int, ...], num_last: tuple[int, ...], num_threads: int, dtype: str
) -> None:
    before = torch.get_num_threads()
    try:
        chosen = check_run(load(directory, dtype=dtype, num_threads=num_threads), lengths, num_last)
    finally:
        torch.set_num_threads(before)
    assert len(np.unique(chosen)) > 1  # a repeated token would hide a wrong one


def test_a_worker_runs_longer_drafts_and_larger_batches_in_turn(directory: Path) -> None:
    worker = load(directory, num_kv_blocks=NUM_BLOCKS)
    for lengths, num_steps in (((5,), 3), ((5, 20, 33, 41), 70), ((7, 9, 11, 2, 30, 4, 5, 6), 90), ((3,), 90)):
        check_run(worker, lengths, (1,) * len(lengths), num_steps)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_first_of_equal_logits_is_chosen_within_the_vocabulary(sign: float, tmp_path: Path) -> None:
    """All logits are equal; the kernels' rows extend past the vocabulary with zeros."""

    def level(head: torch.Tensor) -> None:
        head[:] = sign * head[5]

    model = build_tiny_model("llama", tmp_path, vocabulary_size=VOCABULARY_SIZE)
    assert not check_run(load(change_head(model, level)), (15,), (1,)).any()


def test_rows_of_the_output_head_past_the_vocabulary_are_not_chosen(tmp_path: Path) -> None:
    def prefer_padding(head: torch.Tensor) -> None:
        head[VOCABULARY_SIZE:] = 5.0 * head[:20]

    model = build_tiny_model("llama", tmp_path, vocabulary_size=VOCABULARY_SIZE, padded_rows=20)
    assert check_run(load(change_head(model, prefer_padding)), (15, 9), (1, 3)).max() < VOCABULARY_SIZE


@pytest.mark.parametrize("token_id", [3, VOCABULARY_SIZE - 1])
def test_a_nan_is_chosen_before_all_numbers(token_id: int, tmp_path: Path) -> None:
    def break_row(head: torch.Tensor) -> None:
        head[token_id] = torch.nan

    model = build_tiny_model("llama", tmp_path, vocabulary_size=VOCABULARY_SIZE)
    worker = load(change_head(model, break_row), self_check=False)
    sequences = Sequences(worker, (15,), (1,))
    maxima, chosen = worker.draft_greedy(sequences.plan, 2)
    assert np.isnan(maxima).all()
    assert (chosen == token_id).all()


def test_a_multi_step_draft_stays_within_its_blocks_and_the_models_context(tmp_path: Path) -> None:
    worker = load(build_tiny_model("llama", tmp_path, context=32))
    tokens, blocks = tuple(range(2, 30)), (0, 1)
    plan = StepPlan((SequenceSlice(tokens, 0, blocks, 1),))
    worker.draft_greedy(plan, 5)  # the last token is not run
    with pytest.raises(IndexError, match="context of 32"):
        worker.draft_greedy(plan, 6)
    with pytest.raises(IndexError, match="1 KV blocks"):
        worker.draft_greedy(StepPlan((SequenceSlice(tokens[:14], 0, (0,), 1),)), 4)


@pytest.mark.parametrize("num_rows", [0, 2])
def test_a_multi_step_draft_without_one_logit_row_per_slice_is_refused(num_rows: int, directory: Path) -> None:
    with pytest.raises(ValueError, match="one logit row"):
        load(directory).draft_greedy(StepPlan((SequenceSlice((2, 3), 0, (0,), num_rows),)), 2)


async def test_a_replica_drafts_the_same_in_multi_step_drafts_as_in_single_steps(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "LONGEST_HOST_RUN_S", 1e9)  # on a slow machine, too
    drafts, runs = [], []
    for kind in (MultiStepDrafts.GREEDY, MultiStepDrafts.NONE):
        worker = load(directory)
        assert worker.multi_step_drafts is MultiStepDrafts.GREEDY
        run = worker.draft_greedy
        monkeypatch.setattr(worker, "draft_greedy", lambda plan, num, run=run: runs.append(num) or run(plan, num))
        worker.multi_step_drafts = kind
        proposer = Proposer(worker)
        tokens = [token % VOCABULARY_SIZE for token in random_tokens(5, 40)]
        for round_id, end in enumerate((20, 23, 22, 30)):
            proposal = await proposer.propose(ProposeRequest(make_round(tokens[:end], round_id=round_id), gamma=6))
            drafts.append((proposal.draft_token_ids.tolist(), proposal.kv_len))
        proposer.check_integrity()
        await proposer.close()
    assert drafts[:4] == drafts[4:]
    assert runs[1:] == [6, 6, 6]  # after the first, part of which may be a multi-step draft
