"""Headers and tensors of GGUF files: what is read, and what is refused by file, key or tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize

from specdec.checkpoints.gguf.file import KINDS, GgufFile
from specdec.contract.errors import InvalidRequest, SpecdecError

#: Bytes before the metadata: magic, version, number of tensors, number of keys.
HEADER_BYTES = 24


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(path: Path, kind: str = "F32", alignment: int = 32, *, in_parts: bool = False) -> Path:
    """Write a file with keys of all types and two tensors of 192 weights each."""
    writer = GGUFWriter(path, "llama", **({"split_max_tensors": 1} if in_parts else {}))
    writer.add_custom_alignment(alignment)
    writer.add_token_list(["a", "\N{GRINNING FACE}", "c"])
    writer.add_token_scores([0.5, 1.5, 2.5])
    writer.add_string("some.text", "x" * 100)
    writer.add_array("some.flags", [True, False])
    writer.add_block_count(7)
    stored = GGMLQuantizationType[kind]
    for at, name in enumerate(("first", "second")):
        writer.add_tensor(name, quantize(np.full((3, 64), 1 + at, np.float32), stored), raw_dtype=stored)
    finish(writer)
    return path


def refusal_of(path: Path) -> str:
    with pytest.raises(SpecdecError) as refusal:
        GgufFile(path)
    assert "\n" not in refusal.value.message
    return refusal.value.message


def test_the_metadata_and_the_tensors_are_those_of_llama_cpps_own_reader(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "Q8_0", 64)
    file, theirs = GgufFile(path), GGUFReader(path)
    assert file.strings("tokenizer.ggml.tokens") == ["a", "\N{GRINNING FACE}", "c"]
    assert file.metadata["tokenizer.ggml.scores"] == [0.5, 1.5, 2.5]
    assert file.metadata["some.text"] == "x" * 100
    assert file.metadata["some.flags"] == [True, False]
    assert (file.architecture, file.of_model("block_count"), file.of_model("other")) == ("llama", 7, None)
    assert (file.num_weights, file.num_bytes, file.num_parts) == (384, path.stat().st_size, 1)
    for tensor in theirs.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.shape, KINDS[ours.kind].name) == ((3, 64), "Q8_0")
        assert np.array_equal(ours.data, tensor.data)


@pytest.mark.parametrize(("kind", "alignment"), [("F32", 32), ("Q4_0", 64)])
def test_a_complete_file_passes_and_every_truncated_one_is_refused(tmp_path: Path, kind: str, alignment: int) -> None:
    path = write(tmp_path / "model.gguf", kind, alignment)
    GgufFile(path)
    whole = path.read_bytes()
    for length in range(HEADER_BYTES, len(whole) - alignment):  # the padding after the last tensor is not needed
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidRequest, match=r"is damaged: it (has \d+ of \d+ bytes|ends within its header)"):
            GgufFile(path)


@pytest.mark.parametrize("byte", range(4, HEADER_BYTES))
def test_an_absurd_number_at_the_beginning_is_refused(tmp_path: Path, byte: int) -> None:
    path = write(tmp_path / "model.gguf")
    damaged = bytearray(path.read_bytes())
    damaged[byte] ^= 0xFF
    path.write_bytes(damaged)
    assert ("of the GGUF format" if byte < 8 else "is damaged: ") in refusal_of(path)


def test_a_key_and_a_tensor_that_are_there_twice_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.scores"))
    assert "the key 'tokenizer.ggml.scores' is there twice" in refusal_of(path)
    writer = GGUFWriter(path, "llama")
    for name in ("first", "other"):
        writer.add_tensor(name, np.ones((3, 64), np.float32))
    finish(writer)
    path.write_bytes(path.read_bytes().replace(b"other", b"first"))
    assert "tensor 'first' is there twice" in refusal_of(path)


def test_a_quantisation_of_next_year_is_refused_with_its_tensor_and_the_engine_that_may_know_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("first", np.ones((3, 64), np.float32))
    finish(writer)
    whole = bytearray(path.read_bytes())
    kind_at = whole.index(b"first") + len(b"first") + 4 + 2 * 8
    whole[kind_at] = 77
    path.write_bytes(whole)
    said = refusal_of(path)
    assert "tensor 'first' is stored as type 77" in said
    assert "--backend llama-cpp" in said


def test_a_row_that_fills_no_whole_blocks_is_refused_with_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("first", np.ones((3, 40), np.float32))
    finish(writer)
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"first") + len(b"first") + 4 + 2 * 8] = 8
    path.write_bytes(whole)
    assert "tensor 'first' has the shape (3, 40), whose rows must be whole blocks of 32" in refusal_of(path)


def test_the_parts_of_a_file_are_read_together_whichever_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", in_parts=True)
    parts = sorted(tmp_path.glob("*.gguf"))
    for part in parts:
        file = GgufFile(part)
        assert sorted(file.tensors) == ["first", "second"]
        assert file.strings("tokenizer.ggml.tokens") == ["a", "\N{GRINNING FACE}", "c"]
        assert file.num_bytes == sum(each.stat().st_size for each in parts)
    parts[1].write_bytes(parts[0].read_bytes())
    assert f"{parts[1].name} has split.no 0 instead of 1" in refusal_of(parts[0])
    parts[1].unlink()
    assert f"has 2 parts, and {parts[1].name} is missing" in refusal_of(parts[0])
    alone = parts[0].rename(tmp_path / "alone.gguf")
    assert "split.count is 2, and by its name it has 1 parts" in refusal_of(alone)


def test_parts_of_two_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", in_parts=True)
    first, second = sorted(tmp_path.glob("*.gguf"))
    whole = second.read_bytes()
    number_at = whole.index(b"split.no") + len(b"split.no") + 4
    second.write_bytes(whole[:number_at] + b"\x07" + whole[number_at + 1 :])
    assert f"{second.name} has split.no 7 instead of 1" in refusal_of(first)


def test_a_name_that_counts_wrongly_is_that_of_a_whole_file(tmp_path: Path) -> None:
    for name in ("model-00001-of-00000.gguf", "model-00005-of-00001.gguf"):
        assert GgufFile(write(tmp_path / name)).num_parts == 1


def test_lists_and_strings_of_absurd_lengths_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    whole = path.read_bytes()
    list_at = whole.index(b"some.flags") + len(b"some.flags") + 8
    path.write_bytes(whole[:list_at] + (1 << 40).to_bytes(8, "little") + whole[list_at + 8 :])
    assert "'some.flags' is a list of 1099511627776 values" in refusal_of(path)
    token_at = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 16
    path.write_bytes(whole[:token_at] + (1 << 63).to_bytes(8, "little") + whole[token_at + 8 :])
    assert "is damaged: " in refusal_of(path)
