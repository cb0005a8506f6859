"""Checkpoints with code, prompts for the user or broken files are refused in one line, and their code never runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.contract.errors import InvalidRequest
from tests.support.process_template import ENVIRON, Streams, start_like
from tests.support.tiny_models import build_tiny_model

INTRUDER = "open({marker!r}, 'w').close()\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("llama"), vocabulary_size=50)


def with_code(checkpoint: Path, directory: Path, model_type: str) -> Path:
    """Return a checkpoint with code beside it that would write a file `intruded`."""
    for file in checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    names = {
        "AutoConfig": "intruder.C", "AutoModelForCausalLM": "intruder.M", "AutoTokenizer": ["intruder.T", "intruder.T"],
    }  # fmt: skip
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        values = json.loads((directory / name).read_text()) | {"auto_map": names}
        if name == "config.json":
            values["model_type"] = model_type
        (directory / name).write_text(json.dumps(values))
    code = INTRUDER.format(marker=str(directory / "intruded"))
    (directory / "intruder.py").write_text(code + "class C: pass\nclass M: pass\nclass T: pass\n")
    return directory


@pytest.mark.parametrize("module", ["target_service", "draft_service", "coordinator"])
@pytest.mark.parametrize("model_type", ["a_type_of_its_own", "llama"])
def test_code_of_a_checkpoint_is_never_run_and_never_prompts(
    checkpoint: Path, tmp_path: Path, module: str, model_type: str
) -> None:
    """The process gets "yes" as input to every question, and asks none."""
    model = with_code(checkpoint, tmp_path, model_type)
    flags = ["--model", str(model)]
    if module == "coordinator":
        flags = ["--tokenizer", str(model), "--target-endpoint", "127.0.0.1:1"]
    log, answers = tmp_path / "log", tmp_path / "answers"
    answers.write_text("y\n" * 20)
    flags += ["--listen", "127.0.0.1:0", "--redis-url", "memory://"]
    with answers.open("rb") as stdin, log.open("wb") as written:
        process = start_like(module, flags, {**os.environ, **ENVIRON}, Streams(stdin, written, written))
    while "listening" not in log.read_text():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            break
    lines = log.read_text().splitlines()
    process.terminate()
    process.wait()
    assert not (tmp_path / "intruded").exists()
    assert "[y/N]" not in "".join(lines)
    if model_type != "llama" and module != "coordinator":
        assert process.returncode == 1
        assert lines[-1].endswith("(UNSUPPORTED)"), lines
        assert "needs custom code" in lines[-1]
    else:
        assert any("listening" in line for line in lines), lines


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


HOSTILE_TOKENIZERS: dict[str, Any] = {
    "brackets": nested(100_000),
    "a number": "5",
    "no merges": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}}',
    "negative ids": '{"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}}',
    "an empty unigram": '{"model": {"type": "Unigram", "vocab": [], "unk_id": 7}}',
}


@pytest.mark.parametrize("name", HOSTILE_TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text(HOSTILE_TOKENIZERS[name])
    with pytest.raises(InvalidRequest) as refusal:
        load_tokenizer(tmp_path)
    assert "\n" not in refusal.value.message
    assert len(refusal.value.message) < 1000


@pytest.mark.parametrize("config", [nested(100_000), '{"added_tokens_decoder": {"x": 1}}'])
def test_a_hostile_tokenizer_config_is_refused_in_one_line(checkpoint: Path, tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(InvalidRequest) as refusal:
        load_tokenizer(tmp_path)
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    "config",
    [nested(100_000), "[]", '{"model_type": ["llama"]}', '{"model_type": "llama", "rope_scaling": 5}',
     '{"model_type": "llama", "hidden_size": "large"}'],
)  # fmt: skip
def test_a_hostile_config_is_refused_in_one_line(checkpoint: Path, tmp_path: Path, config: str) -> None:
    from specdec.contract.errors import SpecdecError
    from specdec.engine.loader import load_worker
    from specdec.engine.options import LoadRequest

    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(SpecdecError) as refusal:
        load_worker(LoadRequest(str(tmp_path), device="cpu", dtype="float32"))
    assert "\n" not in refusal.value.message
