"""The text and the distributions of simulated models, without weights: functions of the request alone.

At every position there is one target token, and with probability alpha the draft's greedy choice is that token. At
temperatures above 0 the draft's distribution q covers 64 ids and the target's distribution is p = alpha * q + (1 -
alpha) * [z], z outside them, so token-wise rejection accepts with probability alpha exactly and independently. Filters
are not applied: the only sampling parameter that counts is whether the temperature is 0.

Source: sum of min(p, q) = alpha (Leviathan et al. 2023, theorem 3.5). Not here: time (`device`), sessions (`replica`).
Called by `engines` and, for the tokenizer, by `bench`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from specdec.checkpoints.vocabulary import vocabulary_fingerprint
from specdec.core.random import DrawKey, index_at_uniform, philox4x32, seed_words
from specdec.core.sparse import draw_from_support, integer_weights
from specdec.types import DistributionRow, SessionPosition, Support, TokenIds

#: Rows of the id-to-token map: that of the Qwen models, as the wire's figures assume.
VOCABULARY_SIZE = 151_936

SUPPORT_SIZE = 64

#: Never drawn, so that simulated texts end by their length alone.
EOS_TOKEN_ID = 0

#: A support spans this many ids, so that its gaps cost the wire what those of a real one do (two bytes each).
_SPAN = 100_000
_OFFSETS: TokenIds = np.sort(
    np.random.default_rng(64).choice(_SPAN, SUPPORT_SIZE, replace=False).astype(np.uint32)
)  # [S]
_FALL = 0.85
_WEIGHTS: NDArray[np.uint16] = np.random.default_rng(65).permutation(
    np.rint(65_535 * _FALL ** np.arange(SUPPORT_SIZE)).astype(np.uint16)
)  # [S]
_Q: NDArray[np.float64] = _WEIGHTS / _WEIGHTS.sum(dtype=np.float64)  # [S]

_WORD = 1 << 32

#: A few rounds of as many sessions as are measured.
_REMEMBERED_POSITIONS = 1 << 14

#: Last counter word of these draws; the protocol's own streams are small numbers.
_STREAM = 0x51AB


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What can be set of a pair's texts."""

    alphas: tuple[float, ...]
    """Acceptance, 0..1, one per stretch of the output; the last holds to its end."""
    stretch_tokens: int = 256
    """Output tokens that an alpha holds for."""
    predictability: float = 0.9
    """Probability that the token after a round's accepted ones is among the F likeliest the draft would guess."""

    odd_alphas: tuple[float, ...] = ()
    """Those of requests with an odd seed, as if these were of another kind; empty: the same."""

    def alpha_at(self, output_index: int, seed: int) -> float:
        alphas = self.odd_alphas if seed % 2 and self.odd_alphas else self.alphas
        return alphas[min(max(output_index, 0) // self.stretch_tokens, len(alphas) - 1)]


class SimulatedText:
    """Tokens and distributions of one request's positions. Two objects of equal round and dials say the same."""

    def __init__(self, dials: TextOptions, asked: SessionPosition) -> None:
        """Of `asked`, only seed, turn, committed length and output start count."""
        self._dials = dials
        self._asked = asked

    def target_choice(self, position: int) -> int:
        """The target's token in greedy and coupled rounds."""
        return 1 + self._words(position)[0] % (VOCABULARY_SIZE - 1)

    def draft_choice(self, position: int) -> int:
        """The draft's token in greedy and coupled rounds: the target's with probability alpha, else its neighbour."""
        choice = self.target_choice(position)
        agrees = self._words(position)[1] < self._alpha(position) * _WORD
        return choice if agrees else choice % (VOCABULARY_SIZE - 1) + 1

    def is_predicted(self, position: int) -> bool:
        """Whether the committed token at `position` was among the draft's F likeliest guesses."""
        return self._words(position)[2] < self._dials.predictability * _WORD

    def support(self, position: int) -> Support:
        """q at a position: 64 ids of falling weight."""
        return Support(self._support_ids(position), _WEIGHTS)

    def draft_draw(self, index: int) -> int:
        """The draft token at `index` of the round, drawn from its support."""
        asked = self._asked
        key = DrawKey(asked.seed, asked.turn, asked.committed_len)
        return draw_from_support(self.support(asked.committed_len + index), key, index)

    def distribution_row(self, position: int, support_ids: TokenIds, tail_uniform: float) -> DistributionRow:
        """p at a position through a support (ascending ids, any), as `specdec.core.reference.distribution_row` says."""
        own_ids, alpha = self._support_ids(position), self._alpha(position)
        tail = int(own_ids[-1]) + 1 + self._words(position)[3] % (VOCABULARY_SIZE - 1 - int(own_ids[-1]))
        if alpha < 1.0 and np.array_equal(support_ids, own_ids):
            return DistributionRow(_weights_on_own_support(alpha), tail, 1.0 - alpha)
        covered_ids = np.append(own_ids, tail)  # [S + 1], ascending
        masses = np.append(alpha * _Q, 1.0 - alpha)
        entries = np.minimum(np.searchsorted(covered_ids, support_ids), SUPPORT_SIZE)
        is_hit = covered_ids[entries] == support_ids
        outside = masses.copy()
        outside[entries[is_hit]] = 0.0
        weights = integer_weights(np.where(is_hit, masses[entries], 0.0), float(outside.sum()))
        if weights[-1] == 0:
            return DistributionRow(weights, -1, 0.0)
        drawn = index_at_uniform(outside, tail_uniform)
        return DistributionRow(weights, int(covered_ids[drawn]), float(masses[drawn]))

    def _alpha(self, position: int) -> float:
        return self._dials.alpha_at(position - self._asked.output_start, self._asked.seed)

    def _support_ids(self, position: int) -> TokenIds:
        shift = 1 + self._words(position)[0] % (VOCABULARY_SIZE - _SPAN - 2)
        return _OFFSETS + np.uint32(shift)

    def foresee(self, positions: range) -> None:
        """Makes what is said of some positions quick to say; from any thread."""
        for position in positions:
            self._words(position)

    def _words(self, position: int) -> tuple[int, int, int, int]:
        return _position_words(self._asked.seed, self._asked.turn, position)


@lru_cache(maxsize=_REMEMBERED_POSITIONS)
def _position_words(seed: int, turn: int, position: int) -> tuple[int, int, int, int]:
    return philox4x32((turn, position, 0, _STREAM), seed_words(seed))


@lru_cache(maxsize=64)
def _weights_on_own_support(alpha: float) -> NDArray[np.uint32]:
    return integer_weights(alpha * _Q, 1.0 - alpha)  # [S + 1]


def simulated_vocabulary() -> dict[str, int]:
    """The token-to-id map that simulated replicas are of: words of letters, each after a space."""
    return {"<|end|>": EOS_TOKEN_ID} | {"Ġ" + _word(token_id): token_id for token_id in range(1, VOCABULARY_SIZE)}


@lru_cache(maxsize=1)
def simulated_vocabulary_fingerprint() -> str:
    """Its fingerprint, as `EngineInfo` carries it."""
    return vocabulary_fingerprint(simulated_vocabulary())


def _word(number: int) -> str:
    letters = ""
    while number:
        number, letter = divmod(number - 1, 26)
        letters = chr(ord("a") + letter) + letters
    return letters
