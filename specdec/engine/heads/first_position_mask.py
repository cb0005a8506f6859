"""Attention of heads that masks position 0.

A head runs pairs (feature of position j - 1, token j). Training has no pair for position 0, which has no feature before
it; but a token's KV is in its own slot, and slot 0 would be read with all others. So keys and queries have a few extra
numbers. They add a large negative number to the scores of position 0, whose weight is then 0, and nothing to other
scores. Called by heads that attend.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from specdec.engine.heads.interface import HeadTokens
from specdec.engine.model.kv_cache import LayerShape

#: Count of extra numbers of keys and queries: one is used, the others keep rows aligned.
MARK = 8
#: Last extra number of the key at position 0, where queries have 1. It fits into float16.
UNSEEN = -30000.0


def marked_shape(shape: LayerShape) -> LayerShape:
    """Return the cache shape of a layer that attends by `attend_after_first`."""
    return LayerShape(shape.num_kv_heads, shape.key_dim + MARK, shape.value_dim + MARK)


def attend_after_first(
    tokens: HeadTokens, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Store keys and values of T tokens; attend to all positions up to each token's own, except position 0.

    Args:
        tokens: tokens with their positions.
        layer: index into the head's `kv_layers`.
        query: [T, heads, key_dim], positions encoded.
        key: [T, kv_heads, key_dim], positions encoded.
        value: [T, kv_heads, value_dim].
        scale: factor of the scores.

    Returns:
        [T, heads, value_dim]. The row of position 0 itself, which sees no other position, must not be used.
    """
    T, heads, key_dim = key.shape
    widths = [heads * (dim + MARK) for dim in (key_dim, value.shape[-1])]
    # Values get as many extra numbers as keys: some kernels need both to have the same length.
    rows = key.new_zeros(T, sum(widths))
    keys, values = rows[:, : widths[0]].view(T, heads, -1), rows[:, widths[0] :].view(T, heads, -1)
    keys[..., :key_dim], values[..., : value.shape[-1]] = key, value
    keys[..., -1] = ((tokens.positions == 0) * UNSEEN).unsqueeze(1)
    return tokens.attend(layer, pad(query, (0, MARK), value=1.0), rows, scale)[..., : value.shape[-1]]
