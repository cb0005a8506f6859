"""Attention of recorded draft steps alone: one layer's, paged and gathered, on one device.

Times are relative to a floor: the bytes of the keys and values over the copy bandwidth of the same run. Steps choose
paged attention if it passes its trial. An attention that does not run is reported and left out. Called by the `gpu`
suite.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from transformers import LlamaConfig

from bench.harness.report import progress
from bench.harness.rows import Row
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice
from specdec.engine.cuda_graphs.buckets import Buckets
from specdec.engine.cuda_graphs.capture import CudaCapture
from specdec.engine.cuda_graphs.paged_attention import PagedAttention
from specdec.engine.cuda_graphs.static_attention import GatheredAttention, StaticAttention
from specdec.engine.cuda_graphs.static_inputs import StaticInputs, StepNumbers, input_size
from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.kv_cache import KvCache, LayerShape
from specdec.engine.options import first_line

#: (sequences, tokens of each one's context)
SIZES = ((1, 512), (1, 2100), (1, 8000), (16, 512), (16, 8000), (64, 512))
# Layers that are launched together, as in a step; the time of a single layer would be bound by its launch.
_MIN_LAYERS = 16
# Bytes of keys and values that evict a layer's own from the caches before its next turn.
_MIN_BYTES = 300_000_000
_NUM_RUNS = 30


def attention_rows(
    config: LlamaConfig,
    device: str,
    shape: str,
    row: Callable[..., Row],
    bytes_per_s: float,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> list[Row]:
    """Measure the time of one layer's attention.

    Args:
        config: model with the heads.
        device: device to measure on.
        shape: name of the model in the rows.
        row: makes a row of this suite.
        bytes_per_s: copy bandwidth, reads plus writes.
        sizes: numbers of sequences and context tokens of the steps.
    """
    rows = []
    with progress("gpu: attention", len(sizes)) as advance:
        for num_sequences, num_tokens in sizes:
            case = f"{shape}, attention of one layer, {num_sequences} sequences, context {num_tokens}"
            for attention_class in (PagedAttention, GatheredAttention):
                try:
                    seconds, num_bytes = _layer_s(config, device, attention_class, num_sequences, num_tokens)
                except Exception as error:
                    print(f"bench gpu: {attention_class.name} attention: {first_line(error)}", file=sys.stderr)
                    continue
                floor_s = num_bytes / bytes_per_s
                rows += [
                    row(case=case, system=attention_class.name, metric="layer_us", value=seconds * 1e6, unit="us"),
                    row(case=case, system=attention_class.name, metric="layer_over_floor", value=seconds / floor_s,
                        unit="x", ratio_to="floor"),
                ]  # fmt: skip
            advance()
    return rows


def _layer_s(
    config: LlamaConfig,
    device: str,
    attention_class: type[PagedAttention] | type[GatheredAttention],
    num_sequences: int,
    num_tokens: int,
) -> tuple[float, int]:
    """Return the seconds of one layer and the bytes of keys and values that it reads."""
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = config.hidden_size // num_heads
    kind = AttentionKind(None, num_heads // num_kv_heads, None)
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    place = torch.device(device)
    layer = LayerShape(num_kv_heads, dim, dim)
    num_bytes = num_sequences * num_tokens * layer.row_width * torch.bfloat16.itemsize
    num_layers = 1 if place.type == "cpu" else max(_MIN_LAYERS, -(-_MIN_BYTES // num_bytes))
    cache = KvCache([layer] * num_layers, num_blocks=num_sequences * num_blocks + 1, dtype=torch.bfloat16, device=place)
    # A separate generator, because a failed recording may leave the device's unusable.
    generator = torch.Generator(place).manual_seed(0)
    for kept in cache.layers:
        kept.blocks.normal_(generator=generator)
    attention: StaticAttention = attention_class(cache, [kind] * num_layers)
    ids = torch.randperm(num_sequences * num_blocks).view(num_sequences, num_blocks).tolist()
    slices = [SequenceSlice((0,), num_tokens - 1, tuple(table), 1) for table in ids]
    bucket = Buckets((1,), attention.context_steps, max(num_tokens, 8192)).smallest_for(slices)
    if bucket is None:
        raise ValueError(f"no step of {num_sequences} sequences of {num_tokens} tokens is recorded")
    numbers = StepNumbers(input_size(bucket, keeps_tables=attention.tables is not None), place)
    inputs = StaticInputs(bucket, numbers, cache.num_blocks - 1, attention.tables)
    query = torch.randn(bucket.num_rows, num_heads, dim).to(place, torch.bfloat16)
    kv_rows = torch.randn(bucket.num_rows, 2 * num_kv_heads * dim).to(place, torch.bfloat16)
    with torch.inference_mode():
        inputs.fill(slices)
        _, context = attention.lay_out(inputs)

        def step() -> None:
            for index in range(num_layers):
                context.attend_rows(index, query, kv_rows, dim**-0.5, None)

        run = CudaCapture(place)(step) if place.type == "cuda" else step
        seconds = []
        for _ in range(3 + _NUM_RUNS if place.type == "cuda" else 1):
            began = time.perf_counter()
            run()
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[-_NUM_RUNS:]) / num_layers, num_bytes
