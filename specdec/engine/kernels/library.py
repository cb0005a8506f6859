"""Loading of the kernels: a prebuilt library for this kind of processor, else `step.cpp` compiled once on this machine.

A compiled library is kept in a cache directory under a digest of all sources, the compiler and the processor. Without
a prebuilt one the first start on a machine compiles, for ten seconds or more, and a home directory shared by machines
holds one library for each. A kept library that is damaged or that other users could have written is compiled again
(`artifact_cache`). Called by `specdec.engine.loader`; `specdec.engine.logits.kernel_choices` uses the loaded library.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import platform
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from specdec.checkpoints import artifact_cache
from specdec.contract.errors import Unsupported
from specdec.engine.kernels.compiler import (
    compile_library,
    compiler_version,
    find_compiler,
    prebuilt_libraries,
    source_digest,
)

_log = logging.getLogger(__name__)

_ARCHITECTURE = ("-march=native",)


_loaded: list[ctypes.CDLL] = []
_loading = threading.Lock()


def loaded_library() -> ctypes.CDLL | None:
    """Return the kernels for callers to which they are optional; None if this process has not loaded them."""
    return _loaded[-1] if _loaded else None


@functools.cache
def load_library(directory: Path | None) -> ctypes.CDLL:
    """Return the compiled kernels.

    Args:
        directory: cache directory. The library is not kept if this is None or cannot be written.

    Raises:
        Unsupported: there is not a C++ compiler, it cannot compile the kernels, or the library cannot be loaded.
    """
    for path in prebuilt_libraries():
        with contextlib.suppress(OSError):
            return _load(path)
    try:
        with _loading:
            return _load_or_compile(directory)
    except OSError as error:
        raise Unsupported(f"native kernels cannot be compiled or loaded: {error}", field="compile_backend") from error


def load_early(directory: Path) -> None:
    """Begin to load the kernels in a thread, because their compilation takes as long as the import of torch."""

    def load() -> None:
        with contextlib.suppress(Unsupported):  # the loader calls `load_library` again and reports the error
            load_library(directory)

    threading.Thread(target=load, name="kernels", daemon=True).start()


def _load_or_compile(directory: Path | None) -> ctypes.CDLL:
    compiler = find_compiler()
    digest = source_digest(" ".join(_ARCHITECTURE).encode(), compiler_version(compiler), _processor().encode())
    name = f"native-{digest}.so"
    kept = None if directory is None else directory / name
    if kept is None:
        return _compile(compiler, name, kept)
    if library := _load_kept(kept):
        return library
    with _alone(kept.parent):  # replicas that start together compile once
        return _load_kept(kept) or _compile(compiler, name, kept)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, if it can be made; the system releases the lock when this process ends."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            artifact_cache.make_folder(folder)
            opened = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, name: str, kept: Path | None) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="specdec-native-") as temporary:
        built = Path(temporary) / name
        _log.info("compiling native kernels with %s", compiler)
        compile_library(compiler, _ARCHITECTURE, built)
        if kept is not None:
            with contextlib.suppress(OSError):
                artifact_cache.keep(built, kept)
            # Some machines mount the temporary directory without permission to execute.
            if library := _load_kept(kept):
                return library
        return _load(built)  # stays loaded after the file is deleted


def _load_kept(path: Path) -> ctypes.CDLL | None:
    """Return the kept library, or None if it is missing, damaged, writable by other users, or not executable."""
    try:
        return _load(path) if artifact_cache.is_usable(path) else None
    except OSError:
        return None


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for width in (library.specdec_panel, library.specdec_max_queries, library.specdec_group):
        width.restype = number
    library.specdec_fits.argtypes = [number] * 2
    library.specdec_format_of.argtypes, library.specdec_format_of.restype = [number], number
    library.specdec_panel_bytes.argtypes, library.specdec_panel_bytes.restype = [number] * 2, number
    for rows, result in ((library.specdec_pack_blocks, number), (library.specdec_widen_rows, None)):
        rows.argtypes, rows.restype = [number, pointer, number, number, pointer, ctypes.c_int], result
    library.specdec_coupled_choices.argtypes = [pointer, number, number, pointer, pointer, ctypes.c_int]
    library.specdec_coupled_choices.restype = None
    library.specdec_argmax.argtypes = [pointer, number, number, number, pointer, pointer]
    library.specdec_argmax.restype = None
    for rows in (library.specdec_delta_rows, library.specdec_scan_rows):
        rows.argtypes, rows.restype = [pointer, ctypes.c_int], ctypes.c_int
    for steps in (library.specdec_step, library.specdec_multi_step, library.specdec_draft):
        steps.restype = None  # `native_runner` sets their argument types
    _loaded.append(library)
    return library


def _processor() -> str:
    """Return a description of everything that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
