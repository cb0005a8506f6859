"""Coupled and greedy rounds: draft and target choose independently, and the target's choices are emitted.

Gumbel coupling (Daliri, Musco, Ramesh 2024, arXiv:2408.07978): draft and target take argmax(log distribution + noise)
with noise keyed by seed, turn, absolute position and token id, so similar distributions choose the same token, and the
output depends on seed and target alone. Greedy is the same with one-hot distributions. No q travels. The decision
(`verify_choices`) goes back to `coordinator/round/runner`; engines choose with the torch version of `coupled_choice`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.contract.types import TokenIds
from specdec.core.rejection import Decision, sources_of


def verify_choices(
    draft_token_ids: TokenIds | Sequence[int],
    choice_token_ids: TokenIds | Sequence[int],
    choice_probabilities: NDArray[np.float64] | Sequence[float],
) -> Decision:
    """Accept draft tokens while they equal the target's choices; the last token is the target's choice.

    Args:
        draft_token_ids: L tokens.
        choice_token_ids: L + 1 tokens: the target's choice at each position of the drafted path.
        choice_probabilities: p of each choice.
    """
    num_accepted = 0
    for draft_token_id, choice_token_id in zip(draft_token_ids, choice_token_ids, strict=False):
        if int(draft_token_id) != int(choice_token_id):
            break
        num_accepted += 1
    return Decision(
        num_accepted=num_accepted,
        token_ids=tuple(int(token_id) for token_id in choice_token_ids[: num_accepted + 1]),
        sources=sources_of(len(draft_token_ids), num_accepted),
        p=tuple(float(probability) for probability in choice_probabilities[: num_accepted + 1]),
        q=(0.0,) * (num_accepted + 1),
    )
