"""Packed weights are kept for later starts, which then need neither transformers nor the checkpoint's weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.checkpoints.packed_names import is_packed, packed_folder
from specdec.engine.base import Worker
from specdec.engine.kept_worker import load_kept_worker
from specdec.engine.loader import load_worker
from specdec.engine.native.native_runner import NativeRunner
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.settings.draft_specs import EARLY_EXIT, LocalDraftSpec
from tests.integration.test_compact_weights import logits_of
from tests.support.tiny_models import build_tiny_model


@pytest.fixture
def request_for(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadRequest]:
    """Return a function that makes requests for one tiny model, whose packed weights are kept."""
    directory = build_tiny_model("qwen2", tmp_path / "model", seed=3)
    compiled = tmp_path_factory.getbasetemp() / "compiled"

    def make(dtype: str = "auto", **options: object) -> LoadRequest:
        request = LoadRequest(
            str(directory), device="cpu", dtype=dtype, num_kv_blocks=6, kept_in=tmp_path / "packed",
            compiling=CompileOptions("native", directory=compiled),
        )  # fmt: skip
        return replace(request, **options)  # type: ignore[arg-type]

    return make


def kept_file(request: LoadRequest) -> Path:
    assert request.kept_in is not None
    (path,) = request.kept_in.iterdir()
    return path


def same_logits(worker: Worker, other: Worker) -> bool:
    assert isinstance(worker, NativeRunner)
    assert isinstance(other, NativeRunner)
    return all(map(torch.equal, logits_of(worker), logits_of(other)))


@pytest.mark.parametrize("dtype", ["auto", "float32", "int8"])
def test_a_kept_worker_gives_the_bits_and_the_description_of_the_one_before(
    dtype: str, request_for: Callable[..., LoadRequest]
) -> None:
    request = request_for(dtype)
    assert load_kept_worker(request) is None
    first = load_worker(request)
    later = load_kept_worker(request)
    assert later is not None
    assert later.shape == first.shape
    assert later.multi_step_drafts == first.multi_step_drafts
    assert same_logits(later, first)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list mappings")
def test_tables_are_mapped_from_the_file(request_for: Callable[..., LoadRequest]) -> None:
    request = request_for()
    load_worker(request)
    path = kept_file(request)
    later = load_kept_worker(request)
    assert later is not None
    mappings = Path("/proc/self/maps").read_text().splitlines()
    assert len([line for line in mappings if line.endswith(str(path))]) == 3  # embeddings, cosines, sines


def test_a_kept_worker_imports_no_transformers(request_for: Callable[..., LoadRequest]) -> None:
    request = request_for()
    load_worker(request)
    program = f"""
import sys
sys.modules["transformers"] = None
from pathlib import Path, PosixPath
from specdec.engine.kept_worker import load_kept_worker
from specdec.engine.options import CompileOptions, LoadRequest
request = LoadRequest({request.model!r}, device="cpu", dtype="auto", num_kv_blocks=6, kept_in={request.kept_in!r},
                      compiling=CompileOptions("native", directory={request.compiling.directory!r}))
assert load_kept_worker(request) is not None
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_another_checkpoint_in_the_same_folder_is_not_taken_for_it(request_for: Callable[..., LoadRequest]) -> None:
    request = request_for()
    load_worker(request)
    weights = Path(request.model) / "model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    assert load_kept_worker(request) is None


@pytest.mark.parametrize("kept_bytes", [3, 5_000, -1])
def test_a_file_that_was_cut_off_is_not_used(kept_bytes: int, request_for: Callable[..., LoadRequest]) -> None:
    request = request_for()
    load_worker(request)
    path = kept_file(request)
    path.write_bytes(path.read_bytes()[:kept_bytes])
    assert load_kept_worker(request) is None


def test_damaged_weights_fail_the_self_check_and_are_packed_again(
    request_for: Callable[..., LoadRequest], caplog: pytest.LogCaptureFixture
) -> None:
    request = request_for()
    first = load_worker(request)
    path = kept_file(request)
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half:] = bytes(value ^ 0x41 for value in content[half:])
    path.write_bytes(content)
    assert load_kept_worker(request) is None
    assert "packed weights cannot be used" in caplog.text
    assert same_logits(load_worker(request), first)
    assert load_kept_worker(request) is not None


@pytest.mark.parametrize(
    ("options", "is_kept"),
    [
        pytest.param({"max_context_tokens": 58}, True, id="shorter"),
        pytest.param({"max_context_tokens": 96}, False, id="longer than what was kept"),
        pytest.param({"max_context_tokens": 32}, False, id="shorter than the self-check"),
        pytest.param({"num_kv_blocks": 5}, False, id="too few blocks for the self-check"),
    ],
)
def test_other_limits_are_served_as_far_as_the_file_allows(
    options: dict[str, object], is_kept: bool, request_for: Callable[..., LoadRequest]
) -> None:
    load_worker(request_for(max_context_tokens=64))
    assert (load_kept_worker(request_for(**options)) is not None) == is_kept


def test_a_model_that_was_not_checked_is_not_kept(request_for: Callable[..., LoadRequest]) -> None:
    request = request_for(self_check=False)
    load_worker(request)
    assert load_kept_worker(request) is None


@pytest.mark.parametrize(
    "options",
    [{"kept_in": None}, {"dtype": "bfloat16"}, {"local_drafts": (LocalDraftSpec("exit", EARLY_EXIT, num_layers=1),)}],
    ids=["nowhere", "not native", "with a local draft"],
)
def test_what_cannot_be_kept_is_loaded_as_ever(
    options: dict[str, object], request_for: Callable[..., LoadRequest]
) -> None:
    load_worker(request_for())
    assert load_kept_worker(request_for(**options)) is None


def test_a_folder_that_cannot_be_written_is_only_told(
    tmp_path: Path, request_for: Callable[..., LoadRequest], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").touch()
    load_worker(request_for(kept_in=tmp_path / "a file" / "packed"))
    assert "packed weights are not kept" in caplog.text


def test_files_that_no_start_used_for_a_month_make_room_for_others(request_for: Callable[..., LoadRequest]) -> None:
    request = request_for()
    load_worker(request)
    assert request.kept_in is not None
    unused, used = request.kept_in / "unused.packed", kept_file(request)
    unused.touch()
    for path in (unused, used):
        os.utime(path, (0, 0))
    assert load_kept_worker(request) is not None
    load_worker(request_for("float32"))
    assert used.exists()
    assert not unused.exists()


def test_a_disk_without_room_is_only_told(
    request_for: Callable[..., LoadRequest], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 10))
    request = request_for()
    load_worker(request)
    assert "more than half of the free disk" in caplog.text
    assert load_kept_worker(request) is None


def test_a_start_finds_whether_a_model_was_packed_before(
    request_for: Callable[..., LoadRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    request = request_for(kept_in=packed_folder(os.environ))
    assert not is_packed(request.model, "auto")
    load_worker(request)
    assert is_packed(request.model, "auto")
    assert not is_packed(request.model, "int8")
    assert not is_packed(str(tmp_path / "other"), "auto")
    assert not is_packed("example/hub-id", "auto")
    (Path(request.model) / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert not is_packed(request.model, "auto")
