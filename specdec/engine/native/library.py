"""Compiles `step.cpp` and the headers beside it for this machine, once, and loads the library.

The library is kept in a cache directory under a digest of all sources, the compiler and the processor, so that
only the first start on a machine compiles (a few seconds), and a home shared by machines holds one for each. A kept
library ends with a digest of itself, and one that is damaged or that others could have written is compiled again.
Nothing of the models is known here. Called by `specdec.engine.native.runner`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from specdec.errors import Unsupported

_SOURCE = Path(__file__).with_name("step.cpp")
# No -ffast-math: it would let the order of sums depend on their place, and change how the process rounds.
# -ffp-contract=off: the compiler would fuse products with sums in one instance of a loop and not in another, and a row
# in company would round otherwise than alone (GCC for Zen 3 did).
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared"]
_TIMEOUT_S = 300
_SEAL_BYTES = 16


@functools.cache
def load_library(directory: Path | None) -> ctypes.CDLL:
    """The compiled kernels.

    Args:
        directory: where they are kept between runs; None, or one that cannot be written: nowhere.

    Raises:
        Unsupported: no C++ compiler on this machine, one that cannot compile them, or nowhere to load them from.
    """
    try:
        return _load_or_compile(directory)
    except OSError as error:
        raise Unsupported(f"native kernels cannot be compiled or loaded: {error}", field="compile_backend") from error


def _load_or_compile(directory: Path | None) -> ctypes.CDLL:
    compiler = _find_compiler()
    name = f"native-{_digest(compiler)}.so"
    kept = None if directory is None else directory / name
    if kept is not None and (library := _load_kept(kept)):
        return library
    with tempfile.TemporaryDirectory(prefix="specdec-native-") as temporary:
        built = Path(temporary) / name
        _compile(compiler, built)
        if kept is not None:
            with contextlib.suppress(OSError):
                _keep(built, kept)
            # Some machines execute nothing that lies among the temporary files.
            if library := _load_kept(kept):
                return library
        return _load(built)  # stays loaded when the file is gone


def _load_kept(path: Path) -> ctypes.CDLL | None:
    """The library, or None where there is none that is whole, that nobody else can have written, and that may run."""
    try:
        status = path.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None
        content = path.read_bytes()
        # Damaged machine code would be run: a file cut short ends the process when its missing pages are touched.
        return _load(path) if content[-_SEAL_BYTES:] == _seal(content[:-_SEAL_BYTES]) else None
    except OSError:
        return None


def _keep(built: Path, path: Path) -> None:
    """Renamed into place, so that two processes that start at once both find a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".native-", dir=path.parent) as unfinished:
        copy = Path(unfinished) / path.name
        content = built.read_bytes()
        copy.write_bytes(content + _seal(content))
        copy.chmod(0o755)
        copy.replace(path)


def _seal(content: bytes) -> bytes:
    """What follows a library in its file; loaders look at what headers name."""
    return hashlib.blake2b(content, digest_size=_SEAL_BYTES).digest()


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for width in (library.specdec_panel, library.specdec_max_queries, library.specdec_group):
        width.restype = ctypes.c_int64
    library.specdec_fits.argtypes = [ctypes.c_int64] * 2
    library.specdec_step.restype = None  # its arguments are `runner`'s structures
    return library


def _find_compiler() -> str:
    for name in ("g++", "c++"):  # GCC: the kernels shuffle vectors by its builtin
        if path := shutil.which(name):
            return path
    raise Unsupported("native kernels need a C++ compiler (g++) on the PATH", field="compile_backend")


def _digest(compiler: str) -> str:
    version = _run([compiler, "--version"]).stdout
    digest = hashlib.blake2b(digest_size=16)
    sources = [path.read_bytes() for path in sorted(_SOURCE.parent.iterdir()) if path.suffix in (".cpp", ".h")]
    for part in (*sources, " ".join(_FLAGS).encode(), version.encode(), _processor().encode()):
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
    done = _run([compiler, *_FLAGS, str(_SOURCE), "-o", str(path)])
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason given"]
        raise Unsupported(f"{compiler} cannot compile the kernels: {lines[0]}", field="compile_backend")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unsupported(f"{command[0]} took over {_TIMEOUT_S} s", field="compile_backend") from error
