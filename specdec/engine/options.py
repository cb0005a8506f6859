"""Settings of a load: which model, and how its steps are carried out (`--compile-backend`).

The ways of running a step are `engine.native`, `engine.cuda_graphs`, `engine.torch_compile` and PyTorch's operations
one by one; `engine.load_pipeline` chooses one for a model. Read by all of those and built by the services.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import torch

from specdec.contract.errors import InvalidRequest
from specdec.settings.draft_specs import LocalDraftSpec

#: PyTorch's operations one by one.
EAGER = "eager"
#: Our own CPU kernels (`engine.native`).
NATIVE = "native"
#: CUDA graphs of small steps (`engine.cuda_graphs.graph_steps`).
CUDA_GRAPHS = "cuda-graphs"
#: Native kernels on a CPU and CUDA graphs on a GPU if they support the model, eager steps elsewhere.
AUTO = "auto"

#: Attention of steps in CUDA graphs by our own kernels, over block tables (`engine.cuda_graphs.paged_attention`).
PAGED = "paged"
#: The same by PyTorch's kernel, over copies of whole contexts.
GATHERED = "gathered"

_BUILT_IN = (AUTO, NATIVE, CUDA_GRAPHS, EAGER)

# Rows of the graphs: a draft step has 1 or 2, a verification gamma + 1.
_ROW_COUNTS = (1, 2, 3, 5, 9, 17)

#: Records a step over fixed buffers and returns a function that runs it again on the buffers' current contents.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Return the row counts of the graphs that steps of 1 to `max_rows` rows need."""
    return tuple(count for count, below in zip(_ROW_COUNTS, (0, *_ROW_COUNTS), strict=False) if below < max_rows)


#: Returns True if every process that runs the model's steps together passed True.
Agreement = Callable[[bool], bool]


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options of the way in which a service runs its steps."""

    backend: str = AUTO
    """A name that `require_backend` accepts."""
    row_counts: tuple[int, ...] = ()
    """Rows of each CUDA graph, for one sequence."""
    directory: Path | None = None
    """Directory in which compiled code is kept between runs; None keeps none."""
    capture: Capture | None = None
    """Function that records steps. None records CUDA graphs if there is a CUDA device. With a function, a model on a
    CPU runs the steps of a GPU, for tests on machines without one."""
    attention: str | None = None
    """Attention of recorded steps: `PAGED`, used if a trial on the device gives the right output, or `GATHERED`. None
    is paged on a CUDA device and gathered elsewhere."""
    is_deterministic: bool = False
    """True if a row must have the same bits whatever else a step holds; see `engine.model.batch_invariance`."""

    @property
    def uses_torch_compile(self) -> bool:
        """True if `backend` is the name of a backend of `torch.compile`."""
        return self.backend not in _BUILT_IN

    def can_record(self, device: torch.device) -> bool:
        """Return whether steps on a device can be recorded."""
        return device.type == "cuda" or self.capture is not None

    def multiplies_rows(self, device: torch.device, *, is_int8: bool) -> bool:
        """Return whether linear layers are computed by `engine.linear.row_products`, whose kernel needs a GPU.

        PyTorch has no int8 product for a GPU, and its other products give a row different bits in steps of different
        sizes.
        """
        return self.can_record(device) and (is_int8 or self.is_deterministic)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A checkpoint to load and how its worker should run."""

    model: str
    """Checkpoint directory, GGUF file or hub id."""
    _: KW_ONLY
    device: str
    """`cpu`, `cuda` or `cuda:N`; `auto` is CUDA if there is a CUDA device. Ranks of a group take `cpu` or `cuda`."""
    dtype: str
    """`float32`, `bfloat16` or `float16`. `auto` is the checkpoint's own on a GPU. On a CPU it is float32, with weights
    kept in 16 bits if the checkpoint stores them so: the logits are the same, and half the memory is read. `int8`
    rounds the weights of the layers' products; everything else is as in `auto`, on a GPU in 16 bits."""
    kv_cache_bytes: int | None = None
    """Bytes of the KV pool, of each rank's own if there are several."""
    gpu_memory_utilization: float | None = None
    """Share of a CUDA device's whole memory for weights, KV pool and working memory together, used if `kv_cache_bytes`
    is None. None takes most of the free memory."""
    num_kv_blocks: int | None = None
    """Blocks of the KV pool, instead of its bytes."""
    max_context_tokens: int | None = None
    """Longest sequence to serve. None is the longest that the model supports."""
    num_threads: int | None = None
    """CPU threads of PyTorch, for the whole process; None leaves them unchanged."""
    compiling: CompileOptions = field(default_factory=CompileOptions)
    self_check: bool = True
    """Compare the worker's logits with the model's own forward pass, and refuse a model whose logits differ."""
    local_drafts: tuple[LocalDraftSpec, ...] = ()
    """Drafts that the worker computes itself, under different names; for a whole model only."""
    kept_in: Path | None = None
    """Directory in which packed weights are kept for later starts; None keeps none. See `engine.kept_worker`."""
    note_loaded: Callable[[float], None] = field(default=lambda share: None, compare=False)
    """Called with the share of the weights that are loaded, 0..1, each time that it has risen."""

    @property
    def is_int8(self) -> bool:
        """True if weights are to be rounded to int8."""
        return self.dtype == "int8"


def require_backend(name: str) -> None:
    """Check that a backend exists, before anything is loaded.

    Raises:
        InvalidRequest: it does not; the message lists those that do.
    """
    if name in _BUILT_IN:
        return
    # Imported late: a service that does not compile starts faster without it.
    from torch._dynamo import list_backends

    if name not in list_backends(exclude_tags=()):
        names = ", ".join((*_BUILT_IN, *sorted(list_backends())))  # without the backends that debug PyTorch
        raise InvalidRequest(
            f"compile_backend {name!r} does not exist on this machine; choose one of {names}", field="compile_backend"
        )


def first_line(error: Exception) -> str:
    """Return the first line of a backend's error."""
    cause = getattr(error, "inner_exception", error)  # PyTorch's own wrapper names the backend once more
    lines = [line for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    return lines[0].strip()
