"""More ranks than KV heads, by more than one: pairs of ranks share a head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.loader import load_worker
from specdec.engine.options import EAGER, CompileOptions, LoadRequest
from tests.support.rank_rig import RankRig
from tests.support.tiny_models import build_tiny_model


@pytest.mark.full
def test_four_ranks_of_a_model_with_two_kv_heads_give_its_logits(tmp_path: Path) -> None:
    directory = build_tiny_model("qwen3", tmp_path, gain=1.0, logit_spread=1.0)
    alone = load_worker(
        LoadRequest(str(directory), device="cpu", dtype="float32", num_kv_blocks=8, compiling=CompileOptions(EAGER))
    )
    tokens = tuple(range(2, 52))
    plans = [
        StepPlan((SequenceSlice(tokens[:40], 0, (3, 1, 2), 5),)),
        StepPlan((SequenceSlice(tokens[40:], 40, (3, 1, 2, 0), 10),)),
    ]
    with RankRig(4) as rig:
        divided = rig.load(directory, num_kv_blocks=8)
        for plan in plans:
            torch.testing.assert_close(divided.execute(plan), alone.execute(plan), rtol=0, atol=1e-4)
        assert len(rig.shares) == 4
        for share in rig.shares:
            assert share["parameter_share"] <= 0.35
            assert share["kv_share"] == 0.5
