"""Token-wise rejection sampling on the sparse wire, in integers, and what every decision looks like.

Leviathan, Kalman, Matias 2023 (arXiv:2211.17192), algorithm 1, with p = target and q = draft, on laws cut and rounded
as docs/protocol.md section 3 says: exact for any q because q is what was sampled. Called by the coordinator once a
round. Laws (`acceptance_bound`, `residual_weights`) and draws are apart so that a round's law can be enumerated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.core.random import DrawKey, Stream, index_at
from specdec.errors import Internal
from specdec.types import LAW_TOTAL, LawRow, Support, TokenIds, TokenSource


@dataclass(frozen=True, slots=True)
class Decision:
    """What one round emits."""

    num_accepted: int
    """Accepted draft tokens, 0..L."""
    token_ids: tuple[int, ...]
    """The accepted tokens, then the corrected, bonus or target-only one: num_accepted + 1."""
    sources: tuple[TokenSource, ...]
    p: tuple[float, ...]
    """Target probability of each token after filters."""
    q: tuple[float, ...]
    """Probability each accepted token was drafted with; 0 for the final token, and where q never travelled."""

    @property
    def num_emitted(self) -> int:
        return len(self.token_ids)


def entry_of(token_id: int, support: Support) -> int:
    """Index of a draft token in its support.

    Raises:
        Internal: it is not there, so the proposal is not what was sampled.
    """
    entry = int(support.token_ids.searchsorted(token_id))
    if entry == len(support.token_ids) or int(support.token_ids[entry]) != token_id:
        raise Internal(f"draft token {token_id} is not in the support it came with")
    return entry


def acceptance_bound(entry: int, support: Support, row: LawRow) -> int:
    """The draft token is accepted iff U, uniform below 2^31, is below this; 0..2^31.

    `U * w < P * W` solved for U, so the acceptance probability is min(1, p/q) to within 2^-31.
    """
    weight = int(support.weights[entry])
    target = int(row.weights[entry]) * _total(support)
    return min(LAW_TOTAL, -(-target // weight))


def residual_weights(support: Support, row: LawRow) -> NDArray[np.int64]:
    """Weights of the corrected token, int64 [S + 1]: max(0, p - q) on the support, then the rest, which stands for z.

    Their sum is at most 2^62. Where p = q on all of it, p itself.
    """
    total = _total(support)
    target = row.weights.astype(np.int64)
    residual = target * total
    residual[:-1] -= support.weights.astype(np.int64) * LAW_TOTAL
    np.maximum(residual, 0, out=residual)
    return residual if residual.any() else target


def _total(support: Support) -> int:
    """W; `np.add.reduce` is what `sum` calls after looking at its arguments."""
    return int(np.add.reduce(support.weights, dtype=np.int64))


def verify_rejection(
    draft_token_ids: TokenIds | Sequence[int], supports: Sequence[Support], rows: Sequence[LawRow], key: DrawKey
) -> Decision:
    """Accepts draft tokens one by one, then draws the corrected or bonus token.

    Args:
        draft_token_ids: L tokens, each drawn from its support.
        supports: L supports.
        rows: L + 1 law rows, the last with an empty support.
        key: the round's draw key.

    Raises:
        Internal: a draft token is outside its support.
    """
    accepted_entries: list[int] = []
    for index, token_id in enumerate(draft_token_ids):
        support, row = supports[index], rows[index]
        entry = entry_of(int(token_id), support)
        if key.uint31(index, Stream.ACCEPT) >= acceptance_bound(entry, support, row):
            weights = residual_weights(support, row)
            final_entry = index_at(weights, key.below(int(weights.sum()), index, Stream.RESIDUAL))
            return decision_of(draft_token_ids, supports, rows, accepted_entries, final_entry)
        accepted_entries.append(entry)
    return decision_of(draft_token_ids, supports, rows, accepted_entries, 0)


def decision_of(
    draft_token_ids: TokenIds | Sequence[int],
    supports: Sequence[Support],
    rows: Sequence[LawRow],
    accepted_entries: Sequence[int],
    final_entry: int,
) -> Decision:
    """The decision that keeps the first draft tokens and ends with one entry of the next row.

    Args:
        draft_token_ids: as in `verify_rejection`, like `supports` and `rows`.
        supports: see above.
        rows: see above.
        accepted_entries: for each draft token kept, its index in its support.
        final_entry: entry of the row after those: an index into its support, or the size of it for z.
    """
    num_accepted = len(accepted_entries)
    token_ids = [int(token_id) for token_id in draft_token_ids[:num_accepted]]
    p = [int(row.weights[entry]) / LAW_TOTAL for entry, row in zip(accepted_entries, rows, strict=False)]
    q = [
        int(support.weights[entry]) / _total(support)
        for entry, support in zip(accepted_entries, supports, strict=False)
    ]
    last = rows[num_accepted]
    is_tail = final_entry == len(last.weights) - 1
    token_ids.append(last.tail_token_id if is_tail else int(supports[num_accepted].token_ids[final_entry]))
    p.append(last.tail_probability if is_tail else int(last.weights[final_entry]) / LAW_TOTAL)
    return Decision(
        num_accepted=num_accepted,
        token_ids=tuple(token_ids),
        sources=sources_of(len(draft_token_ids), num_accepted),
        p=tuple(p),
        q=(*q, 0.0),
    )


def sources_of(num_drafted: int, num_accepted: int) -> tuple[TokenSource, ...]:
    """Sources of a round's num_accepted + 1 tokens."""
    if num_drafted == 0:
        return (TokenSource.TARGET,)
    final = TokenSource.BONUS if num_accepted == num_drafted else TokenSource.CORRECTED
    return (TokenSource.ACCEPTED,) * num_accepted + (final,)
