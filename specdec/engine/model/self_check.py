"""Compare a worker, before it serves, with the model's own eager forward pass, and refuse a model that differs.

Two sequences of random tokens run through the model as transformers runs it, whole, and then through the worker as
services run it: in chunks, token by token, two in one batch, through the KV pool, and beyond the smallest attention
window. The allowed difference depends on the model and its arithmetic, so it is measured: the same forward pass runs
again with every module's output disturbed by one rounding of that arithmetic. Called by `engine.load_pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import ModelShape, SequenceSlice, SliceStates, StepPlan, Worker
from specdec.engine.model.batch import AttentionKind

if TYPE_CHECKING:  # its modules take 100 MB, and kept layouts are loaded without it
    from transformers import PreTrainedModel

# Tokens of the longer sequence, unless a window needs more, and by how many tokens the other one is shorter.
_TOKENS = 56
_FEWER_TOKENS = 9
# Longer windows are not tested; the probe reads them from the model's own mask. Eager attention over four times as many
# tokens takes gigabytes a layer, and minutes on a CPU.
_LONGEST_WINDOW = 1024
_BEYOND_WINDOW = 24
# Tokens at each sequence's end that run in one chunk, and tokens before them that run one by one.
_LAST_CHUNK = 5
_SINGLE_TOKENS = 12
# Rows of one prefill chunk whose logits are compared.
_CHUNK_ROWS = 8
# Rows whose median difference is taken: a mixture of experts may correctly choose another expert for a few tokens.
_RUN_ROWS = 5
# Allowed difference as a multiple of what one rounding in every module causes. Architectures that are computed right
# showed at most 1.5 times and mostly half, in every arithmetic.
_ALLOWED_NOISE = 3.0
# Difference that is always allowed, and the largest that is ever allowed, as shares of the logits' spread.
_ALLOWED_ALWAYS = 1e-4
_ALLOWED_AT_MOST = 0.25


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Rounding in a worker that the model it was made from does not have."""

    rounding: float
    """Relative size of one rounding of a module's output."""
    round_weight: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Function that rounds the weights of linear layers except the head; None if they are not rounded."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Logits of the model itself."""

    sequences: tuple[tuple[int, ...], ...]
    logits: tuple[torch.Tensor, ...]
    """Per sequence, float32 [tokens, V]."""
    spread: float
    """Standard deviation of all finite logits."""
    noise: float
    """`difference` between the model and the disturbed model."""


def sequence_lengths(shape: ModelShape, kinds: Sequence[AttentionKind]) -> tuple[int, ...]:
    """Return the lengths of one or two sequences that the pool and the model's context hold."""
    limits = [limit for kind in kinds for limit in (kind.window, kind.chunk) if limit is not None]
    windows = [limit for limit in limits if limit <= _LONGEST_WINDOW]
    wanted = max(_TOKENS, min(windows) + _BEYOND_WINDOW if windows else 0)
    blocks = shape.num_kv_blocks // 2 or 1
    longest = min(wanted, shape.max_context_tokens, blocks * BLOCK_TOKENS)
    if shape.num_kv_blocks < 2 or longest <= _FEWER_TOKENS:
        return (longest,)
    return longest, longest - _FEWER_TOKENS


def take_reference(
    model: PreTrainedModel, shape: ModelShape, kinds: Sequence[AttentionKind], arithmetic: Arithmetic
) -> Reference:
    """Run the model's own forward pass; its attention implementation is `eager` afterwards.

    Raises:
        InvalidRequest: a row of logits has no finite number.
    """
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
    if not all(rows.isfinite().any(dim=1).all() for rows in logits):
        raise InvalidRequest(
            "the model's own forward pass gives no numbers (NaN or infinity): its weights or numbers are damaged",
            field="model",
        )
    finite = torch.cat([rows[rows.isfinite()] for rows in logits])
    spread = (float(finite.std()) if len(finite) > 1 else 0.0) or 1.0
    return Reference(sequences, logits, spread, difference(disturbed, logits[-1], spread))


def require_same(worker: Worker, reference: Reference, architecture: str) -> None:
    """Run the reference's sequences through a worker and compare.

    Raises:
        Unsupported: its logits differ; the message contains the difference.
    """
    allowed = min(_ALLOWED_ALWAYS + _ALLOWED_NOISE * reference.noise, _ALLOWED_AT_MOST)
    worst = max(_differences(worker, reference))
    if worst > allowed:
        raise Unsupported(
            f"a model of type {architecture} is computed differently here than by transformers: its logits differ by "
            f"{worst:.2g} of their spread, and rounding explains at most {allowed:.2g} (--self-check off serves it "
            "anyway)"
        )


def difference(actual: torch.Tensor, expected: torch.Tensor, spread: float) -> float:
    """Return the root mean square difference of logits [rows, V] as a fraction of `spread`.

    It is the largest median over runs of `_RUN_ROWS` rows. A logit that is NaN in both is equal, one that is NaN in one
    of them differs infinitely.
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
                states=SliceStates(index if start else None, ((end - start, index),)),
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
    """Yield the slices (sequence, from, to) of each step: every token of every sequence once, in order."""
    cuts = [_cuts(length) for length in lengths]
    # The second sequence is one step behind the first, so that prefill and single tokens meet.
    for tick in range(max(index + len(spans) for index, spans in enumerate(cuts))):
        slices = [(index, *spans[tick - index]) for index, spans in enumerate(cuts) if 0 <= tick - index < len(spans)]
        if tick % 3:
            yield tuple(slices)
        else:
            yield from ((piece,) for piece in slices)


def _cuts(length: int) -> list[tuple[int, int]]:
    """Return two prefill chunks, single tokens and a last chunk of a sequence; a short one has fewer of them."""
    singles_from = max(2, length - _LAST_CHUNK - _SINGLE_TOKENS)
    last_from = max(singles_from, length - _LAST_CHUNK)
    edges = sorted({0, singles_from // 2, *range(singles_from, last_from + 1), length})
    return [span for span in pairwise(edges) if span[1] <= length]


def _block_tables(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Return block tables: the first sequence's blocks in ascending order, the second's in descending order."""
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
    """Make linear layers multiply with rounded weights within a `with` block; each is rounded when it is used."""
    kept: dict[nn.Linear, torch.Tensor] = {}

    def before(module: nn.Linear, _: object) -> None:
        assert round_weight is not None  # otherwise there are no hooks
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
    """Return the linear layers whose weights may be rounded: all except the head."""
    head = model.get_output_embeddings()
    return [module for module in model.modules() if type(module) is nn.Linear and module is not head]


@contextmanager
def _disturbed(model: PreTrainedModel, rounding: float) -> Iterator[None]:
    """Multiply the outputs of the model's smallest modules by 1 +- `rounding` within a `with` block."""
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
