"""`specdec up` refuses flags that cannot work with one line that names the flag, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.cli.__main__ import run
from specdec.settings import devices
from tests.support.tiny_models import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("llama"), vocabulary_size=50, num_layers=2)


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """Return the exit code and the only error line, which follows the lines about the start."""
    code = run(["up", "--listen", "127.0.0.1:0", *flags], {})
    captured = capsys.readouterr()
    assert captured.out == ""
    *before, line = captured.err.splitlines()
    assert all(other.startswith(("note: ", "starting (")) and "target-0" not in other for other in before), captured.err
    assert line.startswith("error: ")
    return code, line


@pytest.mark.parametrize(
    ("flags", "num_gpus", "words"),
    [
        (["--device", "cuda"], 0, "--device: device 'cuda' is not present on this machine"),
        (["--device", "cuda", "--tensor-parallel", "2"], 0, "--device: device 'cuda' is not present on this machine"),
        (["--device", "cuda", "--tensor-parallel", "4"], 2, "--tensor-parallel 4 needs a GPU for each rank"),
        (["--tensor-parallel-draft", "2"], 1, "--tensor-parallel-draft 2 needs a GPU for each rank"),
        (["--dtype", "int8", "--tensor-parallel", "2"], 0, "--tensor-parallel supports int8 weights on GPUs only"),
        (
            ["--deterministic", "--tensor-parallel", "2"],
            0,
            "--tensor-parallel supports --deterministic on GPUs only",
        ),
        (["--kv-cache-bytes-target", "12"], 0, "--kv-cache-bytes-target must be at least "),
        (["--kv-cache-bytes-draft", "12"], 0, "--kv-cache-bytes-draft must be at least "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_the_machine_or_model_cannot_do_is_refused_with_the_name_of_the_flag(
    flags: list[str], num_gpus: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: num_gpus)
    code, line = refused(capsys, *flags)
    assert code == 1
    assert words in line


def test_a_truncated_model_is_refused_with_both_lengths(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[: size // 2])
    code, line = refused(capsys, "--target", str(tmp_path))
    assert code == 1
    assert (
        f"--target: model {str(tmp_path)!r} has a damaged model.safetensors: it has {size // 2} of {size} bytes" in line
    )


def test_a_truncated_gguf_file_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "half.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes([9, *[0] * 7, 9, *[0] * 7]))
    code, line = refused(capsys, "--target", str(tmp_path / "half.gguf"))
    assert code == 1
    assert "--target: model " in line
    assert "is damaged: it ends within its header" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-context-tokens", "1"], "--max-context-tokens must be greater than or equal to 2"),
        (["--redis-url", "foo"], "--redis-url must begin with redis://, rediss://, redis+sentinel://"),
        (["--kv-tier-url", "memory://"], "--kv-tier-url must begin with redis://"),
        (["--listen", "127.0.0.1:47113", "--metrics", "127.0.0.1:47113"], "--listen is 127.0.0.1:47113"),
        (["--listen", "127.0.0.1:47113", "--metrics", "0.0.0.0:47112"], "takes the ports 47112 to 47114, and --listen"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_flags_that_make_no_sense_are_a_usage_error(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = refused(capsys, *flags)
    assert code == 2
    assert words in line
