"""A head in training computes, at every draft depth, the logits that the serving code computes in a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.engine.heads.factory import load_head
from specdec.engine.heads.head_file import HeadFile
from specdec.engine.local_drafting import target_parts
from specdec.learning import heads
from specdec.learning.heads import Head
from specdec.learning.learner import ExitAdapter
from specdec.learning.samples import ROW_TOKENS, TrainingBatch
from specdec.learning.training import divergence
from specdec.settings.draft_specs import LocalDraftSpec
from tests.support.head_checkpoints import (
    as_speculators,
    as_vllm_medusa,
    eagle3_config,
    eagle3_tensors,
    medusa_tensors,
    write_eagle3,
    write_medusa,
)
from tests.support.head_drive import HeadDrive
from tests.support.head_references import hidden_states
from tests.support.tiny_models import build_tiny_model

VOCABULARY_SIZE, WIDTH = 256, 64
NUM_MEDUSA = 4
ROWS = [[(7 * i * i + 3 * i) % 251 + 2 for i in range(23)], [(5 * i * i + i) % 249 + 3 for i in range(17)]]

#: (layer settings, draft vocabulary size, layers whose states are features, settings of the speculators format)
EAGLE3_HEADS: dict[str, tuple[dict[str, Any], int, list[int], dict[str, bool]]] = {
    "all_tokens": ({}, VOCABULARY_SIZE, [1, 2, 4], {}),
    "some_tokens": ({}, 80, [1, 3, 4], {"norm_before_residual": True}),
    "normed": ({}, 80, [2, 4], {"fc_norm": True, "norm_output": True}),
    "two_layers_of_qwen3": ({"model_type": "qwen3", "num_hidden_layers": 2}, 80, [1, 2, 3], {}),
}
KINDS = [*(f"eagle3-{name}" for name in EAGLE3_HEADS), "medusa", "medusa-in_vllms_form"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    directory = build_tiny_model("llama", tmp_path_factory.mktemp("target"), num_layers=4)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)


def written(kind: str, directory: Path) -> LocalDraftSpec:
    name, _, form = kind.partition("-")
    if name == "medusa":
        tensors = medusa_tensors(WIDTH, VOCABULARY_SIZE, num_heads=NUM_MEDUSA)
        write_medusa(directory, as_vllm_medusa(tensors) if form else tensors, "model.safetensors")
    else:
        layer, draft_size, states, settings = EAGLE3_HEADS[form]
        config = eagle3_config(WIDTH, VOCABULARY_SIZE, draft_size, **layer)
        tensors = eagle3_tensors(config, len(states), extra_norms="fc_norm" in settings)
        write_eagle3(directory, as_speculators(config, states, **settings), tensors)
    return LocalDraftSpec(name, name, path=str(directory))


def learning(spec: LocalDraftSpec, target: PreTrainedModel) -> Head:
    return Head(spec.kind, HeadFile.read(spec.path), target, VOCABULARY_SIZE)


def batch() -> TrainingBatch:
    """Return a batch that learns every next token of both rows with probability 1."""
    width = max(map(len, ROWS))
    token_ids = np.array([[*row, *[0] * (width - len(row))] for row in ROWS])
    places = np.concatenate([index * width + np.arange(len(row) - 1) for index, row in enumerate(ROWS)])
    following = token_ids.reshape(-1)[places + 1]
    return TrainingBatch(
        token_ids, places, np.ones(len(places), np.float32), following[:, None], np.ones((len(places), 1), np.float32)
    )


def served(target: PreTrainedModel, spec: LocalDraftSpec, place: int, depth: int) -> torch.Tensor:
    """Return the serving head's logits after `depth` draft tokens of the text, in a round that starts before them."""
    width = max(map(len, ROWS))
    row, end = ROWS[place // width], place % width + 1
    committed = row[: end - depth]
    head = load_head(spec, target_parts(target, VOCABULARY_SIZE, 64))
    with torch.inference_mode():
        drive = HeadDrive(head, committed, hidden_states(target, committed[:-1]), 16)
        return drive.draft(depth + 1, row[end - depth : end])[depth]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_trains_on_the_logits_of_a_round_at_every_depth(
    kind: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    spec = written(kind, tmp_path)
    depths = list(learning(spec, target).depths(batch()))
    assert len(depths) == (NUM_MEDUSA if spec.kind == "medusa" else 3)
    for depth, (logits, drafted) in enumerate(depths):
        width = drafted.token_ids.shape[1]
        # A round needs one committed token before the token that it starts with.
        assert [int(place) % width for place in drafted.places if place < width] == list(range(depth + 1, 22))
        for index in range(0, len(drafted.places), 4):
            expected = served(target, spec, int(drafted.places[index]), depth)
            torch.testing.assert_close(logits[index].detach(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["eagle3-some_tokens", "medusa"])
def test_all_tensors_of_a_head_are_trained_except_embeddings_and_token_maps(
    kind: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    head = learning(written(kind, tmp_path), target)
    before = {name: tensor.clone() for name, tensor in head.tensors.items()}
    loss(head).backward()
    with torch.no_grad():
        for parameter in head.parameters:
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
            parameter -= parameter.grad
    still = {name for name, tensor in head.tensors.items() if torch.equal(tensor, before[name])}
    assert still == ({"embed_tokens.weight", "d2t", "t2d"} if kind.startswith("eagle3") else set())


@pytest.mark.parametrize("kind", ["eagle3-all_tokens", "medusa"])
def test_gradients_pass_through_everything_that_a_draft_is_computed_from(
    kind: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    """Compare the slope along a random direction with a finite difference.

    The gradients must include those through features, keys and values of earlier depths.
    """
    head = learning(written(kind, tmp_path), target)
    loss(head).backward()
    draw = torch.Generator().manual_seed(0)
    directions = [torch.randn(parameter.shape, generator=draw) * parameter.std() for parameter in head.parameters]
    slope = sum((parameter.grad * way).sum().item() for parameter, way in zip(head.parameters, directions, strict=True))

    def loss_at(distance: float) -> float:
        with torch.no_grad():
            for parameter, way in zip(head.parameters, directions, strict=True):
                parameter += distance * way
            found = loss(head).item()
            for parameter, way in zip(head.parameters, directions, strict=True):
                parameter -= distance * way
        return found

    assert slope == pytest.approx((loss_at(2e-3) - loss_at(-2e-3)) / 4e-3, rel=0.02)


def loss(head: Head) -> torch.Tensor:
    return torch.stack([divergence(logits, drafted).mean() for logits, drafted in head.depths(batch())]).sum()


def test_rows_of_the_maximum_length_can_be_trained_on(target: PreTrainedModel, tmp_path: Path) -> None:
    token_ids = np.arange(ROW_TOKENS)[None] % 250 + 2
    places = np.arange(ROW_TOKENS - 20, ROW_TOKENS - 1)
    long = TrainingBatch(
        token_ids, places, np.ones(19, np.float32), token_ids[0, places + 1, None], np.ones((19, 1), np.float32)
    )
    for logits, drafted in learning(written("eagle3-some_tokens", tmp_path), target).depths(long):
        assert (logits.shape, len(drafted.places)) == ((19, VOCABULARY_SIZE), 19)
        assert not logits.isnan().any()


def test_an_early_exit_of_a_padded_lm_head_has_logits_for_real_tokens_only(tmp_path: Path) -> None:
    directory = build_tiny_model("llama", tmp_path, vocabulary_size=VOCABULARY_SIZE, padded_rows=16)
    padded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)
    adapter = ExitAdapter(LocalDraftSpec("early-exit", "early-exit", 2), padded, VOCABULARY_SIZE)
    ((logits, drafted),) = adapter.depths(batch())
    assert logits.shape == (len(drafted.places), VOCABULARY_SIZE)


def test_a_round_that_starts_one_position_off_would_be_detected(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the comparison with the serving code."""
    spec = written("eagle3-all_tokens", tmp_path)
    moved = heads._Rows.moved
    monkeypatch.setattr(heads._Rows, "moved", lambda rows, numbers, count: moved(rows, numbers, count + 1))
    logits, drafted = next(iter(learning(spec, target).depths(batch())))
    expected = served(target, spec, int(drafted.places[8]), 0)
    assert (logits[8].detach() - expected).abs().max() > 0.01
