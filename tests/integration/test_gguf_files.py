"""GGUF files as models: the small files that are made from the header, once, and what is refused before a start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from bench.systems.gguf_writing import write_gguf
from bench.systems.models import DEMO
from specdec.checkpoints.gguf.folder import gguf_folder
from specdec.checkpoints.locate import checkpoint_fingerprint, locate_checkpoint
from specdec.checkpoints.model_size import model_size
from specdec.checkpoints.preflight import require_kv_room, require_servable
from specdec.checkpoints.rank_checks import require_divisible
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.cli.__main__ import run
from specdec.contract.errors import InvalidRequest, SpecdecError
from specdec.engine.remote.remote_model import read_model_files

TARGET = DEMO / "target"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specdec" / "gguf"


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(TARGET, tmp_path_factory.mktemp("demo") / "demo.gguf")


def test_a_coordinator_reads_the_tokenizer_of_a_file_without_torch_and_keeps_no_weights(
    demo_file: Path, cache: Path
) -> None:
    program = (
        "import sys\nfrom coordinator.text.tokenizer import ServedTokenizer\n"
        f"tokenizer = ServedTokenizer({str(demo_file)!r})\n"
        "print(tokenizer.fingerprint, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [vocabulary_fingerprint(load_vocabulary(TARGET)), "False"]
    kept = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert 0 < kept < demo_file.stat().st_size / 4


def test_the_small_files_are_those_of_the_checkpoint_that_was_written(demo_file: Path) -> None:
    folder = locate_checkpoint(demo_file)
    own, made = (PreTrainedTokenizerFast.from_pretrained(path) for path in (TARGET, folder))
    assert made.chat_template == own.chat_template
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2]
    assert load_vocabulary(demo_file) == load_vocabulary(TARGET)
    assert read_model_files(str(demo_file)).eos_token_ids == (2,)


def test_processes_that_start_at_once_share_a_folder_and_a_changed_file_gets_another(
    tmp_path: Path, cache: Path
) -> None:
    path = write_gguf(TARGET, tmp_path / "demo.gguf")
    program = f"from specdec.checkpoints.locate import locate_checkpoint\nprint(locate_checkpoint({str(path)!r}))\n"
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate()[0].strip() for process in processes}
    directory = locate_checkpoint(path)
    assert said == {str(directory)}
    before = checkpoint_fingerprint(directory)
    moved = path.rename(tmp_path / "elsewhere.bin")
    assert locate_checkpoint(moved) == directory
    write_gguf(DEMO / "draft", moved)
    assert checkpoint_fingerprint(locate_checkpoint(moved)) != before
    assert not list(cache.rglob("*unfinished*"))


def test_what_killed_processes_left_is_removed_by_the_next_one_unless_it_is_new(demo_file: Path, cache: Path) -> None:
    left, written = cache / ".unfinished-a", cache / ".unfinished-b"
    for folder in (left, written):
        folder.mkdir(mode=0o700, parents=True)
        (folder / "tokenizer.json").touch()
    long_ago = time.time() - 7200
    os.utime(left, (long_ago, long_ago))
    gguf_folder(demo_file)
    assert (left.exists(), written.exists()) == (False, True)


def test_a_cache_that_cannot_be_written_is_named(
    demo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InvalidRequest, match="kept in the folder that XDG_CACHE_HOME names"):
        locate_checkpoint(demo_file)


def test_a_model_that_only_other_engines_run_has_a_tokenizer_and_is_refused_by_ours(tmp_path: Path) -> None:
    path = write_gguf(TARGET, tmp_path / "demo.gguf", metadata={"general.architecture": "rwkv6"})
    assert load_vocabulary(path) == load_vocabulary(TARGET)
    assert read_model_files(str(path)).max_context_tokens is None
    for _ in range(2):  # with and without the folder
        with pytest.raises(SpecdecError, match="rwkv6") as refusal:
            require_servable(str(path), flag="--target")
        assert "--backend llama-cpp" in refusal.value.message


def test_a_folder_without_a_configuration_gets_one_from_a_version_that_knows_the_model(demo_file: Path) -> None:
    config = locate_checkpoint(demo_file) / "config.json"
    content = config.read_text()
    config.unlink()  # an older version knew the tokenizer alone
    assert locate_checkpoint(demo_file) == config.parent
    assert config.read_text() == content
    assert {path.suffix for path in config.parent.iterdir()} <= {".json", ".jinja", ".digest"}


def test_a_file_is_sized_by_its_header(demo_file: Path) -> None:
    size = model_size(str(demo_file))
    assert size == model_size(str(TARGET))
    require_kv_room(str(demo_file), 1 << 30, num_ranks=1, flag="--kv-cache-bytes-target")
    with pytest.raises(InvalidRequest, match="--kv-cache-bytes-target must be at least "):
        require_kv_room(str(demo_file), 100, num_ranks=1, flag="--kv-cache-bytes-target")
    with pytest.raises(InvalidRequest, match="--tensor-parallel 3 does not divide the model's "):
        require_divisible(str(demo_file), 3)


#: Changes of a file, and what every command says of it in one line.
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"llama.block_count": 0}}, "llama.block_count"),
    ({"metadata": {"llama.attention.head_count": 0}}, "llama.attention.head_count"),
    ({"metadata": {"llama.embedding_scale": 12.0}}, "llama.embedding_scale"),
    ({"metadata": {"llama.a.key.of.tomorrow": 7}}, "llama.a.key.of.tomorrow"),
    ({"metadata": {"split.count": 3}}, "split.count"),
    ({"left_out": "blk.5.ffn_up.weight"}, "blk.5.ffn_up.weight"),
    ({"extra_tensors": {"blk.0.attn_sinks.weight": np.ones(8, np.float32)}}, "blk.0.attn_sinks.weight"),
    ({"extra_tensors": {"output_norm.weight": np.ones(7, np.float32)}}, "output_norm.weight"),
]


@pytest.mark.parametrize(("fault", "named"), FAULTS, ids=[named for _, named in FAULTS])
def test_a_file_that_would_be_read_wrongly_is_refused_by_name_before_a_start(
    fault: dict[str, Any], named: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_gguf(TARGET, tmp_path / "demo.gguf", **fault))
    for command in (
        ["plan", path, "--gpu", "h100", "--rate", "5"],
        ["up", "--listen", "127.0.0.1:0", "--target", path],
    ):
        assert run(command, {}) != 0
        *_, line = capsys.readouterr().err.splitlines()  # of up after notes
        assert named in line
        assert path in line
    assert not list(cache.glob("*/config.json"))


def test_a_damaged_file_is_refused_in_one_line(demo_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    whole = demo_file.read_bytes()
    for damaged, told in ((whole[: len(whole) // 2], "bytes; was the download cut short"), (b"GG", "not a GGUF file")):
        path.write_bytes(damaged)
        with pytest.raises(InvalidRequest, match=told) as refusal:
            locate_checkpoint(path)
        assert "\n" not in refusal.value.message


def test_a_file_in_parts_is_served_whole_and_refused_if_a_part_is_missing(tmp_path: Path) -> None:
    write_gguf(TARGET, tmp_path / "demo.gguf", tensors_in_part=40)
    first, second = sorted(tmp_path.glob("*.gguf"))
    require_servable(str(first), flag="--target")
    assert model_size(str(second)) == model_size(str(TARGET))
    second.unlink()
    with pytest.raises(InvalidRequest, match=f"has 2 parts, and {second.name} is missing"):
        require_servable(str(first), flag="--target")
