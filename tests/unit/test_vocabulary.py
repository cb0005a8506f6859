"""The vocabulary of a checkpoint, its fingerprint, and the errors for wrong paths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.checkpoints.locate import checkpoint_fingerprint, locate_checkpoint
from specdec.checkpoints.vocabulary import load_tokenizer, load_vocabulary, vocabulary_fingerprint, vocabulary_size
from specdec.contract.errors import InvalidRequest
from tests.support.tiny_models import build_tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("llama"), vocabulary_size=50)


def test_the_vocabulary_of_a_checkpoint_is_that_of_its_tokenizer(checkpoint: Path) -> None:
    token_to_id = load_vocabulary(checkpoint)
    assert token_to_id["</s>"] == 1
    assert token_to_id["w49"] == 49
    assert vocabulary_size(token_to_id) == 50


def test_the_fingerprint_ignores_order_and_depends_on_every_entry() -> None:
    vocabulary = {"a": 0, "b": 1, "ü": 2}
    assert vocabulary_fingerprint(vocabulary) == vocabulary_fingerprint(dict(reversed(vocabulary.items())))
    others = [{"a": 0, "b": 1}, {"a": 1, "b": 0, "ü": 2}, {"a": 0, "b": 1, "u": 2}, {"ab": 0, "": 1, "ü": 2}]
    assert len({vocabulary_fingerprint(other) for other in [vocabulary, *others]}) == 5


def test_the_size_of_a_vocabulary_with_unused_ids_is_the_largest_id_plus_one() -> None:
    assert vocabulary_size({"a": 0, "b": 7}) == 8


def test_the_vocabulary_includes_special_tokens_only_in_tokenizer_config(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<pad>"}))
    assert load_vocabulary(tmp_path)["<pad>"] == 50


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "~/nowhere", "a/b/c", "", "../nowhere"])
def test_a_missing_path_is_refused_in_one_sentence_without_a_request_to_the_hub(model: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        locate_checkpoint(model)
    assert repr(model) in raised.value.message
    assert "\n" not in raised.value.message
    assert raised.value.field == "model"


def test_a_hub_id_is_refused_in_one_sentence_when_the_hub_is_offline() -> None:
    program = (
        "from specdec.checkpoints.locate import locate_checkpoint\n"
        "from specdec.contract.errors import InvalidRequest\n"
        "try: locate_checkpoint('nobody/nothing')\n"
        "except InvalidRequest as error: print(error.message)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "PATH": "", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert "'nobody/nothing' is neither a directory" in done.stdout
    assert done.stdout.count("\n") == 1


def test_a_directory_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no tokenizer"):
        load_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidRequest, match="unreadable tokenizer") as raised:
        load_vocabulary(tmp_path)
    assert "\n" not in raised.value.message


def test_the_chat_template_of_a_processor_is_read_if_the_tokenizer_has_none(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    assert load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(tmp_path).chat_template == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text("{{ own }}")
    assert load_tokenizer(tmp_path).chat_template == "{{ own }}"
    (tmp_path / "chat_template.jinja").unlink()
    for damaged in ("{", "[]", '{"chat_template": 1}', "{}"):
        (tmp_path / "chat_template.json").write_text(damaged)
        with pytest.raises(InvalidRequest, match=r"unreadable chat_template\.json: it must be a JSON object"):
            load_tokenizer(tmp_path)


def test_the_model_fingerprint_depends_on_weights_and_configuration(checkpoint: Path, tmp_path: Path) -> None:
    same = build_tiny_model("llama", tmp_path / "same", vocabulary_size=50)
    other = build_tiny_model("llama", tmp_path / "other", vocabulary_size=50, seed=1)
    assert checkpoint_fingerprint(same) == checkpoint_fingerprint(checkpoint)
    assert checkpoint_fingerprint(other) != checkpoint_fingerprint(checkpoint)
    assert checkpoint_fingerprint(same, "bfloat16") != checkpoint_fingerprint(checkpoint, "int8")
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert checkpoint_fingerprint(same) != checkpoint_fingerprint(checkpoint)


def test_reading_a_vocabulary_does_not_load_torch(checkpoint: Path) -> None:
    program = (
        "import sys\nfrom specdec.checkpoints.vocabulary import load_tokenizer, load_vocabulary\n"
        f"load_vocabulary({str(checkpoint)!r})\nprint('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
