"""Distilling a draft from a log that running services wrote; tiny random models."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from specdec.errors import InvalidRequest
from specdec.learning import training
from specdec.learning.distill import Distillation, distill
from specdec.learning.learner import DraftModel
from specdec.learning.samples import Samples
from specdec.learning.training import TrainingPlan, train
from specdec.learning.version import load_model
from tests.support.logged import CountedLog
from tests.support.model_stack import ModelStack
from tests.support.target_alone import TargetAlone
from tests.support.tiny_models import build_tiny_pair

NUM_SESSIONS = 40
PLAN = TrainingPlan(seconds=600.0, max_steps=40, learning_rate=2e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, and the log of what the target said at T = 1."""
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
        asked = {"max_new_tokens": 48, "temperature": 1.0, "ignore_eos": True, "gamma": 3}
        for seed in range(NUM_SESSIONS):
            # By the id it is decided which sessions are held out.
            await stack.generate([5 + seed, 9, 17], seed=seed, session_id=f"s{seed}", **asked)


def asked(folder: Path, out: Path, **options: object) -> Distillation:
    return replace(
        Distillation(folder / "log", "default", str(folder / "draft"), out, "", PLAN),
        **options,  # type: ignore[arg-type]
    )


async def test_a_new_version_is_nearer_to_its_target_and_serves_the_same_text(folder: Path, tmp_path: Path) -> None:
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


def test_a_draft_that_did_not_get_better_is_not_written(folder: Path, tmp_path: Path) -> None:
    learned = distill(asked(folder, tmp_path / "new", plan=replace(PLAN, max_steps=3, learning_rate=0.9)))
    assert not learned.is_better
    assert list(tmp_path.iterdir()) == []


def test_a_version_is_never_overwritten_and_nothing_is_left_of_one_that_fails(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(InvalidRequest, match=r"--out: .*new is there already"):
        distill(asked(folder, tmp_path / "new"))
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"--out: .*file cannot be written"):
        distill(asked(folder, tmp_path / "file" / "new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


def test_a_training_that_stood_still_rests_for_what_it_computed_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of a step, or starved by others: an hour of the clock's, and next to nothing computed."""
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
    assert len(rests) > 4  # what it is compared by on held-out sessions, too
    assert 0.0 < sum(rests) < 3600.0
