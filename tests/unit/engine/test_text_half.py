"""Checkpoints of models that also read images: what of their files is needed, and which models serve their text.

`tests.integration.test_every_architecture` compares logits and texts of every such type.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from specdec.checkpoints.model_size import ModelSize, model_size
from specdec.checkpoints.preflight import require_kv_room, require_servable
from specdec.contract.errors import InvalidRequest, SpecdecError
from specdec.engine.loader import load_worker
from specdec.engine.model.layer_probe import PROBE_NAME, register_probe
from specdec.engine.model.llama_twin import llama_twin
from specdec.engine.native.native_runner import NativeRunner
from specdec.engine.options import LoadRequest
from tests.support.architecture_rig import TOLERANCE, compare_logits
from tests.support.tiny_architectures import build_tiny_architecture

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A whole checkpoint in files of one half each, and its model."""
    directory = tmp_path_factory.mktemp("qwen3_vl")
    model = build_tiny_architecture("qwen3_vl", directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="200KB")
    return directory, model


@pytest.fixture
def editable(model: tuple[Path, PreTrainedModel], tmp_path: Path) -> Path:
    for file in model[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def files_with(directory: Path, *, other_half: bool) -> list[Path]:
    """Return the files that hold tensors of the other half only, or tensors of the text half only."""
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if {".visual." in name for name in file.keys()} == {other_half}:  # noqa: SIM118
                found.append(path)
    assert found
    return found


def load(directory: Path):
    return load_worker(LoadRequest(str(directory), device="cpu", dtype="float32", num_kv_blocks=16))


def test_files_that_hold_only_the_other_half_are_not_needed(
    model: tuple[Path, PreTrainedModel], editable: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in files_with(editable, other_half=True):
        path.unlink()
    require_servable(str(editable), flag="--target")
    worker = load(editable)
    assert compare_logits(worker, model[1]) < TOLERANCE
    assert isinstance(worker, NativeRunner)
    assert capfd.readouterr().err == ""


def test_a_file_of_the_text_half_is_needed(editable: Path) -> None:
    missing = files_with(editable, other_half=False)[0]
    missing.unlink()
    with pytest.raises(InvalidRequest, match=f"--target: model .* has no {missing.name}, which its {INDEX} names"):
        require_servable(str(editable), flag="--target")
    with pytest.raises(InvalidRequest, match=r"lacks the weight (model\.language_model|lm_head)\."):
        load(editable)


def test_only_the_text_half_is_counted(model: tuple[Path, PreTrainedModel], editable: Path) -> None:
    text = [*model[1].get_decoder().parameters(), *model[1].get_output_embeddings().parameters()]
    num_weights = sum(weight.numel() for weight in set(text))
    config = json.loads((editable / "config.json").read_text())
    for name in ("head_dim", "num_key_value_heads"):  # the type's own are 128 and 32
        del config["text_config"][name]
    for kv_bytes in (2 * 2 * 2 * 2 * 16, 2 * 2 * 2 * 32 * 128):
        assert model_size(str(editable)) == ModelSize(num_weights, False, 2, kv_bytes, 0, hidden_size=64)
        with pytest.raises(InvalidRequest, match=f"--kv must be at least {16 * kv_bytes}, one block"):
            require_kv_room(str(editable), 100, num_ranks=1, flag="--kv")
        (editable / "config.json").write_text(json.dumps(config))


def test_a_text_model_that_reads_the_whole_checkpoint_itself_needs_no_package_for_images(tmp_path: Path) -> None:
    """The whole class of this type needs the package timm."""
    model = build_tiny_architecture("gemma3n_text", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    whole = {re.sub(r"^model\.", "model.language_model.", name): weight for name, weight in weights.items()}
    whole["model.vision_tower.weight"] = torch.full((3,), torch.nan)
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3n", "text_config": text, "eos_token_id": [1, 50]})
    )
    (tmp_path / "generation_config.json").unlink()
    require_servable(str(tmp_path), flag="--target")
    worker = load(tmp_path)
    assert worker.shape.eos_token_ids == (1, 50)
    assert compare_logits(worker, model) < TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("paligemma", "of type paligemma attends in a way this engine does not compute"),
        ("instructblip", "of type instructblip does not run in this engine: TypeError: .* missing 2 required"),
    ],
)
def test_a_model_whose_text_cannot_be_served_is_refused_in_one_line(
    model_type: str, words: str, tmp_path: Path
) -> None:
    build_tiny_architecture(model_type, tmp_path)
    with pytest.raises(SpecdecError, match=words) as refusal:
        load(tmp_path)
    assert "\n" not in refusal.value.message


def half_of(model_type: str, directory: Path, **changes: object) -> PreTrainedModel:
    model = build_tiny_architecture(model_type, directory, **changes)
    register_probe()
    model.set_attn_implementation({"text_config": PROBE_NAME, "": PROBE_NAME})
    return model


@pytest.mark.parametrize(("model_type", "kind"), [("qwen3_vl", Qwen3ForCausalLM), ("qwen2_5_vl", Qwen2ForCausalLM)])
def test_a_decoder_that_is_llama_shaped_under_another_name_is_found(
    model_type: str, kind: type[PreTrainedModel], tmp_path: Path
) -> None:
    half = half_of(model_type, tmp_path)
    twin = llama_twin(half)
    assert type(twin) is kind
    assert twin.model.layers[0].mlp.up_proj.weight is half.get_decoder().layers[0].mlp.up_proj.weight


def scaled_by_position(beta: float) -> dict[str, object]:
    """Return a text configuration with weights like Mistral's, whose queries grow far from the beginning."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": beta, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 256}  # fmt: skip
    return {"text_config": {"model_type": "ministral3", "rope_parameters": rope, "sliding_window": None, **sizes}}


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_a_decoder_that_differs_only_far_from_the_beginning_is_left_as_it_is(beta: float, tmp_path: Path) -> None:
    half = half_of("mistral3", tmp_path, **scaled_by_position(beta))
    assert (llama_twin(half) is half) == (beta > 0)
