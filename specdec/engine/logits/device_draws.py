"""Draws on the device alone, without reading a result to the host.

They are the same functions of the same keys as in `rows`, element by element, but take more arithmetic: noise for every
token instead of the few that may win. Called by `engine.drafting.multi_step`.
"""

from __future__ import annotations

import torch

from specdec.core.random import UNIFORM_BITS, DrawStream, philox4x32
from specdec.core.sparse import MAX_WEIGHT

#: Number of entries whose noise is computed at once; limits working memory.
_CHUNK = 1 << 21


def dense_coupled_scores(distributions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return log distribution + keyed Gumbel noise, float64 [R, V]; -inf where the distribution is 0.

    Equals `rows.coupled_scores` in every entry, without reading which entries have mass.

    Args:
        distributions: float64 [R, V].
        keys: int64 [R, 4].
    """
    num_rows, num_tokens = distributions.shape
    scores = distributions.log()
    key = keys[:, :, None].unbind(1)  # [R, 1] each
    num_pairs = max(1, _CHUNK // (2 * num_rows))
    for first in range(0, -(-num_tokens // 2), num_pairs):
        pairs = torch.arange(first, min(first + num_pairs, -(-num_tokens // 2)), device=distributions.device)
        low_seed, high_seed, turn, position = key
        words = philox4x32((turn, position, pairs[None, :], int(DrawStream.COUPLED)), (low_seed, high_seed))
        bits = torch.stack(((words[0] << 20) | (words[1] >> 12), (words[2] << 20) | (words[3] >> 12)), dim=-1)
        uniforms = bits.flatten(1).to(torch.float64).add_(0.5).mul_(2.0**-UNIFORM_BITS)
        noise = uniforms.log_().neg_().log_().neg_()
        part = slice(2 * first, min(2 * first + noise.shape[1], num_tokens))
        scores[:, part] += noise[:, : part.stop - part.start]
    return scores


def support_draws(masses: torch.Tensor, ids: torch.Tensor, coverage: float, words: torch.Tensor) -> torch.Tensor:
    """Return one token drawn from each row's support, int64 [R].

    Equals `core.sparse.draw_from_support` except for the rounding of a running sum.

    Args:
        masses: float64 [R, K] of each row's top tokens, in descending order.
        ids: int64 [R, K].
        coverage: share of the distribution that a support covers.
        words: int64 [R, 2]: upper and lower 32 bits of each row's random number.
    """
    sizes = (masses.cumsum(dim=-1) < coverage).sum(dim=-1) + 1
    weights = (masses / masses[:, :1] * MAX_WEIGHT).round().to(torch.int64)
    weights = weights.masked_fill(torch.arange(masses.shape[1], device=masses.device) >= sizes[:, None], 0)
    ids, order = ids.sort(dim=-1)
    reach = weights.gather(-1, order).cumsum(dim=-1)
    totals = reach[:, -1]  # below 2^26, so nothing wraps
    points = (words[:, 0] * totals + ((words[:, 1] * totals) >> 32)) >> 32
    # A row of NaNs gives an arbitrary entry, which must still be a token id.
    entries = (reach <= points[:, None]).sum(dim=-1, keepdim=True).clamp(max=ids.shape[1] - 1)
    return ids.gather(-1, entries)[:, 0]
