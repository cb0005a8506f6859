"""Local drafts of targets with CUDA graphs: the same drafts and verifications as with eager steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.cuda_graphs.capture import CudaCapture
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.settings.draft_specs import LocalDraftSpec
from tests.support.cuda_graphs_rig import CountedCapture
from tests.support.head_checkpoints import (
    as_speculators,
    eagle3_config,
    eagle3_tensors,
    medusa_tensors,
    write_eagle3,
    write_medusa,
)
from tests.support.tiny_models import build_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine: nothing was recorded"),
]
VOCABULARY_SIZE, WIDTH, STATES, GAMMA = 256, 64, [1, 3, 4], 3
TOKENS = [(7 * i * i + 3 * i) % 251 + 2 for i in range(40)]
BLOCKS = (5, 2, 9, 11)
CUDA = torch.device("cuda:0")


def drafts(worker: Worker, kind: str, tokens: list[int]) -> torch.Tensor:
    """Return the logits [GAMMA, V] of a greedy draft after a sequence whose last token was not run."""
    token, rows = tokens[-1], []
    for index in range(GAMMA):
        piece = SequenceSlice((token,), len(tokens) - 1 + index, BLOCKS, 1, index)
        rows.append(worker.execute(StepPlan((piece,), local_draft=kind))[0].cpu())
        token = int(rows[-1].argmax())
    return torch.stack(rows)


def test_heads_and_exits_draft_the_same_with_cuda_graphs(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path / "target", num_layers=4)
    config = eagle3_config(WIDTH, VOCABULARY_SIZE, 80)
    write_eagle3(tmp_path / "eagle3", as_speculators(config, STATES), eagle3_tensors(config))
    write_medusa(tmp_path / "medusa", medusa_tensors(WIDTH, VOCABULARY_SIZE, num_heads=GAMMA))
    specs = (
        *(LocalDraftSpec(kind, kind, path=str(tmp_path / kind)) for kind in ("eagle3", "medusa")),
        LocalDraftSpec("early-exit", "early-exit", 2),
    )
    capture = CountedCapture(CudaCapture(CUDA))
    recorded, eager = (
        load_worker(
            LoadRequest(
                str(tmp_path / "target"),
                device="cuda:0",
                dtype="float32",
                num_kv_blocks=16,
                local_drafts=specs,
                compiling=compiling,
            )
        )
        for compiling in (CompileOptions("cuda-graphs", (1, 3, 5), capture=capture), CompileOptions("eager"))
    )
    before = capture.num_replays
    for end in (20, 24):
        start = 0 if end == 20 else 19
        step = StepPlan((SequenceSlice(tuple(TOKENS[start : end - 1]), start, BLOCKS, 1),))
        rows = [worker.execute(step).cpu() for worker in (recorded, eager)]
        torch.testing.assert_close(*rows, atol=1e-3, rtol=1e-3)
        for kind in ("eagle3", "medusa", "early-exit"):
            both = [drafts(worker, kind, TOKENS[:end]) for worker in (recorded, eager)]
            torch.testing.assert_close(*both, atol=1e-3, rtol=1e-3)
    # A verification, and each draft step of the early exit; heads run eagerly.
    assert capture.num_replays - before == 1 + 2 * GAMMA
