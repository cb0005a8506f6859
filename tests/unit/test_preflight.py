"""Checks of checkpoints before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from specdec.checkpoints.cross_vocabulary.pair_preflight import require_servable_pair
from specdec.checkpoints.preflight import require_servable
from specdec.checkpoints.transformers_tables import default_sizes, known_types
from specdec.contract.errors import InvalidRequest, SpecdecError, Unsupported, VocabularyMismatch
from tests.support.tiny_models import build_tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("llama"), vocabulary_size=50, num_layers=1)


def copied(checkpoint: Path, directory: Path, **config: Any) -> Path:
    """Copy a checkpoint and change values of its configuration."""
    directory.mkdir(exist_ok=True)
    for file in checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    values = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def without(name: str) -> Callable[[Path], Path]:
    def remove(folder: Path) -> Path:
        (folder / name).unlink()
        return folder

    return remove


def with_text(name: str, text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder

    return write


def with_config(**values: Any) -> Callable[[Path], Path]:
    return lambda folder: copied(folder, folder, **values)


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda folder: folder / "nowhere", InvalidRequest, "is not a directory"),
        (with_config(quantization_config={"quant_method": "aqlm"}), Unsupported, "is quantised with aqlm; the own"),
        (lambda folder: folder / "model.safetensors", InvalidRequest, "is a file but not a GGUF file"),
        (without("config.json"), InvalidRequest, "has no config.json"),
        (without("tokenizer.json"), InvalidRequest, "has no tokenizer.json"),
        (without("model.safetensors"), InvalidRequest, "has no weights"),
        (with_text("config.json", "{"), InvalidRequest, "unreadable config.json"),
        (with_text("config.json", "[" * 100_000), InvalidRequest, "unreadable config.json"),
        (with_text("config.json", "[]"), InvalidRequest, "has no model_type"),
        (with_text("config.json", '{"model_type": ["llama"]}'), InvalidRequest, "has no model_type"),
        (with_config(model_type="bert", architectures=["BertModel"]), Unsupported, "of type bert, which is an encoder"),
        (with_config(model_type="t5", is_encoder_decoder=True), Unsupported, "of type t5, which is not a supported"),
        (with_config(model_type="bart", is_encoder_decoder=True), Unsupported, "of type bart, which is an encoder"),
        (with_config(model_type="llama9"), Unsupported, "of type llama9, which is not a supported decoder-only"),
        (with_config(model_type="own", auto_map={}), Unsupported, "needs custom code, which is never run"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused_in_one_line_that_names_the_flag(
    checkpoint: Path,
    tmp_path: Path,
    damage: Callable[[Path], Path],
    error: type[SpecdecError],
    words: str,
) -> None:
    model = damage(copied(checkpoint, tmp_path / "copy"))
    with pytest.raises(error) as refusal:
        require_servable(str(model), flag="--draft")
    assert refusal.value.message.startswith("--draft: model ")
    assert words in refusal.value.message
    assert str(model) in refusal.value.message
    assert len(refusal.value.message) < 500


@pytest.mark.parametrize("config", [{}, {"model_type": "bert", "is_decoder": True}, {"model_type": "gemma3_text"}])
def test_a_decoder_passes(checkpoint: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    require_servable(str(copied(checkpoint, tmp_path / "copy", **config)), flag="--model")


def test_the_known_model_types_equal_those_of_transformers() -> None:
    types = known_types()
    assert types.causal == modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert types.masked == modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
    assert types.image | types.multimodal == modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_vl_text", "llama4_text"])
def test_the_default_sizes_of_a_type_equal_those_of_transformers(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    sizes = default_sizes(model_type)
    assert sizes == {name: getattr(config, name) for name in sizes}
    assert len(sizes) >= 5
    assert default_sizes("llama9") == {}


def test_a_pair_of_two_vocabularies_is_refused_with_both_fingerprints(checkpoint: Path, tmp_path: Path) -> None:
    other = build_tiny_model("llama", tmp_path / "other", vocabulary_size=40, num_layers=1)
    with pytest.raises(VocabularyMismatch) as refusal:
        require_servable_pair({"--target": str(checkpoint), "--draft": str(other)})
    assert f"--target {str(checkpoint)!r} has 50 tokens, fingerprint " in refusal.value.message
    assert f"--draft {str(other)!r} has 40 tokens, fingerprint " in refusal.value.message


def test_a_special_token_only_in_tokenizer_config_changes_the_vocabulary(checkpoint: Path, tmp_path: Path) -> None:
    other = copied(checkpoint, tmp_path / "copy")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<pad>"}))
    with pytest.raises(VocabularyMismatch):
        require_servable_pair({"--target": str(checkpoint), "--draft": str(other)})


def test_other_differences_between_tokenizer_files_do_not_change_the_vocabulary(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = copied(checkpoint, tmp_path / "copy")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 7}))
    require_servable_pair({"--target": str(checkpoint), "--draft": str(other)})


def test_a_system_without_a_model_of_its_own_has_no_pair_to_check() -> None:
    assert require_servable_pair({}) == ""


def test_the_error_for_an_unreadable_tokenizer_names_the_flag(checkpoint: Path, tmp_path: Path) -> None:
    other = with_text("tokenizer.json", "{")(copied(checkpoint, tmp_path / "copy"))
    with pytest.raises(InvalidRequest, match=r"--draft: model .* has an unreadable tokenizer"):
        require_servable_pair({"--target": str(checkpoint), "--draft": str(other)})


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_service_refuses_an_encoder_before_it_loads_torch(checkpoint: Path, tmp_path: Path, role: str) -> None:
    model = copied(checkpoint, tmp_path / "copy", model_type="bert")
    program = f"""
        import sys
        from {role}_service.__main__ import main
        code = main(["--model", {str(model)!r}, "--listen", "127.0.0.1:0", "--redis-url", "memory://"])
        print(code, "torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --model: model ")


def test_checking_a_pair_with_one_tokenizer_loads_neither_torch_nor_transformers(checkpoint: Path) -> None:
    program = f"""
        import sys
        from specdec.checkpoints.cross_vocabulary.pair_preflight import require_servable_pair
        require_servable_pair({{"--target": {str(checkpoint)!r}, "--draft": {str(checkpoint)!r}}})
        print({{"torch", "transformers"}} & sys.modules.keys())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
