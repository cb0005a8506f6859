"""How a model's steps are to be carried out (`--compile-backend`), and what every way of doing it needs of the model.

Not here: any of the ways (`engine.torch_compile`, `engine.cuda_graphs`, `engine.native`), nor which one a model
gets (`engine.loader`). Called by all of those and by the services' entry points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.errors import InvalidRequest

#: PyTorch's operations one by one.
EAGER = "eager"
#: Kernels of our own (`engine.native`).
NATIVE = "native"
#: CUDA graphs of steps (`engine.cuda_graphs.steps`).
CUDA_GRAPHS = "cuda-graphs"
#: Native on a CPU and captured on a GPU where they take the model, eager elsewhere.
AUTO = "auto"

#: Attention of captured steps by our own kernels, over block tables (`engine.cuda_graphs.paged_attention`).
PAGED = "paged"
#: The same over copies of whole contexts, with PyTorch's own.
GATHERED = "gathered"

#: Products of linear layers by our own kernel, recorded or not (`engine.linear.row_products`).
ROWS = "rows"

_BUILT_IN = (AUTO, NATIVE, CUDA_GRAPHS, EAGER)

# Rows of the graphs: a draft step has 1 or 2, a verification gamma + 1.
_ROW_COUNTS = (1, 2, 3, 5, 9, 17)

#: Turns a step over fixed buffers into a function that runs it again on whatever its buffers hold by then.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Row counts of the graphs that steps of 1 to `max_rows` rows meet."""
    return tuple(count for count, below in zip(_ROW_COUNTS, (0, *_ROW_COUNTS), strict=False) if below < max_rows)


#: Whether all who run a model's steps together say so, of what each of them has found out.
Agreement = Callable[[bool], bool]


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What a service compiles."""

    backend: str = AUTO
    """One that `require_backend` lets through."""
    row_counts: tuple[int, ...] = ()
    """Rows of each graph."""
    directory: Path | None = None
    """Where what was compiled is kept between runs; None: nowhere."""
    capture: Capture | None = None
    """What records captured steps; None: CUDA graphs, where there is a CUDA device."""
    attention: str | None = None
    """Of captured steps: `PAGED`, where a trial shows that it is right on the device, or `GATHERED`; None: paged on a
    CUDA device, gathered elsewhere."""
    products: str | None = None
    """Of linear layers: `ROWS`; None: those where nothing else will do, on a CUDA device with int8 weights or with
    `is_deterministic`, and PyTorch's elsewhere."""
    is_deterministic: bool = False
    """Whether a row must have the same bits whatever else a step holds; see `engine.model.batch_invariance`."""

    @property
    def uses_torch_compile(self) -> bool:
        """True where `backend` is the name of a backend of `torch.compile`."""
        return self.backend not in _BUILT_IN

    def multiplies_rows(self, device: torch.device, *, is_int8: bool) -> bool:
        """Whether products are `ROWS` on a device."""
        is_cuda = device.type == "cuda"
        may_record = is_cuda or self.capture is not None
        return self.products == ROWS or (is_cuda and is_int8) or (may_record and self.is_deterministic)


def require_backend(name: str) -> None:
    """Finds out whether a backend is there, before anything is loaded.

    Raises:
        InvalidRequest: it is not; the message has the names that are.
    """
    if name in _BUILT_IN:
        return
    # Imported late: a service that stays eager starts faster without it.
    from torch._dynamo import list_backends

    if name not in list_backends(exclude_tags=()):
        names = ", ".join((*_BUILT_IN, *sorted(list_backends())))  # not those for debugging PyTorch
        raise InvalidRequest(
            f"compile_backend {name!r} is not registered here; there are {names}", field="compile_backend"
        )


def first_line(error: Exception) -> str:
    """What an error of a backend says, in one line."""
    cause = getattr(error, "inner_exception", error)  # PyTorch's own wrapping names the backend once more
    lines = [line for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    return lines[0].strip()
