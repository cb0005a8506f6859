"""Compares a worker, before it serves, with the model's own eager forward: a model is computed right or refused.

Two sequences of random tokens go through the model as transformers runs it, whole, then through the worker as services
run it: in chunks, token by token, two in one batch, by way of the KV pool, beyond the smallest window that layers have.
What counts as different depends on the model and its arithmetic, so it is measured: the same forward pass again, with
every module's output disturbed by as much as one rounding of that arithmetic.

Not here: what the probe can tell (`engine.model.layer_probe`). Called by `engine.loader`, which lets go of the
reference afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.base import ModelShape, SequenceSlice, StepPlan, Worker
from specdec.engine.model.batch import AttentionKind
from specdec.errors import Unsupported
from specdec.types import BLOCK_TOKENS

# Tokens of the two sequences, where no window asks for more.
_TOKENS = 56
_FEWER_TOKENS = 9
# A longer window is believed, as the probe read it from the model's own mask: a step of this many tokens is what a
# large model runs anyway, and eager attention over four times as many takes gigabytes a layer, on a CPU minutes.
_LONGEST_WINDOW = 1024
_BEYOND_WINDOW = 24
# Of each sequence's end, tokens that come in a chunk of a few, and before them one by one.
_LAST_CHUNK = 5
_SINGLE_TOKENS = 12
# Rows of one prefill chunk whose logits are compared.
_CHUNK_ROWS = 8
# Rows whose median difference counts: a mixture of experts may choose another expert for a few tokens, and be right.
_RUN_ROWS = 5
# Differences are allowed this many times what one rounding a module makes. Over all architectures that are computed
# right, in every arithmetic, 1.5 times were seen and mostly half.
_ALLOWED_NOISE = 3.0
# And so much of the logits' spread: in any arithmetic, and at most where a model magnifies every rounding.
_ALLOWED_ALWAYS = 1e-4
_ALLOWED_AT_MOST = 0.25


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a worker rounds, other than the model it was made from."""

    rounding: float
    """Relative size of one rounding of what modules put out."""
    round_weight: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What the weights of linear layers are rounded to, but the head's; None: they stay."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What the model itself computes."""

    sequences: tuple[tuple[int, ...], ...]
    logits: tuple[torch.Tensor, ...]
    """Per sequence, float32 [tokens, V]."""
    spread: float
    """Standard deviation of all logits that are numbers."""
    noise: float
    """What `difference` is between the model and itself disturbed."""


def sequence_lengths(shape: ModelShape, kinds: Sequence[AttentionKind]) -> tuple[int, ...]:
    """Tokens of one or two sequences that the pool and the model's context hold."""
    windows = [kind.window for kind in kinds if kind.window is not None and kind.window <= _LONGEST_WINDOW]
    wanted = max(_TOKENS, min(windows) + _BEYOND_WINDOW if windows else 0)
    blocks = shape.num_kv_blocks // 2 or 1
    longest = min(wanted, shape.max_context_tokens, blocks * BLOCK_TOKENS)
    if shape.num_kv_blocks < 2 or longest <= _FEWER_TOKENS:
        return (longest,)
    return longest, longest - _FEWER_TOKENS


def take_reference(
    model: PreTrainedModel, shape: ModelShape, kinds: Sequence[AttentionKind], arithmetic: Arithmetic
) -> Reference:
    """Runs the model's own attention; its attention implementation is left at `eager`."""
    generator = torch.Generator().manual_seed(0)
    sequences = tuple(
        tuple(torch.randint(shape.vocabulary_size, (length,), generator=generator).tolist())
        for length in sequence_lengths(shape, kinds)
    )
    model.set_attn_implementation("eager")
    with torch.inference_mode(), _rounded_weights(model, arithmetic.round_weight):
        logits = tuple(_run(model, tokens, shape.vocabulary_size) for tokens in sequences)
        with _disturbed(model, arithmetic.rounding):
            disturbed = _run(model, sequences[-1], shape.vocabulary_size)
    finite = torch.cat([rows[rows.isfinite()] for rows in logits])
    spread = (float(finite.std()) if len(finite) > 1 else 0.0) or 1.0
    return Reference(sequences, logits, spread, difference(disturbed, logits[-1], spread))


def require_same(worker: Worker, reference: Reference, architecture: str) -> None:
    """Runs the reference's sequences through a worker.

    Raises:
        Unsupported: its logits are others; the message has the difference.
    """
    allowed = min(_ALLOWED_ALWAYS + _ALLOWED_NOISE * reference.noise, _ALLOWED_AT_MOST)
    worst = max(_differences(worker, reference))
    if worst > allowed:
        raise Unsupported(
            f"a model of type {architecture} is computed differently here than by transformers: its logits differ by "
            f"{worst:.2g} of their spread, where rounding explains {allowed:.2g} (--self-check off serves it anyway)"
        )


