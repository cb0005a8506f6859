"""Steps of one sequence through graphs that `torch.compile` made (`--compile-backend`); everything else stays eager.

A draft step and a verification of one session are a few rows that read the cache: `engine.compiled.step_graph` says
them as a pure function, which a backend compiles before the service is ready, once for each of a few row counts; in
between, a step is padded with rows that are thrown away. Eager remain: prefill from position 0, steps of several
sequences (every mixture of lengths and contexts would be a graph of its own, and their rows share the cost that graphs
save) and more rows than the largest graph has.

`inductor` compiles to packages on disk (`engine.compiled.graph_package`), except on a GPU and for models whose weights
are too large to be copied into every package; those, and every other backend of `torch.compile`, compile in this
process, from one more copy of the weights, and are cached between runs as far as the backend does so itself. Called by
`engine.loader`.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from specdec.engine.compiled.graph_package import (
    MAX_BLOCKS,
    MIN_BLOCKS,
    PackageKey,
    PackageStore,
    StepFunction,
    example_inputs,
)
from specdec.engine.compiled.step_graph import StepGraph
from specdec.engine.model.attention import PagedContext
from specdec.engine.model.batch import KvView, StepBatch
from specdec.engine.model.kv_cache import KvCache
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.model.model_runner import ForwardPass
from specdec.engine.model.options import AUTO, CAPTURED, EAGER, CompileOptions, GraphSource, first_line
from specdec.engine.model.start_progress import shown
from specdec.errors import InvalidRequest, Unsupported
from specdec.types import BLOCK_TOKENS

_log = logging.getLogger(__name__)

# Beyond, a step's own work outweighs what compiling saves.
_MOST_COMPILED_ROWS = 9
# All packages of a process together: each holds the weights in its own layout.
_PACKAGES_BYTES = 4 << 30
# Versions of the graph's code in a process, other models' included; PyTorch's own limit is there to find loops.
_MOST_VERSIONS = 100


def forward_pass(options: CompileOptions, source: GraphSource, make_eager: Callable[[], ForwardPass]) -> ForwardPass:
    """What a backend's name stands for.

    Args:
        options: the name, which `require_backend` has let through, and what to compile; not `native`, which is a
            worker of its own. What `captured` records is the eager pass.
        source: the model, still whole.
        make_eager: the eager pass; it may take the model apart.

    Raises:
        Unsupported: the backend cannot compile this model here.
        InvalidRequest: packages cannot be kept where they should.
    """
    if options.backend in (AUTO, CAPTURED, EAGER):
        return make_eager()
    if not LlamaStack.fits(source.model):
        kind = source.model.config.model_type
        _log.warning("a model of type %s has no graph for compile_backend %s: it runs eagerly", kind, options.backend)
        return make_eager()
    graphs = _compile(options, source)
    return CompiledSteps(make_eager(), graphs)


class CompiledSteps:
    """`engine.model.model_runner.ForwardPass` that takes a graph where one fits."""

    def __init__(self, eager: ForwardPass, graphs: Mapping[int, StepFunction]) -> None:
        """graphs: by their number of rows."""
        self._eager = eager
        self._graphs = tuple(sorted(graphs.items()))

    def __call__(self, batch: StepBatch, context: PagedContext) -> torch.Tensor:
        group = batch.groups[0]
        views = [view for view in group.views if view is not None]
        if len(batch.groups) == 1 and group.batch == 1 and len(views) == len(group.views):
            for num_rows, graph in self._graphs:
                if group.num_rows <= num_rows:
                    return _run(graph, num_rows, batch, views, context.cache)
        return self._eager(batch, context)


def _run(graph: StepFunction, num_rows: int, batch: StepBatch, views: Sequence[KvView], cache: KvCache) -> torch.Tensor:
    """Logits [R, V] of a step of at most `num_rows` rows, whose keys and values are stored."""
    count = batch.slots.shape[0]
    token_ids, position_ids = batch.token_ids[0], batch.position_ids[0]
    if count < num_rows:
        token_ids = torch.cat((token_ids, token_ids[-1:].expand(num_rows - count)))
        position_ids = torch.cat((position_ids, position_ids[-1:].expand(num_rows - count)))
    if batch.opened_blocks is not None:
        for layer in cache.layers:
            layer.clear(batch.opened_blocks)
    block_ids = [_blocks_read(view, batch.slots.device) for view in views]
    logits, kv_rows = graph(token_ids, position_ids, block_ids, [layer.blocks for layer in cache.layers])
    for layer, rows in zip(cache.layers, kv_rows, strict=True):
        layer.write(batch.slots, rows[:count])
    return logits.index_select(0, batch.logit_rows)


def _blocks_read(view: KvView, device: torch.device) -> torch.Tensor:
    """int64 [n]: the blocks that hold what a view reads, at least as many as a graph takes."""
    ids = view.block_ids
    if ids is None:
        first, num_blocks = view.run_start // BLOCK_TOKENS, -(-view.length // BLOCK_TOKENS)
        ids = torch.arange(first, first + num_blocks, device=device)
    # In front of the first position, where the graph does not look.
    return ids if len(ids) >= MIN_BLOCKS else ids.repeat(MIN_BLOCKS)


def _compile(options: CompileOptions, source: GraphSource) -> dict[int, StepFunction]:
    """One graph for each row count that is worth it."""
    options = replace(options, row_counts=tuple(count for count in options.row_counts if count <= _MOST_COMPILED_ROWS))
    weights_bytes = sum(parameter.nbytes for parameter in source.model.parameters())
    is_small = weights_bytes * len(options.row_counts) <= _PACKAGES_BYTES
    with _told_in_one_line(options.backend):
        if options.backend == "inductor" and source.model.device.type == "cpu" and is_small:
            return _compile_packages(options, source)
        return _compile_in_process(options, source)


def _compile_packages(options: CompileOptions, source: GraphSource) -> dict[int, StepFunction]:
    key = PackageKey(source.model_fingerprint, source.dtype, options.is_tuned)
    with contextlib.ExitStack() as stack:
        store = PackageStore(options.directory or Path(stack.enter_context(tempfile.TemporaryDirectory())))
        steps = {num_rows: store.load(key, num_rows) for num_rows in options.row_counts}
        missing = [num_rows for num_rows, step in steps.items() if step is None]
        if missing:
            graph = _graph_of(source)
            for num_rows in _shown(missing):
                steps[num_rows] = store.build(key, num_rows, graph, source.cache)
    return {num_rows: step for num_rows, step in steps.items() if step is not None}


def _compile_in_process(options: CompileOptions, source: GraphSource) -> dict[int, StepFunction]:
    graph = _graph_of(source)
    compiled = torch.compile(graph, backend=options.backend, fullgraph=True)
    # One version of the same code for each row count; a step runs in inference mode.
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=_MOST_VERSIONS):
        for num_rows in _shown(options.row_counts):
            inputs = example_inputs(num_rows, graph.num_kinds, source.cache)
            for block_ids in inputs[2]:
                torch._dynamo.mark_dynamic(block_ids, 0, min=MIN_BLOCKS, max=MAX_BLOCKS)
            compiled(*inputs)
    return dict.fromkeys(options.row_counts, compiled)


def _graph_of(source: GraphSource) -> StepGraph:
    with torch.no_grad():
        return StepGraph(source.model, source.layer_kinds, is_int8=source.dtype == "int8").eval()


def _shown(missing: Sequence[int]) -> Iterator[int]:
    """Goes through row counts to compile."""
    return shown(missing, "compiling step graphs", lambda num_rows: f"{num_rows} rows")


@contextlib.contextmanager
def _told_in_one_line(backend: str) -> Iterator[None]:
    """Whatever a backend raises while it compiles means the same to whoever asked for it."""
    try:
        yield
    except InvalidRequest:
        raise
    except Exception as error:
        raise Unsupported(
            f"compile_backend {backend!r} cannot compile this model here: {first_line(error)}", field="compile_backend"
        ) from error
