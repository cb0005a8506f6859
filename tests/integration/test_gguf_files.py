"""GGUF files as models: taken directly, converted once, number by number what the file holds, or refused by name."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import set_tqdm_hook

from bench.systems.gguf_writing import write_gguf
from bench.systems.models import DEMO
from specdec.checkpoints import gguf_convert
from specdec.checkpoints.gguf_numbers import NotConverted
from specdec.checkpoints.locate import checkpoint_fingerprint, locate_checkpoint
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.contract.errors import InvalidRequest, SpecdecError
from specdec.engine.remote.remote_model import read_model_files

TARGET = DEMO / "target"
ODD_TEXTS = [
    "def f(x):\n    return x  # 12 345", "x  12", "e\u0301 \U0001f468\u200d\U0001f469",
    "\u2581 \xa0\t\r\n", "<|user|>a<|eos|>", "",
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specdec" / "gguf"


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(TARGET, tmp_path_factory.mktemp("demo") / "demo.gguf")


@dataclass(frozen=True)
class TokenizerUse:
    """A process in a terminal that needed the tokenizer of the demo file alone."""

    stdout: str
    in_terminal: bytes
    cache: Path


@pytest.fixture(scope="module")
def tokenizer_use(demo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenizerUse:
    program = (
        "import sys\nfrom coordinator.text.tokenizer import ServedTokenizer\n"
        f"tokenizer = ServedTokenizer({str(demo_file)!r})\n"
        "print(tokenizer.fingerprint, 'torch' in sys.modules)\n"
    )
    home = tmp_path_factory.mktemp("cache")
    environ = {**os.environ, "TERM": "xterm", "XDG_CACHE_HOME": str(home)}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=theirs, env=environ, text=True
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux reports the end of the other side as an error
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    stdout, _ = process.communicate()
    assert process.returncode == 0
    return TokenizerUse(stdout, shown, home / "specdec" / "gguf")


@pytest.fixture
def convert(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Returns the child's part of a conversion, in this process: what it writes does not depend on the process."""

    def convert(path: Path, *, tokenizer_only: bool = False) -> Path:
        gguf_convert.convert(path, tmp_path / "converted", tokenizer_only=tokenizer_only)
        return tmp_path / "converted"

    yield convert
    set_tqdm_hook(None)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()


def stored_dtype(directory: Path) -> str:
    return json.loads((directory / "config.json").read_text())["dtype"]


def test_a_gguf_file_becomes_the_checkpoint_it_was_written_from_and_its_progress_is_reported(
    demo_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="specdec.checkpoints.gguf.conversion"):
        directory = locate_checkpoint(demo_file)
    expected = weights(TARGET)
    assert {name: torch.equal(tensor, expected[name]) for name, tensor in weights(directory).items()} == dict.fromkeys(
        expected, True
    )
    assert load_vocabulary(directory) == load_vocabulary(TARGET)
    own, converted = (PreTrainedTokenizerFast.from_pretrained(path) for path in (TARGET, directory))
    assert [converted.encode(text) for text in ODD_TEXTS] == [own.encode(text) for text in ODD_TEXTS]
    assert converted.chat_template == own.chat_template
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2]

    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("converting demo.gguf")]
    assert lines[0] == "converting demo.gguf [##------------------] 10%"
    assert lines[-1] == "converting demo.gguf [################----] 80%"
    shares = [int(line.rpartition(" ")[2].removesuffix("%")) for line in lines]
    assert shares == sorted(set(shares))
    assert len(shares) > 4


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")])
def test_weights_are_kept_in_the_narrowest_dtype_that_rounds_none(
    tmp_path: Path, convert: Callable[..., Path], kind: str, dtype: str
) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    # As in the files of models that were trained in bfloat16: vectors too have that many digits.
    source = tmp_path / "source"
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16 if kind == "BF16" else torch.float16)
    model.save_pretrained(source)
    PreTrainedTokenizerFast.from_pretrained(TARGET).save_pretrained(source)
    path = write_gguf(source, tmp_path / "demo.gguf", kind)
    directory = convert(path)
    assert stored_dtype(directory) == dtype
    held = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}
    converted = weights(directory)
    for name, stored in (("model.embed_tokens", "token_embd"), ("model.layers.3.mlp.up_proj", "blk.3.ffn_up")):
        assert np.array_equal(converted[f"{name}.weight"].numpy(), held[f"{stored}.weight"])


def test_a_conversion_shows_a_bar_in_a_terminal(tokenizer_use: TokenizerUse) -> None:
    assert b"converting demo.gguf" in tokenizer_use.in_terminal
    assert b" %" in tokenizer_use.in_terminal


