"""Distilling what a target drafts with by itself, from a log that running services wrote; tiny random models."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec.engine.loader import load_worker
from specdec.errors import InvalidRequest
from specdec.learning.distill import Distillation, distill
from specdec.learning.training import TrainingPlan
from specdec.local_drafts import parse_local_draft
from tests.support.head_checkpoints import (
    as_speculators,
    eagle3_config,
    eagle3_tensors,
    medusa_tensors,
    write_eagle3,
    write_medusa,
)
from tests.support.logged import CountedLog
from tests.support.model_stack import ModelStack
from tests.support.target_alone import TargetAlone
from tests.support.tiny_models import build_tiny_model

VOCABULARY_SIZE, WIDTH = 64, 64
PLAN = TrainingPlan(seconds=600.0, max_steps=30, learning_rate=3e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, heads for it of random weights, and the log of what it said by itself at T = 1."""
    folder = tmp_path_factory.mktemp("distill")
    build_tiny_model("llama", folder / "target", vocabulary_size=VOCABULARY_SIZE, num_layers=3)
    config = eagle3_config(WIDTH, VOCABULARY_SIZE, 48)
    write_eagle3(folder / "eagle3", as_speculators(config, [1, 2, 3]), eagle3_tensors(config))
    write_medusa(folder / "medusa", medusa_tensors(WIDTH, VOCABULARY_SIZE))
    asyncio.run(_serve(folder))
    return folder


async def _serve(folder: Path) -> None:
    worker = load_worker(str(folder / "target"), device="cpu", dtype="float32", num_kv_blocks=64)
    async with ModelStack(folder / "target", worker, {}, learning_log=CountedLog(folder / "log")) as stack:
        for seed in range(40):
            await stack.generate(
                [5 + seed, 9, 17], seed=seed, session_id=f"s{seed}", max_new_tokens=48, temperature=1.0, ignore_eos=True
            )


def draft_of(kind: str, folder: Path) -> str:
    return kind if kind.startswith("early-exit") else f"{kind}:{folder / kind}"


def asked(folder: Path, draft: str, out: Path, **options: object) -> Distillation:
    plain = Distillation(folder / "log", "default", draft, out, "", PLAN, str(folder / "target"))
    return replace(plain, **options)  # type: ignore[arg-type]


async def alpha_and_texts(folder: Path, draft: str) -> tuple[float, list[list[int]]]:
    """Of a target that drafts so: the share of its draft tokens that it accepts, and what it says greedily."""
    spec = parse_local_draft(draft)
    worker = load_worker(str(folder / "target"), device="cpu", dtype="float32", num_kv_blocks=64, local_drafts=(spec,))
    options = {"max_new_tokens": 32, "ignore_eos": True, "gamma": 2, "draft_pool": spec.name}
    accepted = drafted = 0
    texts = []
    async with ModelStack(folder / "target", worker, {}) as stack:
        for first in range(7, 27):
            done = await stack.generate([first, 9, 17], temperature=1.0, seed=first, **options)
            accepted, drafted = accepted + done.stats.num_accepted_tokens, drafted + done.stats.num_draft_tokens
        for first in (7, 21, 40):
            texts.append(list((await stack.generate([first, 9, 17], temperature=0.0, **options)).token_ids))
    return accepted / drafted, texts


@pytest.mark.parametrize("kind", ["early-exit:1", "eagle3", pytest.param("medusa", marks=pytest.mark.full)])
async def test_what_a_target_drafts_with_learns_and_is_served_as_it_was_written(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    draft, out = draft_of(kind, folder), tmp_path / "new"
    learned = await asyncio.to_thread(distill, asked(folder, draft, out))
    assert learned.after.kl_nats < 0.9 * learned.before.kl_nats
    told = json.loads((out / "distilled.json").read_text())
    assert (told["parent"], told["num_steps"]) == (draft, PLAN.max_steps)

    before, texts = await alpha_and_texts(folder, draft)
    after, texts_after = await alpha_and_texts(folder, f"{kind}:{out}")
    assert after > 1.3 * before
    alone = TargetAlone(folder / "target")
    assert texts == texts_after == [alone.greedy([first, 9, 17], 32) for first in (7, 21, 40)]


def test_an_adapter_goes_on_from_one_that_is_there(folder: Path, tmp_path: Path) -> None:
    first = distill(asked(folder, "early-exit:1", tmp_path / "first", plan=replace(PLAN, max_steps=10)))
    plan = replace(PLAN, max_steps=1, learning_rate=1e-6)
    second = distill(asked(folder, f"early-exit:1:{tmp_path / 'first'}", tmp_path / "second", plan=plan))
    assert second.before.kl_nats == pytest.approx(first.after.kl_nats, rel=1e-5)


def test_what_did_not_get_better_is_not_written(folder: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, max_steps=2, learning_rate=0.9)
    assert not distill(asked(folder, "early-exit:2", tmp_path / "new", plan=plan)).is_better
    assert list(tmp_path.iterdir()) == []


def test_another_target_than_the_logs_is_refused_before_anything_is_trained(folder: Path, tmp_path: Path) -> None:
    other = build_tiny_model("llama", tmp_path / "other", vocabulary_size=VOCABULARY_SIZE, num_layers=3, seed=1)
    with pytest.raises(InvalidRequest, match=r"--target-model: the log holds words of target [0-9a-f]{32}, which is"):
        distill(asked(folder, "early-exit:1", tmp_path / "new", target_model=str(other)))
    assert not (tmp_path / "new").exists()


def test_a_head_is_stored_in_the_numbers_that_it_came_in(folder: Path, tmp_path: Path) -> None:
    config = eagle3_config(WIDTH, VOCABULARY_SIZE, 48)
    tensors = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in eagle3_tensors(config).items()
    }
    head = write_eagle3(tmp_path / "head", as_speculators(config, [1, 2, 3]), tensors)
    distill(asked(folder, f"eagle3:{head}", tmp_path / "new", plan=replace(PLAN, max_steps=3)))
    before, after = (load_file(path / "model.safetensors") for path in (head, tmp_path / "new"))
    assert {name: tensor.dtype for name, tensor in after.items()} == {
        name: tensor.dtype for name, tensor in before.items()
    }
    assert all(torch.equal(before[name], after[name]) for name in ("d2t", "t2d", "embed_tokens.weight"))
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == json.loads((head / "config.json").read_text())
