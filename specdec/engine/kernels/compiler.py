"""Compilation of the kernels in `step.cpp` and the headers beside it.

`library` and `prebuilt` choose the processor and keep the result.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

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
