"""The sparse wire: distributions as integers over a small support (docs/protocol.md section 3).

The draft cuts its distribution to a support of uint16 weights and draws from exactly those weights. The target answers
p over that support and the tail mass as uint32 weights that sum to 2^31, with one token drawn from the tail.
`rejection` and `block` decide on these integers; `specdec.rpc` encodes them. `specdec.engine.logits` computes the same
in torch and shares `support_of_top` and `integer_weights`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Internal
from specdec.contract.types import MAX_SUPPORT, WEIGHT_TOTAL, Support
from specdec.core.packed import PackedSupports
from specdec.core.random import DrawKey, DrawStream, index_at

#: Support entries of larger vocabularies.
LARGE_VOCABULARY_SUPPORT = 64

#: Probability mass that a support should cover.
DEFAULT_COVERAGE = 0.99

#: Weight of a support's top token.
MAX_WEIGHT = (1 << 16) - 1


def default_s_max(vocabulary_size: int) -> int:
    """Return the largest number of support entries for a vocabulary of this size."""
    return LARGE_VOCABULARY_SUPPORT if vocabulary_size > MAX_SUPPORT else vocabulary_size


def support_of_top(token_ids: NDArray[np.int64], masses: NDArray[np.float64], coverage: float) -> tuple[Support, float]:
    """Return the support among candidates in descending order, and the mass outside it.

    `masses` is float64 [K], parallel to `token_ids`, int64 [K].
    """
    size = int(np.searchsorted(np.cumsum(masses), coverage)) + 1
    masses = masses[:size]
    weights = integer_shares(masses, masses[0])
    # The candidates descend, so those that round to 0 are the last.
    kept = int(np.count_nonzero(weights))
    ascending = np.argsort(token_ids[:kept])
    support = Support(token_ids=token_ids[ascending].astype(np.uint32), weights=weights[ascending])
    return support, max(0.0, 1.0 - float(masses[:kept].sum()))


def integer_shares(masses: NDArray[np.float64], largest: float) -> NDArray[np.uint16]:
    """Return the weights of a support's masses, as shares of the largest: uint16, parallel to `masses`; 0 if too
    small."""
    return np.rint(masses / largest * MAX_WEIGHT).astype(np.uint16)


def draw_from_support(support: Support, key: DrawKey, index: int) -> int:
    """Draw the draft token at `index` of the round from exactly the weights that travel."""
    point = key.below(int(support.weights.sum(dtype=np.int64)), index, DrawStream.PROPOSE)
    return int(support.token_ids[index_at(support.weights, point)])


def check_drawn(supports: PackedSupports, key: DrawKey) -> None:
    """Draw the tokens of a round again from the supports that were reported for them.

    Args:
        supports: supports of the round's draft tokens, packed with these tokens.
        key: the round's draw key.

    Raises:
        Internal: a token is not the one that `draw_from_support` returns, so the supports are not what it was drawn
            from.
    """
    num_drafted = len(supports)
    if len(supports.weights) == num_drafted:  # point masses leave no choice
        return
    entries = supports.row_entries - np.arange(num_drafted)
    reached = supports.weights.cumsum(dtype=np.int64)[entries].tolist()
    before = 0
    for index, bits in enumerate(key.uint64s(num_drafted, DrawStream.PROPOSE)):
        total = supports.totals[index]
        # The token's points are the last `weight` ones that its entry reaches.
        above = reached[index] - before - (bits * total >> 64)
        if not 0 < above <= supports.weights_drawn[index]:
            raise Internal(f"draft token {index} was not drawn from the distribution that was reported for it")
        before += total


def probability(token_id: int, support: Support) -> float:
    """Return the probability, 0..1, with which a token is drawn from a support."""
    entry = int(support.token_ids.searchsorted(token_id))
    if entry == len(support.token_ids) or int(support.token_ids[entry]) != token_id:
        return 0.0
    return int(support.weights[entry]) / int(support.weights.sum(dtype=np.int64))


def integer_weights(on_support: NDArray[np.float64], tail_mass: float) -> NDArray[np.uint32]:
    """Return masses on a support (float64 [S]) and outside it as uint32 [S + 1] that sum to exactly 2^31.

    Each is rounded to nearest and the remainder goes to the largest, so a tail mass of exactly 0 stays exactly 0.
    """
    weights = np.rint(np.append(on_support, tail_mass) * WEIGHT_TOTAL).astype(np.int64)
    weights[np.argmax(weights)] += WEIGHT_TOTAL - weights.sum()
    return np.asarray(weights, dtype=np.uint32)
