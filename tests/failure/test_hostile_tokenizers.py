"""Draft replicas started for damaged, hostile or useless tokenizers fail with one line, before a model is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.contract.errors import SpecdecError
from tests.support.other_tokenizers import build_model, load_pair, save_byte_level, save_pieces
from tests.support.tiny_models import save_tokenizer


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    return build_model(save_byte_level(folder / "tokenizer"), folder / "model")


def changed(directory: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Return the SentencePiece tokenizer with a changed file."""
    path = save_pieces(directory) / "tokenizer.json"
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))
    return directory


def set_to(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda settings: settings.__setitem__(name, value)


def replacement(text: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no decoder": set_to("decoder", None),
    "another decoder": set_to("decoder", {"type": "WordPiece", "prefix": "##", "cleanup": True}),
    "a decoder of nothing": set_to("decoder", {"type": "Sequence", "decoders": []}),
    "an unknown decoder": set_to("decoder", {"type": "Mine"}),
    "no model": set_to("model", None),
    "a normalizer that breaks": set_to("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "an empty vocabulary": lambda settings: settings["model"].update(vocab={}, merges=[]),
    "a token of a megabyte": lambda settings: settings["model"]["vocab"].update({"a" * 1_000_000: 700}),
    "a decoder that makes much of little": set_to(
        "decoder", {"type": "Sequence", "decoders": [replacement("e", "e" * 1_000_000), replacement("▁", " ")]}
    ),
    "a decoder that doubles": set_to(
        "decoder", {"type": "Sequence", "decoders": [*[replacement("e", "ee")] * 30, replacement("▁", " ")]}
    ),
    "a decoder that goes on": set_to("decoder", {"type": "Sequence", "decoders": [replacement("▁", " ")] * 100_000}),
    "an id beyond all": lambda settings: settings["model"]["vocab"].update({"▁the": 4_000_000_000}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tokenizer_that_cannot_be_used_is_refused_in_one_line(
    draft: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    target = changed(tmp_path / "target", change)
    for of_draft, of_target in ((draft, target), (target, draft)):
        with pytest.raises(SpecdecError) as refusal:
            load_pair(of_draft, of_target)
        assert len(refusal.value.message.splitlines()) == 1
        assert len(refusal.value.message) < 600


def start_draft(draft: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "draft_service", "--model", str(draft), *flags, "--listen", "127.0.0.1:0",
         "--redis-url", "memory://", "--log-format", "text"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "exit_code", "words"),
    [
        (["words"], 1, "--for-tokenizer: model"),
        (["nowhere"], 1, "--for-tokenizer: model"),
        (["pieces", "--predraft", "on"], 2, "--for-tokenizer does not go with --predraft"),
    ],
)
def test_a_replica_that_cannot_draft_for_a_tokenizer_reports_why_before_loading_a_model(
    draft: Path, tmp_path: Path, flags: list[str], exit_code: int, words: str
) -> None:
    save_tokenizer(tmp_path / "words", 20)
    save_pieces(tmp_path / "pieces")
    ended = start_draft(draft, "--for-tokenizer", str(tmp_path / flags[0]), *flags[1:])
    assert ended.returncode == exit_code
    assert f"error: {words}" in ended.stderr.splitlines()[-1]
    assert "loading weights" not in ended.stderr
    assert "Traceback" not in ended.stderr
