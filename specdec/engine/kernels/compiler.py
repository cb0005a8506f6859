"""Compilation of the kernels in `step.cpp` and its headers, and kernels that are compiled before a replica starts.

    python -m specdec.engine.kernels DIRECTORY    # writes one library for each kind of processor; needs g++
    python -m specdec.engine.kernels --prebuild   # writes the one for this machine where replicas look for it

Prebuilt libraries are found in `prebuilt/` in this folder. An image's build puts all kinds there, and `make setup` the
one of its machine. The kinds differ only in the features that the kernels use: the vector width and the instruction
for products of bytes. Without a prebuilt library `library` compiles for the exact processor and keeps the result.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.checkpoints import artifact_cache
from specdec.contract.errors import Unsupported

_SOURCE = Path(__file__).with_name("step.cpp")
# No -ffast-math: it would let the order of sums depend on their place, and change the rounding mode of the process.
# -ffp-contract=off: otherwise the compiler may fuse products with sums in one instance of a loop and not in another, so
# that a row rounds differently alone and among other rows (GCC for Zen 3 did).
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")
_TIMEOUT_S = 300


def find_compiler() -> str:
    """Return the path of a C++ compiler. Raises Unsupported if there is not one."""
    for name in ("g++", "c++"):  # the kernels use GCC's builtin to shuffle vectors
        if path := shutil.which(name):
            return path
    raise Unsupported(
        "native kernels need a C++ compiler: install g++ or use --compile-backend eager", field="compile_backend"
    )


def compiler_version(compiler: str) -> bytes:
    """Return the output of the compiler's `--version`.

    Raises:
        Unsupported: it does not finish.
        OSError: it cannot be run.
    """
    return _run([compiler, "--version"]).stdout.encode()


def source_digest(*dependencies: bytes) -> str:
    """Return the digest that names a library: 32 hex digits over all sources, the flags and `dependencies`."""
    digest = hashlib.blake2b(digest_size=16)
    sources = [path.read_bytes() for path in sorted(_SOURCE.parent.iterdir()) if path.suffix in (".cpp", ".h")]
    for part in (*sources, " ".join(_FLAGS).encode(), *dependencies):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def compile_library(compiler: str, architecture: Sequence[str], path: Path) -> None:
    """Compile the kernels to `path`; `architecture` holds the compiler's flags for the processor.

    Raises:
        Unsupported: the compilation failed or did not finish.
        OSError: the compiler cannot be run.
    """
    done = _run([compiler, *_FLAGS, *architecture, str(_SOURCE), "-o", str(path)])
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no error message"]
        raise Unsupported(f"{compiler} cannot compile the kernels: {lines[0]}", field="compile_backend")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unsupported(f"{command[0]} did not finish within {_TIMEOUT_S} s", field="compile_backend") from error


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
    return [_write(kind, directory) for kind in _KINDS.get(platform.machine(), ())]


def prebuild_for_this_machine() -> list[Path]:
    """Write the library of the best kind that runs on this machine, in place of any others, and return its path.

    The list is empty if no kind does; then `library` compiles for the processor. Raises as `prebuild`.
    """
    best = next(_kinds_of_this_processor(), None)
    if best is None:
        return []
    path = _write(best, _DIRECTORY)
    for other in _DIRECTORY.glob("*.so"):
        if other != path:
            other.unlink()
    return [path]


def _write(kind: ProcessorKind, directory: Path) -> Path:
    path = directory / kind.file_name
    with tempfile.TemporaryDirectory(prefix="specdec-native-") as temporary:
        built = Path(temporary) / "built.so"
        compile_library(find_compiler(), kind.architecture, built)
        artifact_cache.keep(built, path)
    return path


def prebuilt_libraries(directory: Path = _DIRECTORY) -> Iterator[Path]:
    """Yield the libraries in `directory` that match these sources and run on this processor, best first."""
    if not directory.is_dir():
        return
    for kind in _kinds_of_this_processor():
        if artifact_cache.is_usable(path := directory / kind.file_name):
            yield path


def _kinds_of_this_processor() -> Iterator[ProcessorKind]:
    """Yield the kinds whose libraries run on this processor, best first."""
    features = _processor_features()
    return (kind for kind in _KINDS.get(platform.machine(), ()) if kind.features <= features)


def _processor_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.startswith(("flags", "Features")) for word in line.partition(":")[2].split()}