@pytest.mark.full
def test_a_file_is_converted_once_by_processes_that_start_at_once_and_again_when_it_has_changed(
    tmp_path: Path, cache: Path
) -> None:
    path = write_gguf(TARGET, tmp_path / "demo.gguf")
    program = (
        "import logging, sys\nlogging.basicConfig(level='INFO', format='%(message)s')\n"
        f"from specdec.checkpoints.locate import locate_checkpoint\nprint(locate_checkpoint({str(path)!r}))\n"
    )
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate() for process in processes]
    assert len({out for out, _ in said}) == 1
    assert sorted("converting" in err for _, err in said) == [False, False, True]
    directory = locate_checkpoint(path)
    assert str(directory) == said[0][0].strip()
    before = checkpoint_fingerprint(directory)
    moved = path.rename(tmp_path / "elsewhere.bin")
    assert locate_checkpoint(moved) == directory
    write_gguf(DEMO / "draft", moved)
    assert checkpoint_fingerprint(locate_checkpoint(moved)) != before
    assert not list(cache.rglob("*unfinished*"))


def test_what_needs_the_tokenizer_alone_converts_no_weights_and_loads_no_torch(tokenizer_use: TokenizerUse) -> None:
    assert tokenizer_use.stdout.split() == [vocabulary_fingerprint(load_vocabulary(TARGET)), "False"]
    assert list(tokenizer_use.cache.rglob("tokenizer.json"))
    assert not list(tokenizer_use.cache.rglob("*.safetensors"))


#: Has the process that converts stop once it has a folder, so that the signal comes in time on any machine.
STUCK_CONVERSION = """
import os, sys, time
def makedirs(path, *args, _original=os.makedirs, **kwargs):
    _original(path, *args, **kwargs)
    if str(path).endswith(".unfinished"):
        time.sleep(3600)
if "specdec.checkpoints.gguf_convert" in sys.orig_argv:
    os.makedirs = makedirs
"""


# SIGTERM ends a plain process without a last word, as SIGKILL does.
@pytest.mark.parametrize(
    "ended_by", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGKILL]
)
def test_an_interrupted_conversion_leaves_nothing(
    demo_file: Path, cache: Path, tmp_path: Path, ended_by: signal.Signals
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK_CONVERSION)
    program = (  # a job in the background ignores SIGINT, and with it what it starts
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"from specdec.checkpoints.locate import locate_checkpoint; locate_checkpoint({str(demo_file)!r})"
    )
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL, env=environ)
    while process.poll() is None and not list(cache.glob("*/model.unfinished")):
        time.sleep(0.001)
    process.send_signal(ended_by)
    assert process.wait() != 0
    while list(cache.glob("*/*.unfinished")):  # the child ends after its parent
        time.sleep(0.01)
    assert not list(cache.glob("*/model"))


def test_what_killed_conversions_left_is_removed_by_the_next_use_unless_it_is_still_written(
    demo_file: Path, tokenizer_use: TokenizerUse, cache: Path
) -> None:
    shutil.copytree(tokenizer_use.cache, cache)
    left, written = cache / "a" / "model.unfinished", cache / "b" / "model.unfinished"
    for folder in (left, written):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    with (cache / "b" / "model.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        locate_checkpoint(demo_file, small_files_only=True)
        assert (left.exists(), written.exists()) == (False, True)


def test_a_server_that_reads_the_file_itself_is_told_its_end_tokens(
    demo_file: Path, tokenizer_use: TokenizerUse, cache: Path
) -> None:
    """Only the tokenizer is converted then."""
    shutil.copytree(tokenizer_use.cache, cache)
    assert read_model_files(str(demo_file)).eos_token_ids == (2,)
    assert not list(cache.rglob("*.safetensors"))


def test_without_the_packages_that_read_it_the_extra_is_told_that_installs_them(demo_file: Path) -> None:
    program = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'gguf' else found(name, package)\n"
        "from coordinator.__main__ import main\nsys.exit(main())"
    )
    flags = ["--tokenizer", str(demo_file), "--redis-url", "memory://", "--target-endpoint", "127.0.0.1:1"]
    done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    told = (
        f"error: reading {str(demo_file)!r} needs gguf, which this installation lacks: run pip install "
        '"specdec-serving[gguf]" (INVALID_REQUEST)'
    )
    assert done.stderr.splitlines()[-1] == told


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"extra_tensors": {"rope_freqs.weight": np.arange(1, 17, dtype=np.float32)}}, "unsupported RoPE scaling"),
    ({"metadata": {"llama.rope.scaling.type": "linear"}}, "unsupported RoPE scaling"),
    ({"extra_tensors": {"blk.0.attn_q.bias": np.ones(256, np.float32)}}, "of which transformers reads"),
    ({"left_out": "blk.5.ffn_up.weight"}, "lacks the weight model.layers.5.mlp.up_proj.weight (1 in all)"),
    ({"metadata": {"split.count": 3}}, "join them with llama-gguf-split"),
    ({"metadata": {"general.architecture": "rwkv6"}}, "of an unsupported type: rwkv6"),
]


