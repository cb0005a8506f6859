"""Consecutive draft steps on the device equal single steps; Triton's interpreter stands in for the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from draft_service.proposer import DraftOptions, Proposer
from specdec.contract.types import DrawRule, ProposeRequest, SamplingFilters
from specdec.engine.base import MultiStepDrafts, SequenceSlice, StepPlan, Worker
from specdec.engine.cuda_graphs import fused_operations, paged_attention
from specdec.engine.cuda_graphs.fused_operations import ProgramSizes
from specdec.engine.cuda_graphs.paged_attention import ContextSplit
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.sequence import BlockTable
from tests.support.cuda_graphs_rig import CountedCapture, random_tokens
from tests.support.round_driver import make_round
from tests.support.tiny_models import build_tiny_model

pytest.importorskip("triton", reason="Triton is not installed here: its kernels were not interpreted")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled on this machine: see tests/gpu"
)

NUM_STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Use few programs, because the interpreter takes some milliseconds for each."""
    few = ContextSplit(tile_keys=64, unit_tiles=1, num_splits=1, tile_outputs=64)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paged_attention, "ContextSplit", lambda: few)
        patched.setattr(fused_operations, "ProgramSizes", lambda: ProgramSizes(64, 512, 1 << 14))
        patched.setattr("specdec.engine.cuda_graphs.buckets._NUM_SEQUENCES", (1, 4))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("model"), num_layers=2)


@pytest.fixture(scope="module")
def worker(model: Path) -> Worker:
    return load(model)


def load(model: Path, attention: str = "paged") -> Worker:
    compiling = CompileOptions(
        "cuda-graphs", row_counts=(1, 2), capture=CountedCapture(warms_up=False), attention=attention
    )
    return load_worker(
        LoadRequest(str(model), device="cpu", dtype="float32", num_kv_blocks=64, compiling=compiling, self_check=False)
    )


class Sessions:
    """Sequences with room for a draft, whose last tokens a step runs."""

    def __init__(self, worker: Worker, lengths: tuple[int, ...], num_last: tuple[int, ...]) -> None:
        manager = BlockManager(64)
        self.tokens = [random_tokens(seed, length) for seed, length in enumerate(lengths)]
        self.tables = [BlockTable() for _ in lengths]
        self._num_last = num_last
        for table, length in zip(self.tables, lengths, strict=True):
            manager.grow(table, length + NUM_STEPS)
        self._worker = worker
        for index, length in enumerate(lengths):
            if length > num_last[index]:
                worker.execute(StepPlan((self._slice(index, 0, length - num_last[index], 0),)))

    def _slice(self, index: int, start: int, end: int, num_rows: int) -> SequenceSlice:
        table = self.tables[index]
        return SequenceSlice(tuple(self.tokens[index][start:end]), start, table.first(-(-end // 16)), num_rows,
                             table=table)  # fmt: skip

    def plan(self) -> StepPlan:
        ends = [len(tokens) for tokens in self.tokens]
        pieces = zip(range(len(ends)), ends, self._num_last, strict=True)
        return StepPlan(tuple(self._slice(index, end - num, end, 1) for index, end, num in pieces))

    def one_by_one(self) -> list[torch.Tensor]:
        """Return the logits of each step of a greedy draft."""
        rows = []
        for _ in range(NUM_STEPS):
            rows.append(self._worker.execute(self.plan()))
            for tokens, token_id in zip(self.tokens, rows[-1].argmax(-1).tolist(), strict=True):
                tokens.append(token_id)
            self._num_last = (1,) * len(self.tokens)
        return rows

    def together(self) -> list[torch.Tensor]:
        rows: list[torch.Tensor] = []

        def draw(index: int, logits: torch.Tensor) -> torch.Tensor:
            assert index == len(rows)
            rows.append(logits.clone())
            return logits.argmax(-1)

        assert self._worker.draft(self.plan(), NUM_STEPS, draw)
        return rows


#: One that a block ends within, one with two tokens to run, one that begins, one that opens a block; and one alone.
CASES = [((30, 14, 1, 33), (1, 2, 1, 1)), ((15,), (1,)), ((40, 20), (7, 1))]


@pytest.mark.parametrize(("lengths", "num_last"), CASES)
def test_consecutive_steps_on_the_device_equal_steps_from_the_host(
    worker: Worker, lengths: tuple[int, ...], num_last: tuple[int, ...]
) -> None:
    expected = Sessions(worker, lengths, num_last).one_by_one()
    sessions = Sessions(worker, lengths, num_last)
    for actual, row in zip(sessions.together(), expected, strict=True):
        torch.testing.assert_close(actual, row, rtol=0, atol=1e-5)
    # A later step also reads what they stored in the cache.
    for tokens, row in zip(sessions.tokens, torch.stack(expected, 1), strict=True):
        tokens += row.argmax(-1).tolist()
    after = worker.execute(sessions.plan())
    fresh = Sessions(worker, lengths, num_last)
    fresh.one_by_one()
    torch.testing.assert_close(after, worker.execute(fresh.plan()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "draw_rule"), [(0.0, DrawRule.DISTRIBUTION), (0.9, DrawRule.COUPLED), (0.9, DrawRule.DISTRIBUTION)]
)
async def test_a_replica_drafts_the_same_in_one_multi_step_draft_as_in_single_steps(
    temperature: float, draw_rule: DrawRule, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    draft = worker.draft

    def count(plan: StepPlan, num_steps: int, draw: Callable[[int, torch.Tensor], torch.Tensor]) -> bool:
        runs.append(num_steps)
        return draft(plan, num_steps, draw)

    monkeypatch.setattr(worker, "draft", count)
    monkeypatch.setattr(worker, "close", lambda: None)  # the worker serves other tests
    drafts = []
    for kind in (MultiStepDrafts.ANY, MultiStepDrafts.NONE):
        monkeypatch.setattr(worker, "multi_step_drafts", kind)
        proposer = Proposer(worker, drafting=DraftOptions(max_support=32))
        filters = SamplingFilters(temperature=temperature)
        tokens = random_tokens(5, 30)
        for round_id, end in enumerate((20, 23)):
            position = make_round(tokens[:end], filters=filters, draw_rule=draw_rule, seed=3, round_id=round_id)
            proposal = await proposer.propose(ProposeRequest(position, gamma=4))
            supports = [(support.token_ids.tolist(), support.weights.tolist()) for support in proposal.supports]
            drafts.append((proposal.draft_token_ids.tolist(), supports))
        await proposer.close()
    assert drafts[:2] == drafts[2:]
    assert runs == [4, 4]


def test_multi_step_drafts_need_tables_on_the_device(model: Path) -> None:
    worker = load(model, "gathered")
    plan = Sessions(worker, (15,), (1,)).plan()
    assert not worker.draft(plan, 2, lambda index, logits: logits.argmax(-1))
