"""From laws to the wire, batched over the rows of a step: supports, law rows, coupled choices, logit rows.

The torch twins of `specdec.core.sparse` and `specdec.core.coupling` on `[R, V]` tensors of any device; what crosses to
the host is a few numbers a row. Everything that touches a law is float64. Not here: deciding what is accepted (that is
the coordinator's, in `specdec.core`). Called by the proposer and the verifier, which find all they need in this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec.core.random import UNIFORM_BITS, Stream, index_at_mass, locate_uniform, philox4x32, seed_words
from specdec.core.sparse import DEFAULT_COVERAGE, integer_weights, support_of_likeliest
from specdec.engine.laws import (
    LawContext,
    filtered_laws,
    greedy_choices,
    likeliest,
    processed_logits,
    row_and_column,
    split_batches,
)
from specdec.types import LawRow, LogitRow, Support, TokenIds

__all__ = [
    "LawContext",
    "coupled_choices",
    "coupled_scores",
    "cut_supports",
    "filtered_laws",
    "greedy_choices",
    "gumbel_noise",
    "law_rows",
    "likeliest",
    "logit_rows",
    "processed_logits",
    "split_batches",
]

#: Candidates a support is cut from before the whole of `s_max` is looked at.
_FIRST_CANDIDATES = 512

#: Tokens per partial sum when z is drawn.
_TAIL_BLOCK = 512

#: Entries whose noise is made at once: bounds working memory, and on a CPU keeps it in cache.
_NOISE_CHUNK_CPU = 1 << 16
_NOISE_CHUNK_ACCELERATOR = 1 << 23


def cut_supports(laws: torch.Tensor, s_max: int, coverage: float = DEFAULT_COVERAGE) -> list[tuple[Support, float]]:
    """Cuts each law (float64 [R, V]) to a support; the batched `specdec.core.sparse.cut_support`.

    Returns:
        R supports and the law mass outside each, 0..1.
    """
    s_max = min(s_max, laws.shape[-1])
    first = min(s_max, _FIRST_CANDIDATES)
    candidates = likeliest(laws, first, floor=0.0)
    masses, ids = (tensor.cpu().numpy() for tensor in candidates)  # [R, first]
    short = np.flatnonzero(masses.sum(axis=-1) < coverage) if first < s_max else np.empty(0, dtype=np.int64)
    supports = [support_of_likeliest(ids[row], masses[row], coverage) for row in range(len(masses))]
    if len(short):
        candidates = likeliest(laws[torch.as_tensor(short, device=laws.device)], s_max, floor=0.0)
        masses, ids = (tensor.cpu().numpy() for tensor in candidates)
        for index, row in enumerate(short):
            supports[row] = support_of_likeliest(ids[index], masses[index], coverage)
    return supports


def law_rows(laws: torch.Tensor, support_ids: Sequence[TokenIds], tail_uniforms: Sequence[float]) -> list[LawRow]:
    """p seen through supports, with one token drawn outside each; the batched `specdec.core.sparse.law_row`.

    Args:
        laws: float64 [R, V].
        support_ids: R ascending id arrays, empty at bonus positions.
        tail_uniforms: R uniforms in (0, 1).
    """
    num_rows, num_tokens = laws.shape
    where = row_and_column(laws, list(enumerate(support_ids)))
    on_support = np.split(laws[where].cpu().numpy(), np.cumsum([len(ids) for ids in support_ids])[:-1])
    # Sums per block, then inside the one block that is hit: one reading of the row, and a running sum on the host
    # that never rises over a token of mass 0, which a parallel scan does not promise.
    num_blocks = -(-num_tokens // _TAIL_BLOCK)
    outside = laws.new_zeros(num_rows, num_blocks * _TAIL_BLOCK)
    outside[:, :num_tokens] = laws
    outside[where] = 0.0
    blocks = outside.view(num_rows, num_blocks, _TAIL_BLOCK)
    block_masses = blocks.sum(dim=-1).cpu().numpy()  # [R, num_blocks]
    rests = block_masses.cumsum(axis=-1)[:, -1]
    hits = [
        locate_uniform(block_masses[row], tail_uniforms[row]) if rests[row] > 0.0 else (0, 0.0)
        for row in range(num_rows)
    ]
    hit_blocks = torch.tensor([block for block, _ in hits], device=laws.device)
    inside = blocks[torch.arange(num_rows, device=laws.device), hit_blocks].cpu().numpy()  # [R, _TAIL_BLOCK]
    rows = []
    for row, (block, point) in enumerate(hits):
        weights = integer_weights(on_support[row], float(rests[row]))
        if weights[-1] == 0:
            rows.append(LawRow(weights=weights, tail_token_id=-1, tail_probability=0.0))
            continue
        entry = index_at_mass(inside[row], point)
        rows.append(
            LawRow(weights, tail_token_id=block * _TAIL_BLOCK + entry, tail_probability=float(inside[row, entry]))
        )
    return rows


def coupled_choices(
    laws: torch.Tensor, seeds: Sequence[int], turns: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """argmax of log law + keyed Gumbel noise per row; the batched `specdec.core.coupling.coupled_choice`.

    Args:
        laws: float64 [R, V].
        seeds: R seeds, [0, 2^64).
        turns: R turn ordinals.
        positions: R absolute positions.

    Returns:
        The chosen ids and their probabilities.
    """
    choices = coupled_scores(laws, seeds, turns, positions).argmax(dim=-1)
    return choices.tolist(), laws.gather(-1, choices[:, None])[:, 0].tolist()


def coupled_scores(
    laws: torch.Tensor, seeds: Sequence[int], turns: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """log law + keyed Gumbel noise, float64 [R, V]; -inf where the law is 0. Arguments as in `coupled_choices`."""
    scores = torch.full_like(laws, -torch.inf)  # [R, V]
    rows, ids = laws.nonzero(as_tuple=True)  # noise only where there is mass
    keys = torch.tensor(
        [[*seed_words(seed), turn, position] for seed, turn, position in zip(seeds, turns, positions, strict=True)],
        dtype=torch.int64,
        device=laws.device,
    )  # [R, 4]
    chunk = _NOISE_CHUNK_CPU if laws.device.type == "cpu" else _NOISE_CHUNK_ACCELERATOR
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        where = (rows[part], ids[part])
        scores[where] = laws[where].log_() + gumbel_noise(keys[rows[part]], ids[part])
    return scores


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 [N]; `specdec.core.random.gumbel_noise` with a key per entry.

    Args:
        keys: int64 [N, 4]: low and high word of the seed, turn, position.
        token_ids: int64 [N]. Two ids of one pair (2j, 2j + 1) that stand together share a Philox block.
    """
    pairs = torch.cat((keys, (token_ids >> 1)[:, None]), dim=-1)  # [N, 5]
    is_new = torch.ones(len(pairs), dtype=torch.bool, device=pairs.device)
    is_new[1:] = (pairs[1:] != pairs[:-1]).any(dim=-1)
    low_seed, high_seed, turn, position, pair = pairs[is_new].unbind(-1)
    words = philox4x32((turn, position, pair, int(Stream.COUPLED)), (low_seed, high_seed))
    bits = torch.stack(((words[0] << 20) | (words[1] >> 12), (words[2] << 20) | (words[3] >> 12)))  # [2, pairs]
    uniforms = bits.to(torch.float64).add_(0.5).mul_(2.0**-UNIFORM_BITS)
    noise = uniforms.log_().neg_().log_().neg_()
    return noise[token_ids & 1, is_new.cumsum(dim=0) - 1]


