"""A device that hangs in a step of several ranks while all of their processes live."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from specdec.engine.base import SequenceSlice, StepPlan, WorkerLost
from specdec.engine.parallel import leader
from tests.support.rank_rig import RankRig
from tests.support.tiny_models import build_tiny_model


def test_the_first_rank_gives_up_a_hung_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over ranks inside a CUDA graph can hang like this, and has no timeout of its own."""
    monkeypatch.setattr(leader, "KEEP_ALIVE_S", 0.1)
    directory = build_tiny_model("llama", tmp_path, num_layers=1)
    lost: Future[WorkerLost] = Future()
    plan = StepPlan((SequenceSlice((5, 6), 0, (0,), 1),))
    with RankRig(2) as rig:
        worker = rig.load(directory, num_kv_blocks=8)
        worker.watch(lost.set_result)
        worker.execute(plan)
        monkeypatch.setattr(leader, "STEP_TIMEOUT_S", 0.5)  # steps on a loaded machine may take longer than that
        with pytest.raises(TimeoutError):
            lost.result(timeout=1.5)
        monkeypatch.setattr(leader, "_end_on_device", lambda logits: lambda: False)
        worker.execute(plan)
        assert "a step has not ended on the devices of all ranks within 0.5 s" in str(lost.result(timeout=30))
        with pytest.raises(WorkerLost):
            worker.execute(plan)
        rig.kill()
