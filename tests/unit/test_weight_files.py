"""Detection of incomplete weight files from their headers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file

from specdec.checkpoints.model_size import ModelSize, model_size
from specdec.checkpoints.preflight import require_kv_room, require_servable
from specdec.checkpoints.rank_checks import require_divisible
from specdec.checkpoints.weight_files import require_whole_gguf, require_whole_weights
from specdec.cli.__main__ import run
from specdec.contract.errors import InvalidRequest, SpecdecError, Unsupported

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


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("alignment", [32, 64])
def test_a_complete_gguf_file_passes_and_every_truncated_one_is_refused(
    tmp_path: Path, kind: str, alignment: int
) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_token_list(["a", "\N{GRINNING FACE}", "c"])
    writer.add_token_scores([0.5, 1.5, 2.5])
    writer.add_string("some.text", "x" * 100)
    writer.add_array("some.flags", [True, False])
    for name in ("first", "second"):
        stored = GGMLQuantizationType[kind]
        writer.add_tensor(name, quantize(np.ones((3, 64), np.float32), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    require_whole_gguf(path)
    whole = path.read_bytes()
    for length in range(4, len(whole) - alignment):  # the padding after the last tensor is not needed
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidRequest, match=r"is damaged: it (has \d+ of \d+ bytes|ends within its header)"):
            require_whole_gguf(path)


@pytest.mark.parametrize("byte", range(4, 24))
def test_a_gguf_header_with_an_absurd_number_is_refused_unless_its_version_is_unknown(
    tmp_path: Path, byte: int
) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("first", np.ones((3, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    damaged = bytearray(path.read_bytes())
    damaged[byte] ^= 0xFF
    path.write_bytes(damaged)
    if byte < 8:  # the version field
        require_whole_gguf(path)
        return
    with pytest.raises(InvalidRequest, match="is damaged: "):
        require_whole_gguf(path)


def sized_gguf(path: Path, *, arch: str = "llama", without: str = "", **more: Any) -> Path:
    """Write the header of a model of 2 layers with KV heads of 16 numbers, and 3 tensors of 192 weights each.

    A further key with a dot in front is one of the file and not of its architecture.
    """
    split = {"split_max_tensors": 1} if more.pop("in_parts", False) else {}
    tensors = more.pop("tensors", ("first", "second", "third"))
    writer = GGUFWriter(path, arch, **split)
    keys = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
    for key, number in (keys | more).items():
        if key != without:
            full_key = key.removeprefix(".") if key.startswith(".") else f"{arch}.{key}"
            if isinstance(number, str):
                writer.add_string(full_key, number)
            elif isinstance(number, list):
                writer.add_array(full_key, number)
            elif isinstance(number, bool):
                writer.add_bool(full_key, number)
            else:
                add = writer.add_int32 if number < 0 else writer.add_uint32
                add(full_key, number)
    writer.add_token_list([str(number) for number in range(2000)])
    for name in tensors:
        writer.add_tensor(name, np.ones((3, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_sized_by_its_header_and_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = sized_gguf(tmp_path / "model.gguf")
    assert model_size(str(path)) == ModelSize(576, False, 2, 2 * 2 * 2 * 2 * 16, 0)
    with_mtp = sized_gguf(tmp_path / "mtp.gguf", nextn_predict_layers=1, **{"attention.key_length": 32})
    assert model_size(str(with_mtp)) == ModelSize(576, False, 1, 2 * 2 * 1 * 2 * 32, 1)
    require_kv_room(str(path), 1 << 20, num_ranks=1, flag="--kv-cache-bytes-target")
    with pytest.raises(InvalidRequest, match="--kv-cache-bytes-target must be at least 4096, "):
        require_kv_room(str(path), 100, num_ranks=1, flag="--kv-cache-bytes-target")
    with pytest.raises(InvalidRequest, match="--tensor-parallel 3 does not divide the model's 4 attention heads"):
        require_divisible(str(path), 3)
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_in_parts_is_sized_whole_and_served_only_joined(tmp_path: Path) -> None:
    sized_gguf(tmp_path / "model.gguf", in_parts=True)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    assert [model_size(str(part)).num_parameters for part in (first, second, third)] == [576] * 3
    with pytest.raises(Unsupported, match="one of several parts: join them with llama-gguf-split --merge"):
        require_servable(str(first), flag="--target")
    second.unlink()
    with pytest.raises(InvalidRequest, match=f"has 3 parts, and {second.name} is missing"):
        model_size(str(first))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"arch": "clip", "without": "block_count"}, "holds no language model: its header has no clip.block_count"),
        ({"arch": "bert", "attention.causal": False}, "is an encoder and not a decoder-only language model"),
    ],
)
def test_a_gguf_file_without_a_language_model_is_refused_before_its_conversion(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    path = str(sized_gguf(tmp_path / "model.gguf", **fields))
    for check in (model_size, partial(require_servable, flag="--target")):
        with pytest.raises(SpecdecError, match=words):
            check(path)


def commands_on(path: str) -> list[list[str]]:
    return [["plan", path, "--gpu", "h100", "--rate", "5"], ["up", "--listen", "127.0.0.1:0", "--target", path]]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nextn_predict_layers", "one"),
        ("nextn_predict_layers", 2),
        ("nextn_predict_layers", -1),
        ("block_count", 0),
        ("block_count", -1),
        ("block_count", True),
        ("block_count", "two"),
        ("block_count", 2**32 - 1),
        ("embedding_length", 0),
        ("attention.head_count", 0),
        ("attention.head_count", -4),
        ("attention.head_count", [4, -4]),
        ("attention.head_count_kv", [0, 0]),
        ("attention.key_length", False),
        ("attention.kv_lora_rank", "all"),
        (".split.count", 7),
        (".split.count", True),
    ],
)
def test_an_impossible_size_in_a_gguf_header_is_refused_by_key_and_value(
    tmp_path: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(sized_gguf(tmp_path / "model.gguf", **{key: value}))
    named = key.removeprefix(".") if key.startswith(".") else f"llama.{key}"
    for command in commands_on(path):
        assert run(command, {}) != 0
        *_, line = capsys.readouterr().err.splitlines()  # of up after notes
        assert f"has {named} {value!r}, " in line


def test_sizes_that_differ_by_layer_and_the_count_of_a_joined_file_are_accepted(tmp_path: Path) -> None:
    heads = {"attention.head_count": [4, 4], "attention.head_count_kv": [0, 2]}
    path = sized_gguf(tmp_path / "model.gguf", **heads, **{".split.count": 0})
    assert model_size(str(path)) == ModelSize(576, False, 2, 2 * 2 * 2 * 2 * 16, 0)


def test_a_gguf_file_without_tensors_is_refused_from_its_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(sized_gguf(tmp_path / "model.gguf", tensors=()))
    for command in commands_on(path):
        assert run(command, {}) != 0
        *_, line = capsys.readouterr().err.splitlines()  # of up after notes
        assert "holds no weights: its header lists no tensor" in line