def logit_rows(
    logits: torch.Tensor, support_ids: Sequence[TokenIds], tail_ids: Sequence[int], num_logprobs: int
) -> list[LogitRow]:
    """Raw logits for logprobs, before filters.

    Args:
        logits: float32 [R, V].
        support_ids: R ascending id arrays; empty ones in greedy and coupled rounds.
        tail_ids: R ids, of z or of the choice; -1 where absent.
        num_logprobs: how many of the likeliest to add, 0..V.
    """
    num_rows = len(logits)
    where = row_and_column(logits, list(enumerate(support_ids)))
    on_support = np.split(logits[where].cpu().numpy(), np.cumsum([len(ids) for ids in support_ids])[:-1])
    tails = torch.tensor(tail_ids, device=logits.device)
    tail_logits = logits[torch.arange(num_rows, device=logits.device), tails.clamp(min=0)].tolist()
    logsumexps = logits.to(torch.float64).logsumexp(dim=-1).tolist()
    if num_logprobs:
        top_logits, top_ids = (t.cpu().numpy() for t in likeliest(logits, num_logprobs, floor=-torch.inf))
    else:
        top_logits, top_ids = np.empty((num_rows, 0), dtype=np.float32), np.empty((num_rows, 0), dtype=np.int64)
    return [
        LogitRow(
            support_logits=on_support[row],
            tail_logit=tail_logits[row] if tail_ids[row] >= 0 else 0.0,
            logsumexp=logsumexps[row],
            top_token_ids=top_ids[row].astype(np.uint32),
            top_logits=top_logits[row],
        )
        for row in range(num_rows)
    ]
