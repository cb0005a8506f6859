"""The distribution of the number of accepted draft tokens of a round, from p and q (docs/protocol.md sections 3 and 9).

It is computed in float64 and apart from the decision in `specdec.core`, which it checks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.types import WEIGHT_TOTAL, DistributionRow, Mode, Support


def acceptance_probabilities(
    mode: Mode,
    draft_token_ids: Sequence[int],
    supports: Sequence[Support],
    rows: Sequence[DistributionRow],
    scale: float = 1.0,
) -> NDArray[np.float64]:
    """Return P(num_accepted = k) for k = 0..L, float64 [L + 1], along the drafted path.

    Args:
        mode: REJECTION or BLOCK.
        draft_token_ids: L tokens.
        supports: L supports with the weights of q.
        rows: distributions of the target at the L positions, or more.
        scale: factor on p.
    """
    p = [row.weights.astype(np.float64) * (scale / WEIGHT_TOTAL) for row in rows[: len(draft_token_ids)]]
    q = [support.weights.astype(np.float64) / int(support.weights.sum(dtype=np.int64)) for support in supports]
    places = [
        int(np.searchsorted(support.token_ids, token_id))
        for token_id, support in zip(draft_token_ids, supports, strict=True)
    ]
    ratios = [float(of_p[place] / of_q[place]) for of_p, of_q, place in zip(p, q, places, strict=True)]
    return _of_blocks(ratios, p, q) if mode is Mode.BLOCK else _of_tokens(ratios)


def _of_tokens(ratios: Sequence[float]) -> NDArray[np.float64]:
    """Return the probabilities where each token is accepted with min(1, p/q), given the tokens before it."""
    accepts = np.minimum(1.0, ratios)
    probabilities: NDArray[np.float64] = np.cumprod([1.0, *accepts]) * np.append(1.0 - accepts, 1.0)
    return probabilities


def _of_blocks(
    ratios: Sequence[float], p: Sequence[NDArray[np.float64]], q: Sequence[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return the probabilities where the longest prefix is accepted whose draw falls below its level h."""
    share, levels = 1.0, []
    for index, ratio in enumerate(ratios):
        share = min(1.0, share * ratio)
        if index + 1 == len(ratios) or share == 1.0:
            levels.append(share)
            continue
        of_p, of_q = share * p[index + 1], q[index + 1]
        excess = float(np.maximum(of_p[:-1] - of_q, 0.0).sum() + of_p[-1])
        levels.append(excess / (excess + 1.0 - share))
    rejects = 1.0 - np.array([1.0, *levels])
    longer_rejected = np.append(np.cumprod(rejects[:0:-1])[::-1], 1.0)
    probabilities: NDArray[np.float64] = np.array([1.0, *levels]) * longer_rejected
    return probabilities
