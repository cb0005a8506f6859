"""The text and the distributions of simulated models, as functions of the request alone.

Each position has one target token, and with probability alpha the draft's greedy choice is that token. At temperatures
above 0 the draft's distribution q covers 64 ids, and the target's distribution is p = alpha * q + (1 - alpha) * [tail
token], with the tail token outside those ids. Token-wise rejection therefore accepts with probability alpha, exactly
and independently. Filters are ignored; of the sampling parameters, only whether the temperature is 0 matters.

Source: sum of min(p, q) = alpha (Leviathan et al. 2023, theorem 3.5). Called by `engines` and, for the tokenizer, by
`bench`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from specdec.checkpoints.vocabulary import vocabulary_fingerprint
from specdec.contract.types import DistributionRow, SessionPosition, Support, TokenIds
from specdec.core.random import DrawKey, index_at_uniform, philox4x32, seed_words
from specdec.core.sparse import draw_from_support, integer_weights

#: Size of the id-to-token map: that of the Qwen models, which the wire statistics assume.
VOCABULARY_SIZE = 151_936

SUPPORT_SIZE = 64

#: Never drawn, so that simulated texts end by their length alone.
EOS_TOKEN_ID = 0

#: Range of ids of a support, so that its gaps take two bytes each on the wire, as those of a real support do.
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

#: Size of the cache: a few rounds of as many sessions as are measured.
_REMEMBERED_POSITIONS = 1 << 14

#: Last counter word of these draws; the protocol's streams are small numbers.
_STREAM = 0x51AB


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Parameters of a pair's texts."""

    alphas: tuple[float, ...]
    """Acceptance, 0..1, of each stretch of the output; the last one holds to the end."""
    stretch_tokens: int = 256
    """Number of output tokens for which an alpha holds."""
    predictability: float = 0.9
    """Probability that the token after a round's accepted tokens is among the draft's top F guesses."""

    odd_alphas: tuple[float, ...] = ()
    """Acceptance of requests with an odd seed, which stand for another kind of request; empty: `alphas`."""

    def alpha_at(self, output_index: int, seed: int) -> float:
        alphas = self.odd_alphas if seed % 2 and self.odd_alphas else self.alphas
        return alphas[min(max(output_index, 0) // self.stretch_tokens, len(alphas) - 1)]


class SimulatedText:
    """Tokens and distributions of one request's positions. Equal rounds and options give equal results."""

    def __init__(self, options: TextOptions, round_position: SessionPosition) -> None:
        """`round_position`: only its seed, turn, committed length and output start matter."""
        self._options = options
        self._round = round_position

    def target_choice(self, position: int) -> int:
        """Return the target's token in greedy and coupled rounds."""
        return 1 + self._words(position)[0] % (VOCABULARY_SIZE - 1)

    def draft_choice(self, position: int) -> int:
        """Return the draft's token in greedy and coupled rounds: the target's with probability alpha, else the next
        id."""
        choice = self.target_choice(position)
        agrees = self._words(position)[1] < self._alpha(position) * _WORD
        return choice if agrees else choice % (VOCABULARY_SIZE - 1) + 1

    def is_predicted(self, position: int) -> bool:
        """Return whether the committed token at `position` was among the draft's top F guesses."""
        return self._words(position)[2] < self._options.predictability * _WORD

    def support(self, position: int) -> Support:
        """Return q at a position: 64 ids with geometric weights."""
        return Support(self._support_ids(position), _WEIGHTS)

    def draft_draw(self, index: int) -> int:
        """Return the draft token at `index` of the round, drawn from its support."""
        committed_len = self._round.committed_len
        key = DrawKey(self._round.seed, self._round.turn, committed_len)
        return draw_from_support(self.support(committed_len + index), key, index)

    def distribution_row(self, position: int, support_ids: TokenIds, tail_uniform: float) -> DistributionRow:
        """Return p restricted to any support (ascending ids), as `specdec.core.reference.distribution_row` does."""
        q_ids, alpha = self._support_ids(position), self._alpha(position)
        tail = int(q_ids[-1]) + 1 + self._words(position)[3] % (VOCABULARY_SIZE - 1 - int(q_ids[-1]))
        if alpha < 1.0 and np.array_equal(support_ids, q_ids):
            return DistributionRow(_weights_on_q_support(alpha), tail, 1.0 - alpha)
        covered_ids = np.append(q_ids, tail)  # [S + 1], ascending
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
        return self._options.alpha_at(position - self._round.output_start, self._round.seed)

    def _support_ids(self, position: int) -> TokenIds:
        shift = 1 + self._words(position)[0] % (VOCABULARY_SIZE - _SPAN - 2)
        return _OFFSETS + np.uint32(shift)

    def foresee(self, positions: range) -> None:
        """Cache the random numbers of some positions. May be called from any thread."""
        for position in positions:
            self._words(position)

    def _words(self, position: int) -> tuple[int, int, int, int]:
        return _position_words(self._round.seed, self._round.turn, position)


@lru_cache(maxsize=_REMEMBERED_POSITIONS)
def _position_words(seed: int, turn: int, position: int) -> tuple[int, int, int, int]:
    return philox4x32((turn, position, 0, _STREAM), seed_words(seed))


@lru_cache(maxsize=64)
def _weights_on_q_support(alpha: float) -> NDArray[np.uint32]:
    return integer_weights(alpha * _Q, 1.0 - alpha)  # [S + 1]


def simulated_vocabulary() -> dict[str, int]:
    """Return the token-to-id map of simulated replicas: words of letters, each after a space."""
    return {"<|end|>": EOS_TOKEN_ID} | {"Ġ" + _word(token_id): token_id for token_id in range(1, VOCABULARY_SIZE)}


@lru_cache(maxsize=1)
def simulated_vocabulary_fingerprint() -> str:
    """Return the map's fingerprint for `EngineInfo`."""
    return vocabulary_fingerprint(simulated_vocabulary())


def _word(number: int) -> str:
    letters = ""
    while number:
        number, letter = divmod(number - 1, 26)
        letters = chr(ord("a") + letter) + letters
    return letters
