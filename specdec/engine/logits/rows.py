"""Reduction of a step's distributions to the wire's forms: supports, distribution rows, coupled choices, logit rows.

These are the PyTorch counterparts of `specdec.core.sparse` and `specdec.core.coupling` for `[R, V]` tensors on any
device; only a few numbers per row are copied to the host. Everything that touches a distribution is float64. A round's
distributions come from `specdec.engine.logits.filters` and go into the answer with which the program finishes its job;
`specdec.engine.loop.delivery` returns the answer to the event loop. Called by `specdec.engine.drafting` and the target
service's `program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.contract.types import DistributionRow, LogitRow, Support, TokenIds
from specdec.core.random import UNIFORM_BITS, DrawStream, index_at_mass, locate_uniform, philox4x32, seed_words
from specdec.core.sparse import DEFAULT_COVERAGE, integer_shares, integer_weights, support_of_top
from specdec.engine.logits import kernel_choices
from specdec.engine.logits.filters import stable_topk
from specdec.engine.logits.penalties import row_and_column
from specdec.engine.logits.transfer import to_device, to_host

#: Number of top tokens that a support is cut from first, before all `s_max`.
FIRST_CANDIDATES = 512

#: Number of tokens per partial sum when the tail token is drawn.
_TAIL_BLOCK = 512

#: Number of token pairs whose noise is bounded at once; limits working memory, and on a CPU keeps it in the cache.
_NOISE_CHUNK_CPU = 1 << 14
_NOISE_CHUNK_ACCELERATOR = 1 << 22

#: Up to this many entries, finding the possible winners costs more than the logarithms that it saves.
_FEW_ENTRIES = 1 << 13

#: A distribution with mass on less than this fraction of the tokens (one in four) is processed entry by entry.
_SPARSE_ONE_IN = 4

#: Relative slack of the bound; rounding errors are about 1e-14.
_BOUND_SLACK = 1e-9

_WORD_RANGE = float(1 << 32)
# 1 - u is at least half a step of the 52-bit grid: 2^-53, in units of 2^-32.
_SMALLEST_GAP = 2.0**-21


def cut_supports(
    distributions: torch.Tensor, s_max: int, coverage: float = DEFAULT_COVERAGE
) -> list[tuple[Support, float]]:
    """Cut each distribution (float64 [R, V]) to a support; the batched `specdec.core.reference.cut_support`.

    Returns:
        R supports and the distribution mass outside each, 0..1.
    """
    s_max = min(s_max, distributions.shape[-1])
    if s_max > FIRST_CANDIDATES and distributions.device.type == "cpu":
        return [_cut_by_mass(distribution, s_max, coverage) for distribution in distributions.numpy()]
    first = min(s_max, FIRST_CANDIDATES)
    candidates = stable_topk(distributions, first, floor=0.0)
    masses, ids = to_host(*candidates)  # [R, first]
    short = np.flatnonzero(masses.sum(axis=-1) < coverage) if first < s_max else np.empty(0, dtype=np.int64)
    supports = [support_of_top(ids[row], masses[row], coverage) for row in range(len(masses))]
    if len(short):
        masses, ids = to_host(
            *stable_topk(distributions[to_device(short, distributions.device, torch.int64)], s_max, floor=0.0)
        )
        for index, row in enumerate(short):
            supports[row] = support_of_top(ids[index], masses[index], coverage)
    return supports


def _cut_by_mass(distribution: NDArray[np.float64], s_max: int, coverage: float) -> tuple[Support, float]:
    """Cut a distribution [V] on the host to a wide support, as `specdec.core.reference.cut_support`.

    Sorting masses is about ten times faster than sorting ids by mass. The ids follow from one comparison with the
    smallest mass of the support.
    """
    # The tokens below this mass together have less than half of the mass that need not be covered.
    masses = np.sort(distribution[distribution > (1.0 - coverage) / (2 * len(distribution))])[::-1][:s_max]
    masses = masses[: int(np.searchsorted(np.cumsum(masses), coverage)) + 1]
    # Tokens whose weight rounds to 0 are at the end.
    masses = masses[: int(np.count_nonzero(integer_shares(masses, masses[0])))]
    ids = np.flatnonzero(distribution >= masses[-1])
    if len(ids) > len(masses):  # of the tokens that tie at the cut, keep the lower ids
        at_cut = np.flatnonzero(distribution[ids] == masses[-1])
        ids = np.delete(ids, at_cut[len(masses) - len(ids) :])
    support = Support(token_ids=ids.astype(np.uint32), weights=integer_shares(distribution[ids], masses[0]))
    return support, max(0.0, 1.0 - float(masses.sum()))


def distribution_rows(
    distributions: torch.Tensor, support_ids: Sequence[TokenIds], tail_uniforms: Sequence[float]
) -> list[DistributionRow]:
    """Return p restricted to each support, with one tail token drawn outside it.

    This is the batched `specdec.core.reference.distribution_row`.

    Args:
        distributions: float64 [R, V].
        support_ids: R ascending id arrays, empty at bonus positions.
        tail_uniforms: R uniforms in (0, 1).
    """
    num_rows, num_tokens = distributions.shape
    where = row_and_column(distributions, list(enumerate(support_ids)))
    # Sums per block, then a running sum inside the block that is hit. The running sum is computed on the host because
    # it must not rise over a token of mass 0, which a parallel scan does not guarantee.
    num_blocks = -(-num_tokens // _TAIL_BLOCK)
    outside = distributions.new_zeros(num_rows, num_blocks * _TAIL_BLOCK)
    outside[:, :num_tokens] = distributions
    # A Python zero would be copied to the device, and the copy would wait for the device's work.
    outside.index_put_(where, outside.new_zeros(()))
    blocks = outside.view(num_rows, num_blocks, _TAIL_BLOCK)
    on_supports, block_masses = to_host(distributions[where], blocks.sum(dim=-1))  # [all supports], [R, num_blocks]
    on_support = np.split(on_supports, np.cumsum([len(ids) for ids in support_ids])[:-1])
    tail_masses = block_masses.cumsum(axis=-1)[:, -1]
    hits = [
        locate_uniform(block_masses[row], tail_uniforms[row]) if tail_masses[row] > 0.0 else (0, 0.0)
        for row in range(num_rows)
    ]
    hit_blocks = to_device([block for block, _ in hits], distributions.device, torch.int64)
    (inside,) = to_host(blocks[torch.arange(num_rows, device=distributions.device), hit_blocks])  # [R, _TAIL_BLOCK]
    rows = []
    for row, (block, point) in enumerate(hits):
        weights = integer_weights(on_support[row], float(tail_masses[row]))
        if weights[-1] == 0:
            rows.append(DistributionRow(weights=weights, tail_token_id=-1, tail_probability=0.0))
            continue
        entry = index_at_mass(inside[row], point)
        rows.append(
            DistributionRow(
                weights, tail_token_id=block * _TAIL_BLOCK + entry, tail_probability=float(inside[row, entry])
            )
        )
    return rows


def coupled_choices(
    distributions: torch.Tensor, seeds: Sequence[int], turns: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Return the argmax of log distribution + keyed Gumbel noise of each row.

    This is the batched `specdec.core.reference.coupled_choice`.

    Args:
        distributions: float64 [R, V].
        seeds: R seeds, [0, 2^64).
        turns: R turn ordinals.
        positions: R absolute positions.

    Returns:
        The chosen ids and their probabilities.
    """
    choices = kernel_choices.coupled_choices(distributions, seeds, turns, positions)
    if choices is not None:
        return choices.tolist(), distributions.numpy()[np.arange(len(choices)), choices].tolist()
    keys = noise_keys(seeds, turns, positions, distributions.device)
    rows, ids = _possible_winners(distributions, keys)
    entries = to_host(rows, ids, _entry_scores(distributions, keys, rows, ids), distributions[rows, ids])
    row_of, id_of, scores, probabilities = entries
    first = np.searchsorted(row_of, np.arange(len(distributions) + 1))
    winners = [start + int(np.argmax(scores[start:end])) for start, end in pairwise(first)]
    return id_of[winners].tolist(), probabilities[winners].tolist()