@pytest.mark.parametrize(("fault", "told"), FAULTS)
def test_a_file_that_would_be_read_wrongly_is_not_converted(
    tmp_path: Path, convert: Callable[..., Path], fault: dict[str, Any], told: str
) -> None:
    with pytest.raises(NotConverted) as refusal:
        convert(write_gguf(TARGET, tmp_path / "demo.gguf", **fault))
    assert told in str(refusal.value)


def test_a_file_that_is_not_converted_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(TARGET, tmp_path / "demo.gguf", metadata={"llama.embedding_scale": 12.0})
    with pytest.raises(SpecdecError) as refusal:
        locate_checkpoint(path)
    assert refusal.value.reason == "UNSUPPORTED"
    assert refusal.value.message.startswith(repr(str(path)))
    assert "uses an unsupported number: llama.embedding_scale = 12.0, for a model of" in refusal.value.message
    assert not list(cache.rglob("*.json"))


def test_the_scaled_positions_of_llama_3_are_recovered_from_their_divisors(
    tmp_path: Path, convert: Callable[..., Path]
) -> None:
    """Transformers' own rotary frequencies are the oracle."""
    source = tmp_path / "source"
    source.mkdir()
    for file in TARGET.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    (source / "config.json").write_text(json.dumps(config | {"rope_parameters": scaling}))
    frequencies = AutoModelForCausalLM.from_pretrained(source).model.rotary_emb.inv_freq
    plain = 500000.0 ** (-torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies))
    divisors = (plain / frequencies).float().numpy()
    directory = convert(write_gguf(source, tmp_path / "demo.gguf", extra_tensors={"rope_freqs.weight": divisors}))
    assert json.loads((directory / "config.json").read_text())["rope_parameters"] == pytest.approx(scaling)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(directory).model.rotary_emb.inv_freq, frequencies)


def test_a_damaged_file_is_refused_in_one_line(demo_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    path.write_bytes(demo_file.read_bytes()[:40])
    with pytest.raises(InvalidRequest) as refusal:
        locate_checkpoint(path)
    assert "\n" not in refusal.value.message
    path.write_bytes(b"GG")
    with pytest.raises(InvalidRequest, match="not a GGUF file"):
        locate_checkpoint(path)


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[: len(whole) // 2], lambda whole: b"GGUF" + b"\xff" * 500], ids=["cut", "garbage"]
)
def test_the_conversion_of_a_damaged_file_ends_with_one_error(
    demo_file: Path,
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "demo.gguf"
    path.write_bytes(damage(demo_file.read_bytes()))
    monkeypatch.setattr(sys, "argv", ["gguf_convert", str(path), str(tmp_path / "converted")])
    assert gguf_convert.main() == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["error"].startswith("cannot be read: ")


def test_digits_stay_alone_where_the_files_merges_were_learned_so(tmp_path: Path, convert: Callable[..., Path]) -> None:
    """Blanks before a digit are one token then, as everywhere else, and not half of them the digit's."""
    path = write_gguf(TARGET, tmp_path / "demo.gguf", metadata={"tokenizer.ggml.pre": "smollm"})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(convert(path, tokenizer_only=True))
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2"])
def test_a_text_begins_with_a_space_only_if_the_file_does_not_say_otherwise(
    tmp_path: Path, convert: Callable[..., Path], architecture: str
) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    for has_prefix in (True, False):
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0] * len(pieces))
        writer.add_token_types([2, 3, 3, *[6] * 256, 1, 1, 1])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if not has_prefix:
            writer.add_add_space_prefix(False)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(convert(tmp_path / "model.gguf", tokenizer_only=True))
        wanted = ["\u2581a", "\u2581a"] if has_prefix and architecture != "gemma2" else ["a", "\u2581a"]
        token_ids = tokenizer.encode("a a", add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(token_ids) == wanted
        assert tokenizer.decode(token_ids) == "a a"


def test_the_token_that_ends_a_turn_in_the_files_own_template_ends_its_answers(
    tmp_path: Path, convert: Callable[..., Path]
) -> None:
    template = "{% for m in messages %}{{ m['content'] + '<|end|>' }}{% endfor %}"
    source = tmp_path / "source"
    source.mkdir()
    for file in TARGET.iterdir():
        text = (
            file.read_bytes() if file.suffix == ".safetensors" else file.read_bytes().replace(b"<|user|>", b"<|end|>")
        )
        (source / file.name).write_bytes(text)
    (source / "chat_template.jinja").write_text(template)
    directory = convert(write_gguf(source, tmp_path / "demo.gguf"))
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2, 4]
