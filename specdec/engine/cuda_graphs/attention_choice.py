"""Choice of the attention in CUDA graphs: the paged Triton kernels if they pass a trial, gathered attention otherwise.

Triton may be absent, its compiler may fail, or a new device may round differently. Version numbers do not tell, so the
kernels are recorded as in a real step and compared with gathered attention on a small pool, for the heads, windows,
softcaps and dtype of the model. Called by `engine.cuda_graphs.graph_steps`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.buckets import Bucket
from specdec.engine.cuda_graphs.paged_attention import PagedAttention
from specdec.engine.cuda_graphs.static_attention import GatheredAttention, StaticAttention
from specdec.engine.cuda_graphs.static_inputs import StaticInputs, StepNumbers, input_size
from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.kv_cache import KvCache, LayerShape
from specdec.engine.options import GATHERED, PAGED, Agreement, Capture, first_line

_log = logging.getLogger(__name__)

# Upper limit of the window in the trial, so that the trial's contexts exceed it.
_TRIAL_WINDOW = 150
_TRIAL_BUCKET = Bucket(num_sequences=4, width=3, num_blocks=20)
_TRIAL_BLOCKS = 32
_LONG_TABLE = (7, 2, 9, 4, 30, 11, 29, 12, 28, 13, 27, 14, 26, 15, 25, 16, 24, 17)
# One context that spans several splits and ends within a block, one whose row opens a block, and one at position 0. The
# bucket's fourth sequence is padding.
_TRIAL_SLICES = (
    SequenceSlice((0, 0, 0), 280, _LONG_TABLE, 3),
    SequenceSlice((0,), 32, (3, 0, 5), 1),
    SequenceSlice((0, 0), 0, (8,), 2),
)
# Keys, queries and values have a standard deviation of 1: a wrong mask changes outputs by tenths, bfloat16 rounding by
# a hundredth.
_TRIAL_TOLERANCE = 0.05


def choose_attention(
    cache: KvCache,
    layer_kinds: Sequence[AttentionKind],
    capture: Capture,
    wanted: str | None,
    max_context_tokens: int,
    all_agree: Agreement | None = None,
) -> StaticAttention:
    """Return the attention that is recorded in the CUDA graphs of these layers.

    Args:
        cache: the KV pool.
        layer_kinds: the attention kind of each layer.
        capture: records a step.
        wanted: see `CompileOptions.attention`.
        max_context_tokens: maximum context of one sequence.
        all_agree: see `engine.cuda_graphs.graph_steps.capture_steps`.
    """
    is_cuda = cache.layers[0].blocks.device.type == "cuda"
    if (wanted or (PAGED if is_cuda else GATHERED)) == GATHERED:
        return GatheredAttention(cache, layer_kinds)
    problem = _trial_problem(cache, layer_kinds, capture)
    if all_agree is not None and not all_agree(problem is None):
        problem = problem or "paged attention failed its trial on another rank"
    if problem is None:
        return PagedAttention(cache, layer_kinds, max_context_tokens)
    _log.warning("%s; using gathered attention, which is slower with long contexts", problem)
    return GatheredAttention(cache, layer_kinds)


def _trial_problem(cache: KvCache, layer_kinds: Sequence[AttentionKind], capture: Capture) -> str | None:
    """Return why the paged kernels cannot serve these layers on this device, or None if they can."""
    model_layers = cache.layers[: len(layer_kinds)]  # the caches of local drafts follow them
    pairs = dict.fromkeys(zip((layer.shape for layer in model_layers), layer_kinds, strict=True))
    pool = cache.layers[0].blocks
    try:
        with torch.inference_mode():
            difference = max(_difference(shape, kind, pool.dtype, pool.device, capture) for shape, kind in pairs)
    except Exception as error:  # Triton or its compiler is missing, or the device's memory is too small
        return f"paged attention failed its trial: {first_line(error)}"
    if difference > _TRIAL_TOLERANCE:
        return f"paged attention differs from gathered attention by {difference:.2g}, limit {_TRIAL_TOLERANCE}"
    return None


def _difference(
    shape: LayerShape, kind: AttentionKind, dtype: torch.dtype, device: torch.device, capture: Capture
) -> float:
    """Return the largest difference between both attentions over all rows that are not padding."""
    if kind.window is not None:
        kind = replace(kind, window=min(kind.window, _TRIAL_WINDOW))
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    num_heads, num_rows = shape.num_kv_heads * kind.queries_per_kv_head, _TRIAL_BUCKET.num_rows
    query = random(num_rows, num_heads, shape.key_dim)
    kv_rows = random(num_rows, shape.row_width)
    cache = KvCache([shape], num_blocks=_TRIAL_BLOCKS, dtype=dtype, device=device)
    pool = random(*cache.layers[0].blocks.shape)
    outputs = []
    for attention_class, record in ((GatheredAttention, None), (PagedAttention, capture)):
        attention: StaticAttention = attention_class(cache, [kind])
        numbers = StepNumbers(input_size(_TRIAL_BUCKET, keeps_tables=attention.tables is not None), device)
        inputs = StaticInputs(_TRIAL_BUCKET, numbers, _TRIAL_BLOCKS - 1, attention.tables)
        inputs.fill(_TRIAL_SLICES)
        output = torch.zeros(num_rows, num_heads, shape.value_dim, dtype=dtype, device=device)

        def step(
            attention: StaticAttention = attention, inputs: StaticInputs = inputs, output: torch.Tensor = output
        ) -> None:
            _, context = attention.lay_out(inputs)
            output.copy_(context.attend_rows(0, query, kv_rows, shape.key_dim**-0.5, kind.softcap))

        cache.layers[0].blocks.copy_(pool)
        run: Callable[[], None] = step if record is None else record(step)
        cache.layers[0].blocks.copy_(pool)
        run()
        outputs.append(output)
    gathered, paged = outputs
    is_real = inputs.on_device.slots.view(-1) < (_TRIAL_BLOCKS - 1) * BLOCK_TOKENS
    difference = (gathered - paged)[is_real].abs().max()
    return float(difference.nan_to_num(nan=torch.inf))
