"""Step graphs compiled by inductor, as files that outlive the process.

A package is one row count of one model for one kind of processor: machine code with the weights in it, laid out as its
kernels read them. Packages are named by a digest of all that they depend on, so nothing is ever stale; a directory may
be shared by processes, and emptied at any time. One that is damaged or that others could have written is compiled again
(`artifact_cache`), and those unused for longest go when all of them take too much room. Not here: which row counts,
and what runs eagerly (`engine.compiled.steps`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import io
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from specdec import artifact_cache
from specdec.engine.compiled import step_graph
from specdec.engine.compiled.step_graph import StepGraph
from specdec.engine.model import int8_projection
from specdec.engine.model.kv_cache import KvCache
from specdec.errors import InvalidRequest

#: Fewest context blocks that a graph takes: compilers treat a dimension of 1 as a shape of its own.
MIN_BLOCKS = 2
#: Most; no context is longer, and a compiler's arithmetic wants a bound.
MAX_BLOCKS = 1 << 16

#: Of packages in a directory, in bytes: twice what one process may have (`engine.compiled.steps`).
MAX_KEPT_BYTES = 8 << 30

_MAX_POOL_BLOCKS = 1 << 30
# The context that kernels are chosen for.
_TYPICAL_BLOCKS = 16

StepInputs = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]


class StepFunction(Protocol):
    """`engine.compiled.step_graph.StepGraph.forward` at one row count."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        block_ids: list[torch.Tensor],
        pools: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def example_inputs(num_rows: int, num_kinds: int, cache: KvCache) -> StepInputs:
    """Arguments of the shape a step has; what they hold means nothing."""
    device = cache.layers[0].blocks.device
    blocks = [torch.zeros(_TYPICAL_BLOCKS, dtype=torch.int64, device=device) for _ in range(num_kinds)]
    positions = torch.arange(num_rows, device=device)
    return torch.zeros_like(positions), positions, blocks, [layer.blocks for layer in cache.layers]


@dataclass(frozen=True, slots=True)
class PackageKey:
    """What a package depends on besides its rows, this machine and this code."""

    model_fingerprint: str
    dtype: str
    is_tuned: bool

    def digest(self, num_rows: int) -> str:
        """32 hex digits."""
        parts = (
            *(self.model_fingerprint, self.dtype, self.is_tuned, num_rows),
            # Kernels are compiled for a number of threads.
            *(torch.__version__, torch.get_num_threads(), _processor()),
            *(inspect.getsource(module) for module in (step_graph, int8_projection)),
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


class PackageStore:
    """Packages in a directory, `MAX_KEPT_BYTES` of them at most."""

    def __init__(self, directory: Path) -> None:
        """Opens a directory, made if absent.

        Raises:
            InvalidRequest: it cannot be made, or others could put their files in it.
        """
        self._directory = directory
        try:
            artifact_cache.make_folder(directory)
        except OSError as error:
            raise _unkept(directory, error) from error

    def load(self, key: PackageKey, num_rows: int) -> StepFunction | None:
        """The package, or None where there is none that is whole and that nobody else can have written."""
        path = self._path(key, num_rows)
        if not artifact_cache.is_usable(path):
            return None
        artifact_cache.note_use(path)
        return _PackagedStep(path)

    def build(self, key: PackageKey, num_rows: int, graph: StepGraph, cache: KvCache) -> StepFunction:
        """Compiles a package, keeps it and loads it; waits where another process is at it.

        Raises:
            InvalidRequest: nothing can be written in the directory.
        """
        path = self._path(key, num_rows)
        with self._locked(path):
            built = self.load(key, num_rows)
            if built is not None:  # meanwhile, by a replica that started beside this one
                return built
            with tempfile.TemporaryDirectory() as scratch:
                package = Path(scratch) / path.name
                inputs = example_inputs(num_rows, graph.num_kinds, cache)
                _compile(graph, inputs, package, is_tuned=key.is_tuned)
                artifact_cache.keep(package, path)
        step = _PackagedStep(path)
        artifact_cache.prune(self._directory, "*.pt2", max_bytes=MAX_KEPT_BYTES)
        return step

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """For one process at a time."""
        lock_path = path.with_suffix(".lock")
        try:
            lock = lock_path.open("w")
        except OSError as error:
            raise _unkept(self._directory, error) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
            lock_path.unlink(missing_ok=True)

    def _path(self, key: PackageKey, num_rows: int) -> Path:
        return self._directory / f"{key.digest(num_rows)}.pt2"


class _PackagedStep:
    """A `StepFunction` loaded from a package."""

    def __init__(self, path: Path) -> None:
        from torch._inductor import aoti_load_package

        # It is unpacked among the temporary files, 100 MB at times, and a process that ends at once would leave them
        # there. Once mapped, they need no name.
        with tempfile.TemporaryDirectory() as unpacked, _temporary_files_in(unpacked):
            self._package = aoti_load_package(str(path))

    def __call__(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        block_ids: list[torch.Tensor],
        pools: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Past the package's own call, which parses the structure of its arguments anew each time.
        logits, kv_rows = self._package.loader.run([token_ids, position_ids, *block_ids, *pools])
        return logits, kv_rows


def _unkept(directory: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(
        f"compiled graphs cannot be kept in {directory}: {error.strerror}; set XDG_CACHE_HOME", field="compile_backend"
    )


def _compile(graph: StepGraph, inputs: StepInputs, package: Path, *, is_tuned: bool) -> None:
    """Writes a package; the compiler's own files go beside it."""
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.utils import fresh_cache

    with torch.no_grad():
        exported = _export(graph, inputs)
        # The compiler writes statistics to stderr whatever its settings.
        with fresh_cache(dir=str(package.parent)), contextlib.redirect_stderr(io.StringIO()):
            aoti_compile_and_package(exported, package_path=str(package), inductor_configs=_settings(is_tuned))


def _export(graph: StepGraph, inputs: StepInputs) -> torch.export.ExportedProgram:
    """The graph with contexts and pools of any length."""
    num_blocks = torch.export.Dim("num_blocks", min=2, max=_MAX_POOL_BLOCKS)
    contexts = [
        {0: torch.export.Dim(f"context_{kind}", min=MIN_BLOCKS, max=MAX_BLOCKS)} for kind in range(graph.num_kinds)
    ]
    shapes: tuple[object, ...] = ({}, {}, contexts, [{0: num_blocks} for _ in inputs[3]])
    return torch.export.export(graph, inputs, dynamic_shapes=shapes, strict=False)


def _settings(is_tuned: bool) -> dict[str, object]:
    settings: dict[str, object] = {"freezing": True}
    if is_tuned:
        settings |= {
            "max_autotune": True,
            "max_autotune_gemm_backends": "CPP,ATEN",
            "autotune_num_choices_displayed": 0,
        }
    return settings


def _processor() -> str:
    """What machine code depends on: compilers take every instruction that this processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"


@contextlib.contextmanager
def _temporary_files_in(directory: str) -> Iterator[None]:
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = directory
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
