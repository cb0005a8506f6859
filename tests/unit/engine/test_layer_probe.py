"""Windows and chunks that the probe reads from the masks that a model requests from transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import chunked_causal_mask_function

from specdec.contract.errors import Unsupported
from specdec.engine.model import layer_probe
from specdec.engine.model.layer_probe import PROBE_NAME, ProbedLayer, probe_layers, register_probe
from tests.support.tiny_models import build_tiny_model


def probed_model(directory: Path, architecture: str, **overrides: object) -> PreTrainedModel:
    build_tiny_model(architecture, directory, num_layers=2, context=4096, config_overrides=overrides)
    register_probe()
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation=PROBE_NAME, dtype=torch.bfloat16)


@pytest.mark.parametrize("window", [1, 24, 2047, 4095])
def test_a_window_is_read_exactly_also_in_bfloat16(window: int, tmp_path: Path) -> None:
    model = probed_model(tmp_path, "mistral", sliding_window=window)
    assert [layer.kind.window for layer in probe_layers(model)] == [window, window]


def test_layers_of_two_kinds_keep_their_own_window(tmp_path: Path) -> None:
    model = probed_model(tmp_path, "gemma3", sliding_window=40)
    assert [layer.kind.window for layer in probe_layers(model)] == [40, None]


def test_a_window_that_is_only_an_argument_is_ignored(tmp_path: Path) -> None:
    """A model's own attention uses the mask alone."""
    model = probed_model(tmp_path, "qwen2")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 24
    assert [layer.kind.window for layer in probe_layers(model)] == [None, None]


def probed_with(mask: Callable, monkeypatch: pytest.MonkeyPatch, directory: Path) -> list[ProbedLayer]:
    """Return the layers of a model that asks for this mask."""
    describe = layer_probe._limit_of
    monkeypatch.setattr(layer_probe, "_limit_of", lambda _, tokens, device: describe(mask, tokens, device))
    return probe_layers(probed_model(directory, "mistral"))


@pytest.mark.parametrize("chunk", [1, 40, 2048, 4095])
def test_the_size_of_chunks_is_read_exactly(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    kinds = [layer.kind for layer in probed_with(chunks, monkeypatch, tmp_path)]
    assert [(kind.window, kind.chunk) for kind in kinds] == [(None, chunk)] * 2 if chunk > 1 else [(1, None)] * 2


@pytest.mark.parametrize("shift", [1, 7])
def test_a_mask_that_is_neither_a_window_nor_chunks_is_refused(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shifted = chunked_causal_mask_function(40, torch.full((1,), shift))
    with pytest.raises(Unsupported, match="type mistral masks what its layers see in a way"):
        probed_with(shifted, monkeypatch, tmp_path)
