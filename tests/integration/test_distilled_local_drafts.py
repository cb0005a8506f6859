"""Distilling what a target drafts with by itself, from a log that running services wrote; tiny random models."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec.checkpoints.locate import checkpoint_fingerprint
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.engine.heads.factory import load_head
from specdec.engine.heads.head_file import HeadFile
from specdec.engine.loader import load_worker
from specdec.engine.local_drafting import target_parts
from specdec.engine.model.checkpoint_model import SERVED_DTYPES
from specdec.engine.options import LoadRequest
from specdec.learning import trained_model
from specdec.learning.distill import Distillation, distill
from specdec.learning.log_files import LogFacts, encode_segment, read_segment
from specdec.learning.training import TrainingPlan
from specdec.settings.draft_specs import LocalDraftSpec, parse_local_draft
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
    worker = load_worker(LoadRequest(str(folder / "target"), device="cpu", dtype="float32", num_kv_blocks=64))
    async with ModelStack(folder / "target", worker, {}, learning_log=CountedLog(folder / "log")) as stack:
        options = {"max_new_tokens": 48, "temperature": 1.0, "ignore_eos": True}
        sessions = (
            stack.generate([5 + seed, 9, 17], seed=seed, session_id=f"s{seed}", **options) for seed in range(40)
        )
        await asyncio.gather(*sessions)


def draft_of(kind: str, folder: Path) -> str:
    return kind if kind.startswith("early-exit") else f"{kind}:{folder / kind}"


def asked(folder: Path, draft: str, out: Path, **options: object) -> Distillation:
    plain = Distillation(folder / "log", "default", draft, out, "", PLAN, str(folder / "target"))
    return replace(plain, **options)  # type: ignore[arg-type]


async def alpha_and_texts(folder: Path, draft: str) -> tuple[float, list[list[int]]]:
    """Of a target that drafts so: the share of its draft tokens that it accepts, and what it says greedily."""
    spec = parse_local_draft(draft)
    worker = load_worker(
        LoadRequest(str(folder / "target"), device="cpu", dtype="float32", num_kv_blocks=64, local_drafts=(spec,))
    )
    options = {"max_new_tokens": 32, "ignore_eos": True, "gamma": 2, "draft_pool": spec.name}
    async with ModelStack(folder / "target", worker, {}) as stack:
        sampled = await asyncio.gather(
            *(stack.generate([first, 9, 17], temperature=1.0, seed=first, **options) for first in range(7, 27))
        )
        greedy = await asyncio.gather(
            *(stack.generate([first, 9, 17], temperature=0.0, **options) for first in (7, 21, 40))
        )
    accepted, drafted = (
        sum(getattr(done.stats, name) for done in sampled) for name in ("num_accepted_tokens", "num_draft_tokens")
    )
    return accepted / drafted, [list(done.token_ids) for done in greedy]


@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("early-exit:1", "medusa"))]
)
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
    assert after > 1.15 * before
    alone = TargetAlone(folder / "target")
    assert texts == texts_after == [alone.greedy([first, 9, 17], 32) for first in (7, 21, 40)]


def test_an_adapter_goes_on_from_one_that_is_there_for_its_layers_alone(folder: Path, tmp_path: Path) -> None:
    first = distill(asked(folder, "early-exit:1", tmp_path / "first", plan=replace(PLAN, max_steps=10)))
    plan = replace(PLAN, max_steps=1, learning_rate=1e-6)
    second = distill(asked(folder, f"early-exit:1:{tmp_path / 'first'}", tmp_path / "second", plan=plan))
    assert second.before.kl_nats == pytest.approx(first.after.kl_nats, rel=1e-5)
    stored = load_file(tmp_path / "first" / "adapter.safetensors")
    assert not torch.equal(stored["weight"], torch.eye(WIDTH))
    assert stored["bias"].any()
    with pytest.raises(InvalidRequest, match="is for 1 layers"):
        distill(asked(folder, f"early-exit:2:{tmp_path / 'first'}", tmp_path / "third"))


@pytest.mark.parametrize("dtype", SERVED_DTYPES)
def test_words_of_the_target_count_in_whatever_arithmetic_it_was_served(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    vocabulary = vocabulary_fingerprint(load_vocabulary(folder / "target"))
    facts = LogFacts(checkpoint_fingerprint(folder / "target", vocabulary, dtype), vocabulary, VOCABULARY_SIZE)
    (segment, *_) = sorted((folder / "log" / "tenant-default").glob("*.safetensors"))
    (tmp_path / "log" / "tenant-default").mkdir(parents=True)
    (tmp_path / "log" / "tenant-default" / segment.name).write_bytes(encode_segment(facts, read_segment(segment)[1]))
    plan = replace(PLAN, max_steps=1)
    learned = distill(asked(folder, "early-exit:1", tmp_path / "new", log=tmp_path / "log", plan=plan))
    assert learned.num_steps == 1


def test_what_is_part_of_the_target_is_not_trained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="--draft: mtp is a part of the target's own checkpoint"):
        distill(asked(folder, "mtp", tmp_path / "new"))


def test_a_head_whose_positions_are_scaled_keeps_its_configuration_and_its_fingerprint(
    folder: Path, tmp_path: Path
) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 256}  # fmt: skip
    layer = eagle3_config(WIDTH, VOCABULARY_SIZE, 48, rope_scaling=scaling)
    config = as_speculators(layer, [1, 2, 3])
    head = write_eagle3(tmp_path / "head", config, eagle3_tensors(layer))
    distill(asked(folder, f"eagle3:{head}", tmp_path / "new", plan=replace(PLAN, max_steps=2)))
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == json.loads((head / "config.json").read_text())
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    served = load_head(LocalDraftSpec("eagle3", "eagle3", path=str(head)), target_parts(target, VOCABULARY_SIZE, 64))
    told = json.loads((tmp_path / "new" / "distilled.json").read_text())
    assert told["parent_fingerprint"] == served.fingerprint == HeadFile.read(str(head)).fingerprint()


def test_a_full_disk_is_one_line_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(trained_model, "save_file", full)
    with pytest.raises(InvalidRequest, match=r"--out: .* cannot be written: I/O error: No space left"):
        distill(asked(folder, "early-exit:1", tmp_path / "new", plan=replace(PLAN, max_steps=5)))
    assert list(tmp_path.iterdir()) == []


def test_a_local_draft_that_did_not_improve_is_not_written(folder: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, max_steps=2, learning_rate=1e-9)
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
