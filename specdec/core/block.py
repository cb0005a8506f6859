"""Block verification: draft tokens are accepted together, which never accepts fewer than token-wise rejection.

Sun et al. 2024 (arXiv:2403.10444), algorithm 2, on the sparse wire of docs/protocol.md section 3, in float64 over the
same integers. The decision goes back to `coordinator/round/runner`, like one of `rejection`. Acceptance draws are read
and then discarded; the next round does not depend on them, because draws are keyed by the round's start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.contract.types import WEIGHT_TOTAL, DistributionRow, Support, TokenIds
from specdec.core.random import DrawKey, DrawStream, index_at_uniform
from specdec.core.rejection import Decision, decision_of, entry_of


def acceptance_levels(
    draft_token_ids: TokenIds | Sequence[int], supports: Sequence[Support], rows: Sequence[DistributionRow]
) -> tuple[list[float], list[float]]:
    """Return c_0..c_L and h_1..h_L along the drafted path.

    c_i = min(1, c_{i-1} P_i(x_i) / Q_i(x_i)) is the share of the path's draft mass that p covers; h_i the probability
    with which a prefix of i tokens is accepted on its own. 0 <= c_i, h_i <= 1.

    Raises:
        Internal: a draft token is outside its support.
    """
    shares = [1.0]
    for token_id, support, row in zip(draft_token_ids, supports, rows, strict=False):
        entry = entry_of(int(token_id), support)
        target = int(row.weights[entry]) * int(support.weights.sum(dtype=np.int64))
        shares.append(min(1.0, shares[-1] * (target / (int(support.weights[entry]) * WEIGHT_TOTAL))))
    levels = []
    for index in range(1, len(draft_token_ids)):
        share = shares[index]
        excess = float(block_residual_weights(share, supports[index], rows[index]).sum())
        # With c = 1 the formula is D / D, or its limit if D = 0: the prefix is accepted either way.
        levels.append(1.0 if share == 1.0 else excess / (excess + 1.0 - share))
    return shares, levels + shares[-1:] if len(draft_token_ids) else levels


def block_residual_weights(share: float, support: Support, row: DistributionRow) -> NDArray[np.float64]:
    """Return max(0, c P - Q) over the support, then c times the tail mass: float64 [S + 1], unnormalised."""
    weights = row.weights * (share / WEIGHT_TOTAL)
    weights[:-1] -= support.weights / int(support.weights.sum(dtype=np.int64))
    positive: NDArray[np.float64] = np.maximum(weights, 0.0)
    return positive


def verify_block(
    draft_token_ids: TokenIds | Sequence[int],
    supports: Sequence[Support],
    rows: Sequence[DistributionRow],
    key: DrawKey,
) -> Decision:
    """Accept the longest prefix whose draw permits it, then draw the corrected or bonus token.

    Args:
        draft_token_ids: L tokens, each drawn from its support.
        supports: L supports.
        rows: L + 1 distribution rows, the last with an empty support.
        key: the round's draw key.

    Raises:
        Internal: a draft token is outside its support.
    """
    num_drafted = len(draft_token_ids)
    shares, levels = acceptance_levels(draft_token_ids, supports, rows)
    num_accepted = 0
    for num_prefix in range(num_drafted, 0, -1):
        if key.uniform(num_prefix - 1, DrawStream.ACCEPT) < levels[num_prefix - 1]:
            num_accepted = num_prefix
            break
    if num_accepted == num_drafted:
        return decision_of(draft_token_ids, supports, rows, num_accepted, 0)
    weights = block_residual_weights(shares[num_accepted], supports[num_accepted], rows[num_accepted])
    if not weights.any():  # possible by rounding only: such a prefix is rejected with probability 0
        weights = rows[num_accepted].weights.astype(np.float64)
    entry = index_at_uniform(weights, key.uniform(num_accepted, DrawStream.RESIDUAL))
    return decision_of(draft_token_ids, supports, rows, num_accepted, entry)
