"""Prebuilt kernels, one library for each kind of processor, for images without a compiler.

    python -m specdec.engine.kernels DIRECTORY    # writes them; needs g++

They are found in `prebuilt/` beside this file, where an image's build puts them; a checkout has none. The kinds differ
only in the features that the kernels use: the vector width and the instruction for products of bytes. `library`
compiles for the exact processor instead. Called by `library` and `__main__`.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specdec.checkpoints import artifact_cache
from specdec.engine.kernels.compiler import compile_library, find_compiler, source_digest

_DIRECTORY = Path(__file__).with_name("prebuilt")


@dataclass(frozen=True, slots=True)
class ProcessorKind:
    """A set of processors that run the same library."""

    architecture: tuple[str, ...]
    """Compiler flags."""
    features: frozenset[str]
    """Words in Linux's /proc/cpuinfo that every processor of the kind has."""

    @property
    def file_name(self) -> str:
        words = [flag.removeprefix("-m").removeprefix("arch=") for flag in self.architecture]
        return f"{'-'.join(words)}-{source_digest(' '.join(self.architecture).encode())}.so"


_AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Best kind first.
_KINDS = {
    "x86_64": (
        ProcessorKind(("-march=x86-64-v4", "-mavx512vnni"), _AVX512 | {"avx512_vnni"}),
        ProcessorKind(("-march=x86-64-v4",), _AVX512),
        ProcessorKind(("-march=x86-64-v3",), _AVX2),
    ),
    "aarch64": (ProcessorKind(("-march=armv8-a",), frozenset()),),
}


def prebuild(directory: Path) -> list[Path]:
    """Write the libraries of all kinds of this machine's architecture, and return their paths.

    Raises:
        Unsupported: there is not a compiler, or it cannot compile the kernels.
        OSError: the libraries cannot be written.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="specdec-native-") as temporary:
        built = Path(temporary) / "built.so"
        paths = []
        for kind in _KINDS.get(platform.machine(), ()):
            compile_library(compiler, kind.architecture, built)
            paths.append(directory / kind.file_name)
            artifact_cache.keep(built, paths[-1])
    return paths


def prebuilt_libraries(directory: Path = _DIRECTORY) -> Iterator[Path]:
    """Yield the libraries in `directory` that match these sources and run on this processor, best first."""
    if not directory.is_dir():
        return
    features = _processor_features()
    for kind in _KINDS.get(platform.machine(), ()):
        if kind.features <= features and artifact_cache.is_usable(path := directory / kind.file_name):
            yield path


def _processor_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.startswith(("flags", "Features")) for word in line.partition(":")[2].split()}
