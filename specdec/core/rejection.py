"""Token-wise rejection sampling on the sparse wire, in integers, and the type of every decision.

Leviathan, Kalman, Matias 2023 (arXiv:2211.17192), algorithm 1, with p = target and q = draft, on distributions that are
cut and rounded as in docs/protocol.md section 3. It is exact for any q, because q is the distribution that was sampled.
A round's draft and its verification come from `coordinator/round/runner`, and its decision goes back there. The
probabilities (`acceptance_bound`, `residual_weights`) are separate from the draws, so that the distribution of a
round's output can be enumerated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Internal
from specdec.contract.types import WEIGHT_TOTAL, DistributionRow, Support, TokenIds, TokenSource
from specdec.core.packed import PackedRows, PackedSupports, pack_rows, pack_supports
from specdec.core.random import DrawKey, DrawStream


class Decision(NamedTuple):
    """The tokens that one round emits."""

    num_accepted: int
    """Accepted draft tokens, 0..L."""
    token_ids: tuple[int, ...]
    """The accepted tokens, then the corrected, bonus or target-only one: num_accepted + 1."""
    sources: tuple[TokenSource, ...]
    p: tuple[float, ...]
    """Target probability of each token after filters."""
    q: tuple[float, ...]
    """Probability with which each accepted token was drafted; 0 for the final token, and if q did not travel."""


def entry_of(token_id: int, support: Support) -> int:
    """Return the index of a draft token in its support.

    Raises:
        Internal: it is not there, so the proposal does not describe what was sampled.
    """
    entry = int(support.token_ids.searchsorted(token_id))
    if entry == len(support.token_ids) or int(support.token_ids[entry]) != token_id:
        raise Internal(f"draft token {token_id} is not in its own support")
    return entry


def acceptance_bound(entry: int, support: Support, row: DistributionRow) -> int:
    """Return the bound, 0..2^31: the draft token is accepted iff U, uniform below 2^31, is below it.

    `U * w < P * W` solved for U, so the acceptance probability is min(1, p/q) to within 2^-31.
    """
    return _bound(int(row.weights[entry]), _total(support), int(support.weights[entry]))


def _bound(target: int, total: int, weight: int) -> int:
    """Return the bound for P of the draft token, W and w."""
    return min(WEIGHT_TOTAL, -(-target * total // weight))


def residual_weights(support: Support, row: DistributionRow) -> NDArray[np.int64]:
    """Return the weights of the corrected token, int64 [S + 1]: max(0, p - q) on the support, then the tail mass.

    The last entry stands for the tail token. The sum is at most 2^62. If p = q everywhere, the weights are p itself.
    """
    return _residual(support.weights, _total(support), row.weights)


def _residual(drafting: NDArray[np.uint16], total: int, target: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the residual from the support's weights, their sum W, and the row's weights."""
    residual = target.astype(np.int64)
    residual *= total
    residual[:-1] -= drafting.astype(np.int64) * WEIGHT_TOTAL
    np.maximum(residual, 0, out=residual)
    return residual if residual.any() else target.astype(np.int64)


def _total(support: Support) -> int:
    """Return W; `np.add.reduce` is faster than `sum`, which calls it after checking its arguments."""
    return int(np.add.reduce(support.weights, dtype=np.int64))


def verify_rejection(
    draft_token_ids: TokenIds | Sequence[int],
    supports: Sequence[Support],
    rows: Sequence[DistributionRow],
    key: DrawKey,
) -> Decision:
    """Accept draft tokens one by one, then draw the corrected or bonus token.

    Args:
        draft_token_ids: L tokens, each drawn from its support.
        supports: L supports.
        rows: L + 1 distribution rows, the last with an empty support.
        key: the round's draw key.

    Raises:
        Internal: a draft token is outside its support.
    """
    drafted = list(map(int, draft_token_ids))
    packed, targets = pack_supports(drafted, supports), pack_rows(rows)
    on_drafts = targets.weights[packed.row_entries].tolist()
    accepts = key.uint31s(len(drafted), DrawStream.ACCEPT)
    num_accepted, final_entry = len(drafted), 0
    for index, draw in enumerate(accepts):
        if draw >= _bound(on_drafts[index], packed.totals[index], packed.weights_drawn[index]):
            start, size = packed.ids.starts[index], packed.ids.sizes[index]
            drafting = packed.weights[start : start + size]
            reach = _residual(drafting, packed.totals[index], targets.row_weights(index)).cumsum()
            num_accepted = index
            final_entry = int(reach.searchsorted(key.below(int(reach[-1]), index, DrawStream.RESIDUAL), side="right"))
            break
    return _decision(drafted, packed, targets, on_drafts, num_accepted, final_entry)


def decision_of(
    draft_token_ids: TokenIds | Sequence[int],
    supports: Sequence[Support],
    rows: Sequence[DistributionRow],
    num_accepted: int,
    final_entry: int,
) -> Decision:
    """Return the decision that keeps the first draft tokens and ends with one entry of the next row.

    Args:
        draft_token_ids: as in `verify_rejection`, like `supports` and `rows`.
        supports: see above.
        rows: see above.
        num_accepted: draft tokens kept.
        final_entry: entry of the row after those: an index into its support, or the support's size for the tail token.
    """
    drafted = list(map(int, draft_token_ids))
    packed, targets = pack_supports(drafted, supports), pack_rows(rows)
    on_drafts = targets.weights[packed.row_entries].tolist()
    return _decision(drafted, packed, targets, on_drafts, num_accepted, final_entry)


def _decision(
    drafted: list[int],
    supports: PackedSupports,
    rows: PackedRows,
    on_drafts: Sequence[int],
    num_accepted: int,
    final_entry: int,
) -> Decision:
    """Return the decision; `on_drafts`: P of each draft token."""
    weights = rows.row_weights(num_accepted)
    if final_entry == len(weights) - 1:
        token_id, probability = rows.tail_token_ids[num_accepted], rows.tail_probabilities[num_accepted]
    else:
        token_id = int(supports.ids[num_accepted][final_entry])
        probability = int(weights[final_entry]) / WEIGHT_TOTAL
    q = [supports.weights_drawn[index] / supports.totals[index] for index in range(num_accepted)]
    return Decision(
        num_accepted=num_accepted,
        token_ids=(*drafted[:num_accepted], token_id),
        sources=sources_of(len(drafted), num_accepted),
        p=(*(target / WEIGHT_TOTAL for target in on_drafts[:num_accepted]), probability),
        q=(*q, 0.0),
    )


def sources_of(num_drafted: int, num_accepted: int) -> tuple[TokenSource, ...]:
    """Return the sources of a round's num_accepted + 1 tokens."""
    if num_drafted == 0:
        return (TokenSource.TARGET,)
    final = TokenSource.BONUS if num_accepted == num_drafted else TokenSource.CORRECTED
    return (TokenSource.ACCEPTED,) * num_accepted + (final,)
