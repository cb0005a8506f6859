"""Distilling a draft from a log that running services wrote, with tiny random models."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.contract.errors import InvalidRequest
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from specdec.learning import training
from specdec.learning.distill import Distillation, distill
from specdec.learning.learner import DraftModel
from specdec.learning.samples import Samples
from specdec.learning.trained_model import load_model
from specdec.learning.training import TrainingPlan, train
from tests.support.logged import CountedLog
from tests.support.model_stack import ModelStack
from tests.support.target_alone import TargetAlone
from tests.support.tiny_models import build_tiny_pair

NUM_SESSIONS = 40
PLAN = TrainingPlan(seconds=600.0, max_steps=40, learning_rate=2e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a pair of models and a log of the target's output at temperature 1."""
    folder = tmp_path_factory.mktemp("distill")
    pair = build_tiny_pair("llama", folder, vocabulary_size=64, num_layers=2)
    asyncio.run(_serve(folder, *pair))
    return folder


async def _serve(folder: Path, target: Path, draft: Path) -> None:
    workers = [
        load_worker(LoadRequest(str(path), device="cpu", dtype="float32", num_kv_blocks=64)) for path in (target, draft)
    ]
    log = CountedLog(folder / "log")
    async with ModelStack(target, workers[0], {"default": workers[1]}, learning_log=log) as stack:
        asked = {"max_new_tokens": 48, "temperature": 1.0, "ignore_eos": True, "gamma": 3, "mode": "rejection"}
        for seed in range(NUM_SESSIONS):
            # A hash of the session id decides which sessions are held out.
            await stack.generate([5 + seed, 9, 17], seed=seed, session_id=f"s{seed}", **asked)


def asked(folder: Path, out: Path, **options: object) -> Distillation:
    return replace(
        Distillation(folder / "log", "default", str(folder / "draft"), out, "", PLAN),
        **options,  # type: ignore[arg-type]
    )


async def test_a_new_version_is_closer_to_its_target_and_serves_the_same_text(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new"
    learned = await asyncio.to_thread(distill, asked(folder, out))
    assert learned.after.kl_nats < 0.95 * learned.before.kl_nats
    assert learned.after.acceptance > learned.before.acceptance
    told = json.loads((out / "distilled.json").read_text())
    assert (told["parent"], told["num_steps"]) == (str(folder / "draft"), 40)
    assert told["after"] == {"kl_nats": learned.after.kl_nats, "acceptance": learned.after.acceptance}

    target, draft = (
        load_worker(LoadRequest(str(path), device="cpu", dtype="float32", num_kv_blocks=64))
        for path in (folder / "target", out)
    )
    assert told["target_fingerprint"] == target.shape.model_fingerprint
    alone = TargetAlone(folder / "target")
    async with ModelStack(folder / "target", target, {"default": draft}) as stack:
        for first in (7, 21, 40):
            completion = await stack.generate([first, 9, 17], max_new_tokens=24, temperature=0.0, ignore_eos=True)
            assert list(completion.token_ids) == alone.greedy([first, 9, 17], 24)


def test_a_draft_does_not_gain_from_distributions_of_other_contexts(folder: Path) -> None:
    samples = Samples(folder / "log", "default", vocabulary_fingerprint(load_vocabulary(folder / "draft")), 64)
    dice = np.random.default_rng(0)
    samples.learned = [replace(row, token_ids=dice.permutation(row.token_ids)) for row in samples.learned]
    torch.manual_seed(0)
    assert not train(DraftModel(load_model(str(folder / "draft")), torch.float32), samples, PLAN).is_better


def test_a_draft_that_did_not_improve_is_not_written(folder: Path, tmp_path: Path) -> None:
    learned = distill(asked(folder, tmp_path / "new", plan=replace(PLAN, max_steps=3, learning_rate=0.9)))
    assert not learned.is_better
    assert list(tmp_path.iterdir()) == []


def test_training_on_little_data_stops_before_its_limits_and_keeps_the_best_parameters(folder: Path) -> None:
    samples = Samples(folder / "log", "default", vocabulary_fingerprint(load_vocabulary(folder / "draft")), 64)
    samples.learned = samples.learned[:2]
    torch.manual_seed(0)
    learner = DraftModel(load_model(str(folder / "draft")), torch.float32)
    learned = train(learner, samples, replace(PLAN, max_steps=5000))
    assert learned.stopped_early
    assert learned.num_steps < 500
    assert learned.after.kl_nats <= 1.05 * learned.before.kl_nats  # without the best ones it has overfitted by far


@pytest.mark.full
def test_the_command_says_how_much_more_to_log_when_the_draft_did_not_improve(folder: Path, tmp_path: Path) -> None:
    words = ["distill", "--log", str(folder / "log"), "--draft", str(folder / "draft"), "--out", str(tmp_path / "new"),
             "--max-steps", "3", "--learning-rate", "0.9", "--share", "1"]  # fmt: skip
    told = subprocess.run([sys.executable, "-m", "specdec.cli", *words], capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert told.stdout == ""
    last = told.stderr.splitlines()[-1]
    assert last.startswith("error: the draft did not improve on held-out text, so nothing was written (")
    assert last.endswith("; log about 48320 more tokens and try again")
    assert "INVALID" not in told.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_version_is_never_overwritten_and_a_failed_one_leaves_no_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(InvalidRequest, match=r"--out: .*new already exists"):
        distill(asked(folder, tmp_path / "new"))
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"--out: .*file cannot be written"):
        distill(asked(folder, tmp_path / "file" / "new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


def test_a_stopped_process_rests_only_for_the_time_that_it_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is stopped for an hour in the middle of each step, in which it computes next to nothing."""
    samples = Samples(folder / "log", "default", vocabulary_fingerprint(load_vocabulary(folder / "draft")), 64)
    now_s, rests = [1000.0], list[float]()
    step = training._step

    def stopped(*arguments: Any) -> float:
        now_s[0] += 3600.0
        return step(*arguments)

    monkeypatch.setattr(training, "_step", stopped)
    monkeypatch.setattr(training.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(training.time, "sleep", rests.append)
    train(
        DraftModel(load_model(str(folder / "draft")), torch.float32),
        samples,
        replace(PLAN, seconds=1e9, max_steps=4, share=0.25),
    )
    assert len(rests) > 4  # steps, checks and the verdict all rest
    assert 0.0 < sum(rests) < 3600.0