def difference(actual: torch.Tensor, expected: torch.Tensor, spread: float) -> float:
    """Root mean square difference of logits [rows, V], as a fraction of `spread`: the worst run of rows' median.

    What is no number in both is the same, in one of them infinitely different.
    """
    gaps = (actual - expected).nan_to_num_(nan=torch.inf)
    gaps = gaps.masked_fill_(~(actual.isfinite() | expected.isfinite()), 0)
    rows = gaps.square().mean(dim=1).sqrt() / spread
    return max(float(run.median()) for run in rows.split(_RUN_ROWS))


def _differences(worker: Worker, reference: Reference) -> Iterator[float]:
    got: list[list[torch.Tensor]] = [[] for _ in reference.sequences]
    wanted: list[list[torch.Tensor]] = [[] for _ in reference.sequences]
    tables = _block_tables([len(tokens) for tokens in reference.sequences])
    for spans in _steps([len(tokens) for tokens in reference.sequences]):
        slices = tuple(
            SequenceSlice(
                reference.sequences[index][start:end],
                start,
                tables[index][: -(-end // BLOCK_TOKENS)],
                min(end - start, _CHUNK_ROWS),
            )
            for index, start, end in spans
        )
        logits = worker.execute(StepPlan(slices)).split([piece.num_logit_rows for piece in slices])
        for (index, _, end), rows in zip(spans, logits, strict=True):
            got[index].append(rows)
            wanted[index].append(reference.logits[index][end - len(rows) : end])
    for rows, expected in zip(got, wanted, strict=True):
        yield difference(torch.cat(rows), torch.cat(expected), reference.spread)


def _steps(lengths: Sequence[int]) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """(sequence, from, to) of each step's slices: every token of every sequence once, in order."""
    cuts = [_cuts(length) for length in lengths]
    # The second sequence is one step behind the first, so that prefill and single tokens meet.
    for tick in range(max(index + len(spans) for index, spans in enumerate(cuts))):
        slices = [(index, *spans[tick - index]) for index, spans in enumerate(cuts) if 0 <= tick - index < len(spans)]
        if tick % 3:
            yield tuple(slices)
        else:
            yield from ((piece,) for piece in slices)


def _cuts(length: int) -> list[tuple[int, int]]:
    """Two prefill chunks, single tokens and a last chunk of a sequence; fewer of a short one."""
    singles_from = max(2, length - _LAST_CHUNK - _SINGLE_TOKENS)
    last_from = max(singles_from, length - _LAST_CHUNK)
    edges = sorted({0, singles_from // 2, *range(singles_from, last_from + 1), length})
    return [span for span in pairwise(edges) if span[1] <= length]


def _block_tables(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """The first sequence's blocks lie side by side, the second's the other way round."""
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    first = tuple(range(counts[0]))
    return [first, *(tuple(reversed(range(counts[0], counts[0] + count))) for count in counts[1:])]


def _run(model: PreTrainedModel, tokens: Sequence[int], vocabulary_size: int) -> torch.Tensor:
    output = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
    logits: torch.Tensor = output.logits[0, :, :vocabulary_size]
    return logits.float()


@contextmanager
def _rounded_weights(
    model: PreTrainedModel, round_weight: Callable[[torch.Tensor], torch.Tensor] | None
) -> Iterator[None]:
    """Within it, linear layers multiply with rounded weights, made as they are needed."""
    kept: dict[nn.Linear, torch.Tensor] = {}

    def before(module: nn.Linear, _: object) -> None:
        assert round_weight is not None  # else there are no hooks
        kept[module] = module.weight.data
        module.weight.data = round_weight(kept[module])

    def after(module: nn.Linear, *_: object) -> None:
        module.weight.data = kept.pop(module)

    linears = [] if round_weight is None else inner_linears(model)
    hooks = [linear.register_forward_pre_hook(before) for linear in linears]
    hooks += [linear.register_forward_hook(after) for linear in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def inner_linears(model: PreTrainedModel) -> list[nn.Linear]:
    """The linear layers whose weights may be rounded: all but the head."""
    head = model.get_output_embeddings()
    return [module for module in model.modules() if type(module) is nn.Linear and module is not head]


@contextmanager
def _disturbed(model: PreTrainedModel, rounding: float) -> Iterator[None]:
    """Within it, what the model's smallest modules put out is multiplied by 1 +- `rounding`."""
    generator = torch.Generator(model.device).manual_seed(1)

    def disturb(_module: nn.Module, _inputs: object, output: object) -> object:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        noise = torch.rand(output.shape, generator=generator, device=output.device)
        return (output.float() * noise.sub_(0.5).mul_(2 * rounding).add_(1)).to(output.dtype)

    hooks = [module.register_forward_hook(disturb) for module in model.modules() if not any(module.children())]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