def coupled_scores(
    distributions: torch.Tensor, seeds: Sequence[int], turns: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Return log distribution + keyed Gumbel noise, float64 [R, V]; -inf where the distribution is 0.

    The arguments are those of `coupled_choices`, which needs fewer logarithms if only the winner is wanted.
    """
    keys = noise_keys(seeds, turns, positions, distributions.device)
    scores = torch.full_like(distributions, -torch.inf)
    rows, ids = distributions.nonzero(as_tuple=True)  # noise only where there is mass
    chunk = _NOISE_CHUNK_CPU if distributions.device.type == "cpu" else _NOISE_CHUNK_ACCELERATOR
    for start in range(0, len(rows), chunk):
        row, token_ids = rows[start : start + chunk], ids[start : start + chunk]
        scores[row, token_ids] = _entry_scores(distributions, keys, row, token_ids)
    return scores


def noise_keys(
    seeds: Sequence[int], turns: Sequence[int], positions: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return the key of each row's noise, int64 [R, 4]: low and high word of the seed, turn, position."""
    keys = [[*seed_words(seed), turn, position] for seed, turn, position in zip(seeds, turns, positions, strict=True)]
    return to_device(keys, device, torch.int64)


def _possible_winners(distributions: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and ids of the entries that may win their row, ordered by row and id; at least one per row."""
    if distributions.numel() <= _FEW_ENTRIES:
        rows, ids = distributions.nonzero(as_tuple=True)
        return rows, ids
    bounds = _score_bounds(distributions, keys)  # [R, V]
    likely = bounds.argmax(dim=-1)
    reached = _entry_scores(
        distributions, keys, torch.arange(len(distributions), device=distributions.device), likely
    ).exp_()
    # No other token can win. The slack covers rounding, also in the exponential.
    rows, ids = (bounds >= (reached * (1.0 - _BOUND_SLACK))[:, None]).nonzero(as_tuple=True)
    return rows, ids


def _entry_scores(
    distributions: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Return log distribution + noise of single entries, float64 [N].

    Args:
        distributions: float64 [R, V].
        keys: int64 [R, 4].
        rows: int64 [N].
        token_ids: int64 [N].
    """
    return distributions[rows, token_ids].log_() + gumbel_noise(keys[rows], token_ids)


def _score_bounds(distributions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return an upper bound of exp(log distribution + noise), float64 [R, V]; 0 where the distribution is 0.

    exp(noise) = 1 / -log(u) <= 1 / (1 - u), which needs no logarithm. It is tight for u near 1, where tokens win.
    """
    num_tokens = distributions.shape[-1]
    bounds = torch.zeros_like(distributions)
    chunk = _NOISE_CHUNK_CPU if distributions.device.type == "cpu" else _NOISE_CHUNK_ACCELERATOR
    is_sparse = (distributions > 0).sum(dim=-1) * _SPARSE_ONE_IN < num_tokens
    rows, ids = ((distributions > 0) & is_sparse[:, None]).nonzero(as_tuple=True)
    for start in range(0, len(rows), chunk):
        row, token_ids = rows[start : start + chunk], ids[start : start + chunk]
        even, odd = _gaps(keys[row].unbind(-1), token_ids >> 1)
        bounds[row, token_ids] = distributions[row, token_ids] / torch.where((token_ids & 1).bool(), odd, even)
    dense = (~is_sparse).nonzero()[:, 0]
    pairs = torch.arange(-(-num_tokens // 2), device=distributions.device)
    at_once = max(1, chunk // len(pairs))
    for first in range(0, len(dense), at_once):
        row = dense[first : first + at_once]
        words = keys[row][:, None, :].unbind(-1)  # [rows, 1] each
        for start in range(0, len(pairs), chunk):
            end = min(start + chunk, len(pairs))
            gaps = torch.stack(_gaps(words, pairs[None, start:end]), dim=-1).flatten(1)  # [rows, tokens]
            part = slice(2 * start, min(2 * end, num_tokens))
            bounds[row, part] = distributions[row, part] / gaps[:, : part.stop - part.start]
    return bounds


def _gaps(key: Sequence[torch.Tensor], pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a lower bound of 1 - u for the even and the odd id of each pair, float64, never 0.

    It follows from the upper 32 of the 52 bits. `key` is the seed's low and high word, turn and position.
    """
    low_seed, high_seed, turn, position = key
    words = philox4x32((turn, position, pairs, int(DrawStream.COUPLED)), (low_seed, high_seed))
    even, odd = (
        words[index].neg().to(torch.float64).add_(_WORD_RANGE - 1.0 + _SMALLEST_GAP).mul_(1.0 / _WORD_RANGE)
        for index in (0, 2)
    )
    return even, odd


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float64 [N]: `specdec.core.random.gumbel_noise` with one key per entry.

    Args:
        keys: int64 [N, 4]: low and high word of the seed, turn, position.
        token_ids: int64 [N]. Adjacent ids of one pair (2j, 2j + 1) share a Philox block.
    """
    pairs = torch.cat((keys, (token_ids >> 1)[:, None]), dim=-1)  # [N, 5]
    is_new = torch.ones(len(pairs), dtype=torch.bool, device=pairs.device)
    is_new[1:] = (pairs[1:] != pairs[:-1]).any(dim=-1)
    low_seed, high_seed, turn, position, pair = pairs[is_new].unbind(-1)
    words = philox4x32((turn, position, pair, int(DrawStream.COUPLED)), (low_seed, high_seed))
    bits = torch.stack(((words[0] << 20) | (words[1] >> 12), (words[2] << 20) | (words[3] >> 12)))  # [2, pairs]
    uniforms = bits.to(torch.float64).add_(0.5).mul_(2.0**-UNIFORM_BITS)
    noise = uniforms.log_().neg_().log_().neg_()
    return noise[token_ids & 1, is_new.cumsum(dim=0) - 1]


def logit_rows(
    logits: torch.Tensor, support_ids: Sequence[TokenIds], tail_ids: Sequence[int], num_logprobs: int
) -> list[LogitRow]:
    """Return the raw logits for logprobs, before penalties and filters.

    Args:
        logits: float32 [R, V].
        support_ids: R ascending id arrays; empty ones in greedy and coupled rounds.
        tail_ids: R ids of the tail token or of the choice; -1 if absent.
        num_logprobs: number of top tokens to add, 0..V.
    """
    num_rows = len(logits)
    where = row_and_column(logits, list(enumerate(support_ids)))
    tail_columns = to_device(tail_ids, logits.device, torch.int64).clamp(min=0)
    top = stable_topk(logits, num_logprobs, floor=-torch.inf) if num_logprobs else ()
    on_supports, tail_logits, logsumexps, *tops = to_host(
        logits[where],
        logits[torch.arange(num_rows, device=logits.device), tail_columns],
        logits.to(torch.float64).logsumexp(dim=-1),
        *top,
    )
    on_support = np.split(on_supports, np.cumsum([len(ids) for ids in support_ids])[:-1])
    top_logits, top_ids = tops or (np.empty((num_rows, 0), np.float32), np.empty((num_rows, 0), np.int64))
    return [
        LogitRow(
            support_logits=on_support[row],
            tail_logit=float(tail_logits[row]) if tail_ids[row] >= 0 else 0.0,
            logsumexp=float(logsumexps[row]),
            top_token_ids=top_ids[row].astype(np.uint32),
            top_logits=top_logits[row],
        )
        for row in range(num_rows)
    ]
