"""Compiles `step.cpp` for this machine, once, and loads it.

The library is kept in a cache directory under a digest of its source, the compiler and the processor, so that
only the first start on a machine compiles (a few seconds), and a home shared by machines holds one for each. Nothing of
the models is known here. Called by `specdec.engine.native.runner`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from specdec.errors import Unsupported

_SOURCE = Path(__file__).with_name("step.cpp")
# No -ffast-math: it would let the order of sums depend on their place, and change how the process rounds.
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"]
_TIMEOUT_S = 300


@functools.cache
def load_library(directory: Path | None) -> ctypes.CDLL:
    """The compiled kernels.

    Args:
        directory: where they are kept between runs; None, or one that cannot be written: nowhere.

    Raises:
        Unsupported: no C++ compiler on this machine, or one that cannot compile them.
    """
    compiler = _find_compiler()
    name = f"native-{_digest(compiler)}.so"
    if directory is not None and ((directory / name).exists() or _may_write(directory)):
        if not (directory / name).exists():
            _compile(compiler, directory / name)
        return _load(directory / name)
    try:
        with tempfile.TemporaryDirectory(prefix="specdec-native-") as temporary:
            _compile(compiler, Path(temporary) / name)
            return _load(Path(temporary) / name)  # stays loaded when the file is gone
    except OSError as error:
        raise Unsupported(
            f"native kernels have no directory to be kept in: {error}", field="compile_backend"
        ) from error


def _may_write(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.specdec_panel.restype = library.specdec_max_queries.restype = ctypes.c_int64
    library.specdec_fits.argtypes = [ctypes.c_int64] * 2
    library.specdec_step.restype = None  # its arguments are `runner`'s structures
    return library


def _find_compiler() -> str:
    for name in ("g++", "c++"):  # GCC: the kernels shuffle vectors by its builtin
        if path := shutil.which(name):
            return path
    raise Unsupported("native kernels need a C++ compiler (g++) on the PATH", field="compile_backend")


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    digest = hashlib.blake2b(digest_size=16)
    for part in (_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), version, _processor().encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(compiler: str, path: Path) -> None:
    # Renamed into place, so that two processes that start at once both find a whole file.
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so") as file:
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", file.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise Unsupported(f"{compiler} took over {_TIMEOUT_S} s", field="compile_backend") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason given"]
            raise Unsupported(f"{compiler} cannot compile the kernels: {lines[0]}", field="compile_backend")
        os.link(file.name, temporary := f"{file.name}.done")
    os.replace(temporary, path)
