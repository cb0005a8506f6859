"""Drafts of every kind whose file is missing, damaged, of the wrong shape or a pickle end the start with one line.

Each service's own entry point runs with real files. A pickle with other content than weights is refused without running
it; it would make a folder. `tests/unit/engine/test_draft_heads` has every fault of a head's file.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import draft_service.__main__ as draft_main
import target_service.__main__ as target_main
from tests.support.head_checkpoints import (
    as_speculators,
    eagle3_config,
    eagle3_tensors,
    medusa_tensors,
    write_eagle3,
    write_medusa,
)
from tests.support.other_tokenizers import build_model, save_byte_level, save_pieces
from tests.support.tiny_models import build_tiny_model

WIDTH, VOCABULARY = 64, 96


class Intruder:
    """An object that makes a folder when its pickle is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("target"), vocabulary_size=VOCABULARY, num_layers=3)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Restore the logging configuration of the test process, which a service changes."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def intruder(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save({"0.0.linear.weight": Intruder(folder / "intruded")}, folder / name)
    return folder


def half(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def adapter(folder: Path, width: int) -> str:
    save_file({"weight": torch.eye(width), "bias": torch.zeros(width)}, folder / "adapter.safetensors")
    return f"early-exit:2:{folder}"


def eagle3(folder: Path, *, speculators: bool, width: int = WIDTH) -> Path:
    config = eagle3_config(width, VOCABULARY, VOCABULARY)
    tensors = eagle3_tensors(config)
    return write_eagle3(folder / "head", as_speculators(config, [1, 2, 3]) if speculators else config, tensors)


def without(folder: Path, name: str) -> Path:
    path = folder / "model.safetensors"
    save_file({key: tensor for key, tensor in load_file(path).items() if not key.endswith(name)}, path)
    return folder


def pickled_eagle3(folder: Path) -> Path:
    eagle3(folder, speculators=False)
    (folder / "head" / "model.safetensors").unlink()
    torch.save({"fc.weight": Intruder(folder / "intruded")}, folder / "head" / "pytorch_model.bin")
    return folder / "head"


#: Local drafts of a target, and a part of the error that refuses them.
LOCAL: dict[str, tuple[Callable[[Path], str], str]] = {
    "an early exit that is not there": (lambda folder: "early-exit:3", "early-exit:3"),
    "an adapter that is not there": (lambda folder: f"early-exit:2:{folder}/none", "none"),
    "an adapter of another width": (lambda folder: adapter(folder, 32), "'weight': (32, 32)"),
    "half an adapter": (
        lambda folder: f"{adapter(folder, WIDTH)[:13]}{half(folder / 'adapter.safetensors')}",
        "adapter.safetensors",
    ),
    "a pickled adapter": (
        lambda folder: f"early-exit:2:{intruder(folder, 'adapter.safetensors')}/adapter.safetensors",
        "adapter.safetensors",
    ),
    "Medusa heads that are not there": (lambda folder: f"medusa:{folder}/none", "none"),
    "no Medusa heads in a folder": (lambda folder: f"medusa:{folder}", "no"),
    "Medusa heads of another width": (
        lambda folder: f"medusa:{write_medusa(folder, medusa_tensors(32, VOCABULARY))}",
        "[32, 32]",
    ),
    "Medusa heads of another vocabulary": (
        lambda folder: f"medusa:{write_medusa(folder, medusa_tensors(WIDTH, 40))}",
        "[40, 64]",
    ),
    "half Medusa heads": (
        lambda folder: (
            f"medusa:{half(write_medusa(folder, medusa_tensors(WIDTH, VOCABULARY)) / 'medusa_lm_head.pt').parent}"
        ),
        "medusa_lm_head.pt",
    ),
    "pickled Medusa heads": (lambda folder: f"medusa:{intruder(folder, 'medusa_lm_head.pt')}", "was not loaded"),
    "an EAGLE-3 head that is not there": (lambda folder: f"eagle3:{folder}/none", "none"),
    "an EAGLE-3 head for another target": (
        lambda folder: f"eagle3:{eagle3(folder, speculators=True, width=32)}",
        "[64, 96]",
    ),
    "an EAGLE-3 head without a tensor": (
        lambda folder: f"eagle3:{without(eagle3(folder, speculators=True), 'lm_head.weight')}",
        "lm_head.weight",
    ),
    "an original EAGLE-3 head without a tensor": (
        lambda folder: f"eagle3:{without(eagle3(folder, speculators=False), 'fc.weight')}",
        "",
    ),
    "half an EAGLE-3 head": (
        lambda folder: f"eagle3:{half(eagle3(folder, speculators=True) / 'model.safetensors').parent}",
        "model.safetensors",
    ),
    "a pickled EAGLE-3 head": (lambda folder: f"eagle3:{pickled_eagle3(folder)}", "was not loaded"),
    "no MTP layer": (lambda folder: "mtp", "MTP"),
    "what is no kind": (lambda folder: "rnn:3", "rnn"),
}


def refusal(main: Callable[[list[str]], int], flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line in which a start is refused."""
    common = ["--listen", "127.0.0.1:0", "--redis-url", "memory://", "--dtype", "float32", "--device", "cpu"]
    capsys.readouterr()
    try:
        exit_code = main([*flags, *common])
    except SystemExit as ended:
        exit_code = int(str(ended.code))
    captured = capsys.readouterr()
    assert exit_code in (1, 2)
    assert "listening" not in captured.out + captured.err
    assert "Traceback" not in captured.out + captured.err
    lines = [line for line in captured.err.splitlines() if "error: " in line]
    assert len(lines) == 1, captured.err
    assert len(lines[0]) < 800
    return lines[0]


@pytest.mark.parametrize("fault", LOCAL)
def test_a_local_draft_that_does_not_fit_is_refused_in_one_line_at_start(
    target: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write, words = LOCAL[fault]
    line = refusal(target_main.main, ["--model", str(target), "--local-draft", write(tmp_path)], capsys)
    assert words in line
    assert not list(tmp_path.rglob("intruded"))


def copy_of(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / "model"))


def wider(model: Path) -> Path:
    path = model / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file(tensors | {name: torch.zeros(32, 32)}, path, metadata={"format": "pt"})
    return model


def pickled(model: Path) -> Path:
    (model / "model.safetensors").unlink()
    return intruder(model, "pytorch_model.bin")


def of_another_vocabulary(model: Path) -> Path:
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": 32}
    (model / "config.json").write_text(json.dumps(config))
    return model


#: Changes to a draft model's files, and a part of the error that refuses it.
MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing there": (lambda model: model / "none", "none"),
    "no weights": (lambda model: (model / "model.safetensors").unlink() or model, ""),
    "half its weights": (lambda model: half(model / "model.safetensors").parent, ""),
    "a tensor of the wrong shape": (wider, "q_proj.weight has shape [32, 32], and its configuration needs [64, 64]"),
    "another vocabulary than its weights": (of_another_vocabulary, "32"),
    "a pickle": (pickled, ""),
    "no configuration": (lambda model: (model / "config.json").unlink() or model, ""),
}


@pytest.mark.parametrize("fault", MODELS)
def test_a_draft_model_that_cannot_be_served_is_refused_in_one_line_at_start(
    target: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = MODELS[fault]
    line = refusal(draft_main.main, ["--model", str(change(copy_of(target, tmp_path)))], capsys)
    assert words in line
    assert not list(tmp_path.rglob("intruded"))


@pytest.mark.full
@pytest.mark.parametrize("fault", MODELS)
def test_an_unusable_draft_model_with_another_tokenizer_is_refused_in_one_line_at_start(
    tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = save_pieces(tmp_path / "pieces")
    model = build_model(save_byte_level(tmp_path / "bytes"), tmp_path / "model")
    change, words = MODELS[fault]
    line = refusal(draft_main.main, ["--model", str(change(model)), "--for-tokenizer", str(pieces)], capsys)
    assert words in line
    assert not list(tmp_path.rglob("intruded"))
