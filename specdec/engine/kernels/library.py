"""Loads the kernels: those an image brought along for this kind of processor, else `step.cpp` compiled here, once.

What is compiled here is kept in a cache directory under a digest of all sources, the compiler and the processor, so
that only the first start on a machine compiles (a few seconds), and a home shared by machines holds one for each. A
kept library that is damaged or that others could have written is compiled again (`artifact_cache`). Nothing of the
models is known here. Called by `specdec.engine.loader`; what is loaded then serves
`specdec.engine.logits.kernel_choices` too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import platform
import tempfile
from pathlib import Path

from specdec import artifact_cache
from specdec.engine.kernels.compiler import compile_library, compiler_version, find_compiler, source_digest
from specdec.engine.kernels.prebuilt import prebuilt_libraries
from specdec.errors import Unsupported

_log = logging.getLogger(__name__)

_ARCHITECTURE = ("-march=native",)


_loaded: list[ctypes.CDLL] = []


def loaded_library() -> ctypes.CDLL | None:
    """The kernels, for those whom they only make quicker; None where this process has not loaded them."""
    return _loaded[-1] if _loaded else None


@functools.cache
def load_library(directory: Path | None) -> ctypes.CDLL:
    """The compiled kernels.

    Args:
        directory: where they are kept between runs; None, or one that cannot be written: nowhere.

    Raises:
        Unsupported: no C++ compiler on this machine, one that cannot compile them, or nowhere to load them from.
    """
    for path in prebuilt_libraries():
        with contextlib.suppress(OSError):
            return _load(path)
    try:
        return _load_or_compile(directory)
    except OSError as error:
        raise Unsupported(f"native kernels cannot be compiled or loaded: {error}", field="compile_backend") from error


def _load_or_compile(directory: Path | None) -> ctypes.CDLL:
    compiler = find_compiler()
    digest = source_digest(" ".join(_ARCHITECTURE).encode(), compiler_version(compiler), _processor().encode())
    name = f"native-{digest}.so"
    kept = None if directory is None else directory / name
    if kept is not None and (library := _load_kept(kept)):
        return library
    with tempfile.TemporaryDirectory(prefix="specdec-native-") as temporary:
        built = Path(temporary) / name
        _log.info("compiling native kernels with %s", compiler)
        compile_library(compiler, _ARCHITECTURE, built)
        if kept is not None:
            with contextlib.suppress(OSError):
                artifact_cache.keep(built, kept)
            # Some machines execute nothing that lies among the temporary files.
            if library := _load_kept(kept):
                return library
        return _load(built)  # stays loaded when the file is gone


def _load_kept(path: Path) -> ctypes.CDLL | None:
    """The library, or None where there is none that is whole, that nobody else can have written, and that may run."""
    try:
        return _load(path) if artifact_cache.is_usable(path) else None
    except OSError:
        return None


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for width in (library.specdec_panel, library.specdec_max_queries, library.specdec_group):
        width.restype = ctypes.c_int64
    library.specdec_fits.argtypes = [ctypes.c_int64] * 2
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.specdec_coupled_choices.argtypes = [pointer, number, number, pointer, pointer, ctypes.c_int]
    library.specdec_coupled_choices.restype = None
    library.specdec_argmax.argtypes = [pointer, number, number, number, pointer, pointer]
    library.specdec_argmax.restype = None
    for steps in (library.specdec_step, library.specdec_multi_step, library.specdec_draft):
        steps.restype = None  # their arguments are `runner`'s structures
    _loaded.append(library)
    return library


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
