"""When native kernels are compiled, where they are kept, and which prebuilt ones are loaded."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from specdec.contract.errors import Unsupported
from specdec.engine.kernels.compiler import prebuilt_libraries
from specdec.engine.kernels.library import load_library
from tests.integration.test_native_kernels import ROOT, compile_with, directory, hide_prebuilt, load, piece, run
from tests.support.choice_checks import check_coupled_choices

__all__ = ["directory"]


def test_without_a_compiler_auto_warns_and_native_stops(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide_prebuilt(monkeypatch)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unsupported, match="C\\+\\+ compiler"):
        load(directory, kept_in=tmp_path)
    with caplog.at_level(logging.WARNING):
        assert len(run(load(directory, backend="auto", kept_in=tmp_path), piece(1, 0, 3))) == 3
    assert "C++ compiler" in caplog.text


def test_a_compiler_that_does_not_run_counts_as_missing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "g++").write_text("not a program")
    (tmp_path / "g++").chmod(0o755)
    hide_prebuilt(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match="cannot be compiled"):
        load(directory, kept_in=tmp_path / "kept")
    assert len(run(load(directory, backend="auto", kept_in=tmp_path / "kept"), piece(1, 0, 3))) == 3


LOADING = (
    "import sys; from pathlib import Path\n"
    "from specdec.engine.kernels.library import load_library\n"
    "assert load_library(Path(sys.argv[1])).specdec_panel() > 0\n"
)


@pytest.fixture
def quick_compiler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that does not optimise, for tests of when kernels are compiled and where they are kept."""
    compile_with("-O0", tmp_path_factory.mktemp("compiler"), monkeypatch)


HIDING = "from specdec.engine.kernels import library; library.prebuilt_libraries = lambda: iter(())\n"


def load_in_another_process(kept_in: Path) -> Path:
    subprocess.run([sys.executable, "-c", HIDING + LOADING, str(kept_in)], check=True)
    (kept,) = kept_in.iterdir()
    return kept


@pytest.mark.usefixtures("quick_compiler")
def test_a_second_process_uses_the_compiled_kernels_unless_others_may_write_them(tmp_path: Path) -> None:
    kept = load_in_another_process(tmp_path)
    before = kept.stat()
    load_in_another_process(tmp_path)
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    kept.chmod(0o666)
    load_in_another_process(tmp_path)
    assert kept.stat().st_ino != before.st_ino
    assert kept.stat().st_mode & 0o022 == 0


@pytest.mark.full
@pytest.mark.usefixtures("quick_compiler")
def test_kept_kernels_that_are_damaged_are_compiled_again(tmp_path: Path) -> None:
    kept = load_in_another_process(tmp_path)
    whole = kept.read_bytes()
    for damaged in (b"", b"nonsense", whole[: len(whole) // 2], whole[:-1]):
        kept.write_bytes(damaged)
        load_in_another_process(tmp_path)
        assert len(kept.read_bytes()) > len(whole) // 2


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_a_directory_that_cannot_be_written_compiles_for_one_process(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert len(run(load(directory, kept_in=tmp_path / "file" / "below"), piece(1, 0, 3))) == 3


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the package as in an image, with prebuilt kernels."""
    package = tmp_path_factory.mktemp("image") / "specdec"
    shutil.copytree(ROOT / "specdec", package, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    prebuilt = package / "engine" / "kernels" / "prebuilt"
    subprocess.run([sys.executable, "-m", "specdec.engine.kernels", str(prebuilt)], check=True, cwd=ROOT)
    return package


def load_without_compiler(carried: Path, kept_in: Path) -> subprocess.CompletedProcess[str]:
    """Load the kernels of that package in another process with an empty PATH."""
    environ = os.environ | {"PYTHONPATH": str(carried.parent), "PATH": ""}
    command = [sys.executable, "-c", LOADING, str(kept_in)]
    return subprocess.run(command, env=environ, cwd=carried.parent, capture_output=True, text=True)


@pytest.mark.full  # compiles for three kinds of processors
def test_prebuilt_kernels_need_neither_compiler_nor_cache(carried: Path, tmp_path: Path) -> None:
    done = load_without_compiler(carried, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.parametrize("harm", ["damaged", "of another source", "written by others"])
def test_prebuilt_kernels_that_do_not_match_are_not_loaded(carried: Path, tmp_path: Path, harm: str) -> None:
    package = tmp_path / "specdec"
    shutil.copytree(carried, package)
    for library in (package / "engine" / "kernels" / "prebuilt").iterdir():
        if harm == "damaged":
            library.write_bytes(library.read_bytes()[:-1])
        elif harm == "written by others":
            library.chmod(0o777)
    if harm == "of another source":
        with (package / "engine" / "kernels" / "step.cpp").open("a") as source:
            source.write("// changed\n")
    done = load_without_compiler(package, tmp_path / "kept")
    assert "C++ compiler" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_all_kinds_of_prebuilt_kernels_that_run_here_compute_the_same(
    directory: Path, carried: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = list(prebuilt_libraries(carried / "engine" / "kernels" / "prebuilt"))
    assert libraries
    expected = run(load(directory, dtype=dtype), piece(1, 0, 3))
    for path in libraries:
        monkeypatch.setattr("specdec.engine.kernels.library.prebuilt_libraries", partial(iter, [path]))
        load_library.cache_clear()
        torch.testing.assert_close(run(load(directory, dtype=dtype), piece(1, 0, 3)), expected, atol=2e-4, rtol=2e-4)
        check_coupled_choices()
    load_library.cache_clear()
