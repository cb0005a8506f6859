"""Detection of incomplete weight files from their headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from specdec.checkpoints.weight_files import require_whole_weights
from specdec.contract.errors import InvalidRequest

TENSORS = {"a": np.ones((3, 5), np.float32), "b": np.ones((7,), np.float16)}
MODEL = "some/model"


def cut(path: Path, length: int) -> Path:
    path.write_bytes(path.read_bytes()[:length])
    return path


def refusal_of(directory: Path) -> str:
    with pytest.raises(InvalidRequest) as refusal:
        require_whole_weights(MODEL, directory)
    assert refusal.value.message.startswith(f"model {MODEL!r} has ")
    assert len(refusal.value.message) < 300
    return refusal.value.message


def test_a_complete_file_passes_and_every_truncated_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    require_whole_weights(MODEL, tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "a damaged model.safetensors" in refusal_of(tmp_path)
    assert f"it has {len(whole) - 1} of {len(whole)} bytes" in refusal_of(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, b"version https://git-lfs.github.com/spec/v1\n", (2).to_bytes(8, "little") + b"[]"],
    ids=["empty", "huge", "git-lfs", "list"],
)
def test_a_file_in_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "a damaged model.safetensors" in refusal_of(tmp_path)


@pytest.mark.parametrize("tensor", [{}, 7, {"data_offsets": 1}, {"data_offsets": [0]}, {"data_offsets": [0, "x"]}])
def test_an_invalid_header_is_refused(tmp_path: Path, tensor: Any) -> None:
    header = json.dumps({"a": tensor}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "its header is unreadable" in refusal_of(tmp_path)


def shards(directory: Path) -> None:
    for number, name in enumerate("ab"):
        save_file({name: TENSORS[name]}, directory / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{number}.safetensors" for number, name in enumerate("ab")}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_every_shard_is_checked_and_no_other_file(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"half")
    require_whole_weights(MODEL, tmp_path)
    cut(tmp_path / "model-1.safetensors", 40)
    assert "a damaged model-1.safetensors" in refusal_of(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    assert "has no model-1.safetensors, which its model.safetensors.index.json names" in refusal_of(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 1}', "[" * 100_000])
def test_an_unreadable_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "an unreadable model.safetensors.index.json" in refusal_of(tmp_path)[:200]
