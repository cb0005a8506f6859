"""Attention of heads whose first pair does not exist: nobody may attend to position 0.

A head runs pairs (feature of position j - 1, token j). Trained heads have never seen one for position 0, which has no
feature before it; but KV lies in the slot of its token, and slot 0 would be read with all others. So keys and queries
carry a few numbers more: they add nothing to any score but those of position 0, which no softmax survives. Called by
heads that attend.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from specdec.engine.heads.base import HeadTokens
from specdec.engine.model.kv_cache import LayerShape

#: Numbers by which keys and queries are longer: one of them is used, more keep rows aligned.
MARK = 8
#: Of the key at position 0, where queries have 1. float16 holds it.
UNSEEN = -30000.0


def marked_shape(shape: LayerShape) -> LayerShape:
    """What the cache must hold of a layer that attends by `attend_after_first`."""
    return LayerShape(shape.num_kv_heads, shape.key_dim + MARK, shape.value_dim + MARK)


def attend_after_first(
    tokens: HeadTokens, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Stores keys and values of T tokens and attends to all positions up to each token's but the first.

    Args:
        tokens: where they stand.
        layer: index into the head's `kv_layers`.
        query: [T, heads, key_dim], positions encoded.
        key: [T, kv_heads, key_dim], likewise.
        value: [T, kv_heads, value_dim].
        scale: multiplies the scores.

    Returns:
        [T, heads, value_dim]; at position 0 itself, which sees nothing, the row means nothing.
    """
    T, heads, key_dim = key.shape
    widths = [heads * (dim + MARK) for dim in (key_dim, value.shape[-1])]
    # Values are as much longer as keys: some kernels ask for both to be of one length.
    rows = key.new_zeros(T, sum(widths))
    keys, values = rows[:, : widths[0]].view(T, heads, -1), rows[:, widths[0] :].view(T, heads, -1)
    keys[..., :key_dim], values[..., : value.shape[-1]] = key, value
    keys[..., -1] = ((tokens.positions == 0) * UNSEEN).unsqueeze(1)
    return tokens.attend(layer, pad(query, (0, MARK), value=1.0), rows, scale)[..., : value.shape[-1]]
