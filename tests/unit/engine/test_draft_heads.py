"""Draft heads against the same arithmetic written down independently, over whole sequences, with dense attention."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.contract.errors import InvalidRequest
from specdec.engine.heads.factory import load_head
from specdec.engine.heads.interface import TargetParts
from specdec.settings.draft_specs import LocalDraftSpec
from tests.support.head_checkpoints import (
    Tensors,
    as_speculators,
    as_vllm_medusa,
    eagle3_config,
    eagle3_tensors,
    medusa_tensors,
    write_eagle3,
    write_medusa,
)
from tests.support.head_drive import HeadDrive
from tests.support.head_references import Eagle3Reference, hidden_states, medusa_logits
from tests.support.tiny_models import build_tiny_model

VOCABULARY_SIZE, WIDTH, NUM_LAYERS = 256, 64, 6
#: Longer than a KV block.
TOKENS = [(7 * i * i + 3 * i) % 251 + 2 for i in range(37)]
NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    directory = build_tiny_model("llama", tmp_path_factory.mktemp("target"), num_layers=NUM_LAYERS)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def target(model: PreTrainedModel) -> TargetParts:
    return TargetParts(
        config=model.config,
        embedding=model.model.embed_tokens.weight.detach(),
        norm=model.model.norm,
        head=model.lm_head.weight.detach(),
        vocabulary_size=VOCABULARY_SIZE,
        max_context_tokens=512,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def spec(kind: str, path: Path) -> LocalDraftSpec:
    return LocalDraftSpec(kind, kind, path=str(path))


MEDUSA_FILES: dict[str, Callable[[Path, Tensors], Path]] = {
    "original_pickle": write_medusa,
    "original_pickle_alone": lambda directory, tensors: write_medusa(directory, tensors) / "medusa_lm_head.pt",
    "original_safetensors": lambda directory, tensors: write_medusa(directory, tensors, "medusa_lm_head.safetensors"),
    "old_names": lambda directory, tensors: write_medusa(
        directory, {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    ),
}


@pytest.mark.parametrize("form", MEDUSA_FILES)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_medusa_heads_follow_the_paper_and_are_counted_by_their_tensors(
    model: PreTrainedModel, target: TargetParts, tmp_path: Path, form: str, num_layers: int
) -> None:
    tensors = medusa_tensors(WIDTH, VOCABULARY_SIZE, num_heads=3, num_layers=num_layers)
    head = load_head(spec("medusa", MEDUSA_FILES[form](tmp_path / "heads", tensors)), target)
    expected = medusa_logits(model, tensors, TOKENS[:-1])[:, -1]
    drafted = HeadDrive(head, TOKENS, hidden_states(model, TOKENS[:-1]), 16).draft(3)
    torch.testing.assert_close(drafted.double(), expected, atol=1e-4, rtol=1e-4)
    assert head.max_draft_tokens == 3


def test_medusa_heads_in_the_format_of_vllm_give_the_same_logits(
    model: PreTrainedModel, target: TargetParts, tmp_path: Path
) -> None:
    tensors = medusa_tensors(WIDTH, VOCABULARY_SIZE, num_layers=2)
    for name in list(tensors):
        if name.endswith("bias"):
            tensors[name].zero_()  # vLLM's have none
    renamed = {name: tensor for name, tensor in as_vllm_medusa(tensors).items() if not name.endswith("bias")}
    head = load_head(spec("medusa", write_medusa(tmp_path, renamed, "model.safetensors")), target)
    drafted = HeadDrive(head, TOKENS, hidden_states(model, TOKENS[:-1]), 16).draft(3)
    torch.testing.assert_close(
        drafted.double(), medusa_logits(model, tensors, TOKENS[:-1])[:, -1], atol=1e-4, rtol=1e-4
    )


def test_medusa_heads_with_a_token_map_give_logits_of_those_tokens_alone(
    model: PreTrainedModel, target: TargetParts, tmp_path: Path
) -> None:
    chosen = torch.tensor([3, 200, 41, 7, 99])
    tensors = medusa_tensors(WIDTH, VOCABULARY_SIZE, num_heads=1)
    whole = write_medusa(tmp_path / "whole", as_vllm_medusa(tensors) | {"token_map": chosen}, "model.safetensors")
    cut = dict(as_vllm_medusa(tensors), token_map=chosen)
    cut["lm_heads.0.weight"] = cut["lm_heads.0.weight"][chosen]
    for directory in (whole, write_medusa(tmp_path / "cut", cut, "model.safetensors")):
        row = HeadDrive(
            load_head(spec("medusa", directory), target), TOKENS, hidden_states(model, TOKENS[:-1]), 16
        ).draft(1)[0]
        expected = torch.full((VOCABULARY_SIZE,), -torch.inf, dtype=torch.float64)
        expected[chosen] = medusa_logits(model, tensors, TOKENS[:-1])[0, -1, chosen]
        torch.testing.assert_close(row.double(), expected, atol=1e-4, rtol=1e-4)


EAGLE3_HEADS: dict[str, tuple[dict[str, Any], int, list[int], dict[str, bool]]] = {
    # layer settings, draft vocabulary, hidden states, settings of speculators ({} for the original format)
    "original": ({}, VOCABULARY_SIZE, [2, 3], {}),
    "draft_vocabulary": ({}, 80, [2, 3], {}),
    "speculators": ({}, 80, [1, 3, 6], {"norm_before_residual": False}),
    "norm_before_residual": ({}, 80, [1, 3, 5], {"norm_before_residual": True}),
    "norm_before_fc": ({}, VOCABULARY_SIZE, [1, 4, 5], {"norm_before_residual": True, "norm_before_fc": True}),
    "fc_norm_and_output": ({}, 80, [2, 4], {"norm_before_residual": False, "fc_norm": True, "norm_output": True}),
    "two_layers": ({"num_hidden_layers": 2}, 80, [1, 2, 3], {"norm_before_residual": True}),
    "qwen3_layer": ({"model_type": "qwen3", "head_dim": 24}, 80, [1, 2, 6], {"norm_before_residual": False}),
    "width_of_its_own": ({"hidden_size": 48, "head_dim": 12}, 80, [2, 3], {}),
}


def made_eagle3(
    directory: Path, layer: dict[str, Any], draft_size: int, states: list[int], settings: dict[str, bool]
) -> tuple[Path, Eagle3Reference]:
    config = eagle3_config(WIDTH, VOCABULARY_SIZE, draft_size, **layer)
    tensors = eagle3_tensors(config, len(states), extra_norms="fc_norm" in settings or "norm_before_fc" in settings)
    written = as_speculators(config, states, **settings) if settings else config
    return write_eagle3(directory, written, tensors), Eagle3Reference(config, tensors, states, **settings)


@pytest.mark.parametrize("name", EAGLE3_HEADS)
def test_an_eagle3_head_follows_its_format(
    model: PreTrainedModel, target: TargetParts, tmp_path: Path, name: str
) -> None:
    # By default the original format reads the hidden states 2, L // 2 and L - 3, which are two states for 6 layers.
    directory, reference = made_eagle3(tmp_path, *EAGLE3_HEADS[name])
    states = hidden_states(model, TOKENS[:-1])
    features = reference.features(states)
    expected = reference.draft(features, TOKENS, NUM_DRAFTS)
    head = load_head(spec("eagle3", directory), target)
    for chunk in (5, 64):
        drive = HeadDrive(head, TOKENS, states, chunk)
        torch.testing.assert_close(drive.features.double(), features, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(drive.draft(NUM_DRAFTS).double(), expected, atol=1e-3, rtol=1e-3)


def test_features_of_the_wrong_position_change_the_logits(
    model: PreTrainedModel, target: TargetParts, tmp_path: Path
) -> None:
    """Negative control of the test above: a shift by one position changes the logits as it changes the reference."""
    directory, reference = made_eagle3(tmp_path, *EAGLE3_HEADS["speculators"])
    states = hidden_states(model, TOKENS[:-1])
    expected = reference.draft(reference.features(states), TOKENS, 1)[0]
    head = load_head(spec("eagle3", directory), target)
    named = expected.isfinite()
    for shift in (0, 2):
        row = HeadDrive(head, TOKENS, states, 64, shift).draft(1)[0].double()
        assert (row - expected)[named].abs().max() > 0.1
    shifted = reference.draft(reference.features(states), TOKENS, 1, shift=2)[0]
    assert (shifted - expected)[named].abs().max() > 0.1


def test_no_token_attends_to_position_0(model: PreTrainedModel, target: TargetParts, tmp_path: Path) -> None:
    """The feature before the first token does not change the drafts."""
    directory, _ = made_eagle3(tmp_path, *EAGLE3_HEADS["speculators"])
    head = load_head(spec("eagle3", directory), target)
    rows = []
    for first in (0.0, 100.0):
        drive = HeadDrive(head, TOKENS, hidden_states(model, TOKENS[:-1]), 64)
        drive.previous[0] = first
        drive.extend(0, 1)
        drive.extend(1, len(TOKENS) - 1)
        rows.append(drive.draft(2))
    assert torch.equal(*rows)


def broken(change: Callable[[dict[str, Any], Tensors], object]) -> Callable[[Path], Path]:
    """Return a writer of an EAGLE-3 head in the speculators format with one fault."""

    def write(directory: Path) -> Path:
        config = eagle3_config(WIDTH, VOCABULARY_SIZE, 80)
        tensors = eagle3_tensors(config)
        written = as_speculators(config, [1, 2, 3])
        change(written, tensors)
        return write_eagle3(directory, written, tensors)

    return write


def put(mapping: dict[str, Any], name: str, value: Any) -> None:
    mapping[name] = value


REFUSED_EAGLE3: dict[str, tuple[Callable[[dict[str, Any], Tensors], object], str]] = {
    "peagle": (lambda c, t: put(c, "speculators_model_type", "peagle"), "is a head of type peagle, not eagle3"),
    "dflash": (lambda c, t: put(c, "speculators_model_type", "dflash"), "is a head of type dflash, not eagle3"),
    "missing": (lambda c, t: t.pop("norm.weight"), "model.safetensors lacks the tensor norm.weight"),
    "no_map": (lambda c, t: t.pop("d2t"), "has logits of 80 of the target's 256 tokens and lacks the tensor d2t"),
    "another_target": (
        lambda c, t: put(t, "fc.weight", torch.zeros(64, 3 * 128)),
        "the tensor fc.weight has shape [64, 384], and this target and configuration need [64, 192]",
    ),
    "width": (
        lambda c, t: put(t, "midlayer.self_attn.q_proj.weight", torch.zeros(64, 64)),
        "the tensor layers.0.self_attn.q_proj.weight has shape [64, 64], and this target and configuration need",
    ),
    "outside": (lambda c, t: put(t, "d2t", t["d2t"] + 200), "the tensor d2t names token 4"),
    "twice": (lambda c, t: put(t, "d2t", -torch.arange(80)), "the tensor d2t names a token twice"),
    "masks_differ": (lambda c, t: put(t, "t2d", ~t["t2d"]), "the tensors d2t and t2d list different tokens"),
    "infinite": (lambda c, t: t["norm.weight"].fill_(torch.inf), "norm.weight holds numbers that are not finite"),
    "layers": (
        lambda c, t: put(c, "eagle_aux_hidden_state_layer_ids", [1, 2, 7]),
        "reads the hidden states [1, 2, 7], which must be ascending and within this target",
    ),
    "unsaid": (lambda c, t: c.pop("norm_before_residual"), "lacks norm_before_residual"),
    "window": (
        lambda c, t: put(c["transformer_layer_config"], "layer_types", ["sliding_attention"]),
        "attend within a window",
    ),
    "size": (lambda c, t: put(c["transformer_layer_config"], "head_dim", 0), "has an invalid head_dim: 0"),
    "sizes": (lambda c, t: put(c["transformer_layer_config"], "hidden_size", "wide"), "invalid hidden_size: wide"),
    "positions": (
        lambda c, t: put(c["transformer_layer_config"], "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}),
        "config.json",
    ),
    "another_layer": (lambda c, t: put(c["transformer_layer_config"], "model_type", "mamba"), "are of type mamba"),
}


@pytest.mark.parametrize("fault", REFUSED_EAGLE3)
def test_an_eagle3_head_that_does_not_fit_is_refused_with_the_reason_in_one_line(
    target: TargetParts, tmp_path: Path, fault: str
) -> None:
    change, line = REFUSED_EAGLE3[fault]
    with pytest.raises(InvalidRequest) as refused:
        load_head(spec("eagle3", broken(change)(tmp_path)), target)
    assert line in refused.value.message
    assert str(tmp_path) in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.field == "local_draft"


class Intruder:
    """An object that makes a folder when its pickle is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def test_a_pickle_with_other_content_than_weights_is_refused_and_does_not_run(
    target: TargetParts, tmp_path: Path
) -> None:
    marker = tmp_path / "intruded"
    torch.save({"0.0.linear.weight": Intruder(marker)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(InvalidRequest, match="is a pickle with other content than weights, and was not loaded"):
        load_head(spec("medusa", tmp_path), target)
    assert not marker.exists()
    torch.load(tmp_path / "medusa_lm_head.pt", weights_only=False)
    assert marker.exists(), "the pickle is one that runs something"


REFUSED_MEDUSA: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "width": (
        lambda t: put(t, "1.0.linear.weight", torch.zeros(32, 32)),
        "the tensor 1.0.linear.weight has shape [32, 32], and this target and configuration need [64, 64]",
    ),
    "vocabulary": (
        lambda t: put(t, "2.1.weight", torch.zeros(100, 64)),
        "the tensor 2.1.weight has shape [100, 64], and this target and configuration need [256, 64]",
    ),
    "token_map": (
        lambda t: [put(t, "token_map", torch.tensor([3, 250])), put(t, "0.1.weight", torch.zeros(100, 64))],
        "the tensor token_map names row 250 of 100 of 0.1.weight",
    ),
    "no_bias": (lambda t: t.pop("0.0.linear.bias"), "lacks the tensor 0.0.linear.bias"),
    "gap": (lambda t: t.pop("1.0.linear.weight"), "lacks Medusa head 1 of 3"),
    "far_gap": (
        lambda t: put(t, "999999999999.0.linear.weight", torch.zeros(1)),
        "lacks Medusa head 3 of 1000000000000",
    ),
    "none": (lambda t: t.clear(), "has no Medusa head"),
}


@pytest.mark.parametrize("fault", REFUSED_MEDUSA)
def test_medusa_heads_that_do_not_fit_are_refused_in_one_line(target: TargetParts, tmp_path: Path, fault: str) -> None:
    change, line = REFUSED_MEDUSA[fault]
    tensors = medusa_tensors(WIDTH, VOCABULARY_SIZE)
    change(tensors)
    with pytest.raises(InvalidRequest) as refused:
        load_head(spec("medusa", write_medusa(tmp_path, tensors)), target)
    assert line in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(1 << 20, 1 << 20),
        torch.eye(WIDTH).to_sparse(),
        torch.quantize_per_tensor(torch.eye(WIDTH), 0.1, 0, torch.qint8),
    ],
    ids=["larger than its file", "sparse", "quantised"],
)
@pytest.mark.parametrize("name", ["0.0.linear.weight", "of no use"])
def test_a_sparse_quantised_or_truncated_tensor_is_refused_in_one_line(
    target: TargetParts, tmp_path: Path, tensor: torch.Tensor, name: str
) -> None:
    tensors = {**medusa_tensors(WIDTH, VOCABULARY_SIZE), name: tensor}
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    assert (tmp_path / "medusa_lm_head.pt").stat().st_size < 1 << 20
    with pytest.raises(InvalidRequest) as refused:
        load_head(spec("medusa", tmp_path), target)
    assert str(tmp_path) in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "model.safetensors", "config.json"])
def test_a_damaged_file_is_refused_in_one_line(target: TargetParts, tmp_path: Path, name: str) -> None:
    write_medusa(tmp_path, medusa_tensors(WIDTH, VOCABULARY_SIZE))
    (tmp_path / name).write_bytes(b"\x80not what it was" if name != "config.json" else json.dumps([1]).encode())
    with pytest.raises(InvalidRequest) as refused:
        load_head(spec("medusa", tmp_path), target)
    assert str(tmp_path / name) in refused.value.message
    assert "\n" not in refused.value.message


def test_a_path_without_a_head_is_refused_by_name(target: TargetParts, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no weight files"):
        load_head(spec("eagle3", tmp_path), target)
    with pytest.raises(InvalidRequest, match="not a directory on this machine"):
        load_head(spec("eagle3", tmp_path / "nothing"), target)
