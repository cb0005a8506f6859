"""The number of accepted draft tokens that p and q of a round let expect (docs/protocol.md sections 3 and 9).

It is computed in float64 and apart from the decision in `specdec.core`, which it checks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.contract.types import WEIGHT_TOTAL, DistributionRow, Mode, Support


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
    p, q = _masses(supports, rows, scale)
    ratios = _ratios(draft_token_ids, supports, p, q)
    return _of_blocks(_levels(ratios, p, q)) if mode is Mode.BLOCK else _of_tokens(ratios)


def expected_acceptance(
    mode: Mode,
    num_accepted: int,
    draft_token_ids: Sequence[int],
    supports: Sequence[Support],
    rows: Sequence[DistributionRow],
) -> tuple[float, float]:
    """Return the mean and the variance of the number of accepted tokens if each draft token was drawn from its q.

    The mean is a sum over positions of sum(min(p, q)), with p scaled by the share of the path that p covers in block
    mode. It does not use which token was drawn. So a draft that draws from another distribution than q moves the
    number of accepted tokens away from the mean, although each token is accepted as p and q say.

    Args:
        mode: REJECTION or BLOCK.
        num_accepted: accepted draft tokens of the round.
        draft_token_ids: as in `acceptance_probabilities`, like `supports` and `rows`.
        supports: see above.
        rows: see above.
    """
    p, q = _masses(supports, rows)
    if mode is Mode.BLOCK:
        return _expected_of_blocks(_ratios(draft_token_ids, supports, p, q), p, q)
    tested = slice(min(num_accepted + 1, len(q)))
    accepts = [float(np.minimum(of_p[:-1], of_q).sum()) for of_p, of_q in zip(p[tested], q[tested], strict=True)]
    return sum(accepts), sum(accept * (1.0 - accept) for accept in accepts)


def _masses(
    supports: Sequence[Support], rows: Sequence[DistributionRow], scale: float = 1.0
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Return p of each row, its tail mass last, and q of each support."""
    p = [row.weights.astype(np.float64) * (scale / WEIGHT_TOTAL) for row in rows[: len(supports)]]
    q = [support.weights.astype(np.float64) / int(support.weights.sum(dtype=np.int64)) for support in supports]
    return p, q


def _ratios(
    draft_token_ids: Sequence[int],
    supports: Sequence[Support],
    p: Sequence[NDArray[np.float64]],
    q: Sequence[NDArray[np.float64]],
) -> list[float]:
    """Return p/q of each draft token."""
    places = [
        int(np.searchsorted(support.token_ids, token_id))
        for token_id, support in zip(draft_token_ids, supports, strict=True)
    ]
    return [float(of_p[place] / of_q[place]) for of_p, of_q, place in zip(p, q, places, strict=True)]


def _of_tokens(ratios: Sequence[float]) -> NDArray[np.float64]:
    """Return the probabilities if each token is accepted with min(1, p/q), given the tokens before it."""
    accepts = np.minimum(1.0, ratios)
    probabilities: NDArray[np.float64] = np.cumprod([1.0, *accepts]) * np.append(1.0 - accepts, 1.0)
    return probabilities


def _levels(ratios: Sequence[float], p: Sequence[NDArray[np.float64]], q: Sequence[NDArray[np.float64]]) -> list[float]:
    """Return h_1..h_L of block verification: a prefix is accepted on its own if its draw falls below its level."""
    share, levels = 1.0, []
    for index, ratio in enumerate(ratios):
        share = min(1.0, share * ratio)
        if index + 1 == len(ratios) or share == 1.0:
            levels.append(share)
            continue
        of_p, of_q = share * p[index + 1], q[index + 1]
        excess = float(np.maximum(of_p[:-1] - of_q, 0.0).sum() + of_p[-1])
        levels.append(excess / (excess + 1.0 - share))
    return levels


def _of_blocks(levels: Sequence[float]) -> NDArray[np.float64]:
    """Return the probabilities if the longest prefix is accepted whose draw falls below its level h."""
    rejects = 1.0 - np.array([1.0, *levels])
    longer_rejected = np.append(np.cumprod(rejects[:0:-1])[::-1], 1.0)
    probabilities: NDArray[np.float64] = np.array([1.0, *levels]) * longer_rejected
    return probabilities


def _expected_of_blocks(
    ratios: Sequence[float], p: Sequence[NDArray[np.float64]], q: Sequence[NDArray[np.float64]]
) -> tuple[float, float]:
    """Return mean and variance in block mode.

    Given the tokens up to i, a prefix of i tokens is accepted with probability c_i, whose mean over the draw of token i
    is sum(min(q, c_{i-1} p)). The number of accepted tokens less these means is a martingale over the draws and then
    the decision: token i moves its expectation by `effect` times the deviation of c_i, as also shorter prefixes gain.
    """
    levels = _levels(ratios, p, q)
    probabilities, counts = _of_blocks(levels), np.arange(len(ratios) + 1)
    mean, variance = 0.0, float(probabilities @ (counts - probabilities @ counts) ** 2)
    share, effect = 1.0, 0.0
    for index, ratio in enumerate(ratios):
        covered = np.minimum(q[index], share * p[index][:-1])
        effect = 1.0 + (1.0 - levels[index - 1]) * effect if index else 1.0
        mean += float(covered.sum())
        variance += effect**2 * max(0.0, float((covered**2 / q[index]).sum() - covered.sum() ** 2))
        share = min(1.0, share * ratio)
    return mean, variance
