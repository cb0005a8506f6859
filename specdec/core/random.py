"""Counter-based random numbers: every draw is a function of its key alone (docs/protocol.md section 4).

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), key = request seed, counter = (turn,
committed length at the round's start, index in the round, stream). No generator state has to be shared, saved or lost.
Called wherever a token is drawn; `specdec.engine.logits.rows` runs the same computation on int64 tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.contract.types import TokenIds

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

#: Resolution of uniforms. With 52 bits `k + 1/2` still has an exact float64, so a uniform is never 0 nor 1.
UNIFORM_BITS = 52


class DrawStream(IntEnum):
    """Purpose of a draw. It is the last counter word, so two purposes never share a random number."""

    PROPOSE = 0
    """The draft's tokens."""
    ACCEPT = 1
    """Acceptance of draft tokens."""
    RESIDUAL = 2
    """The corrected token."""
    TAIL = 3
    """The tail token: the target's draw outside the support."""
    BONUS = 4
    """The bonus token."""
    COUPLED = 5
    """Gumbel noise, keyed by position and token id instead of round and index."""


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Return the result of ten rounds of Philox4x32.

    Works on int, uint64 arrays and int64 tensors (whose products wrap, which the masks undo), also mixed.

    Args:
        counter: four 32-bit words.
        key: two 32-bit words.

    Returns:
        Four random 32-bit words, of the widest type and shape of the arguments.

    Source: Salmon et al. 2011, section 3.3; constants and known answers from Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def seed_words(seed: int) -> tuple[int, int]:
    """Return a 64-bit seed as Philox key words, low word first."""
    return seed & _MASK, (seed >> 32) & _MASK


@lru_cache(maxsize=4096)
def _key_schedule(seed: int) -> tuple[tuple[int, int], ...]:
    """Return the key words of the ten rounds, which all draws of a request share."""
    k0, k1 = seed_words(seed)
    return tuple(((k0 + step * _KEY_STEPS[0]) & _MASK, (k1 + step * _KEY_STEPS[1]) & _MASK) for step in range(10))


@lru_cache(maxsize=256)
def _lanes(num_lanes: int) -> tuple[int, int]:
    """Return two wide integers: 1 in each 64-bit lane, and the index of each lane in that lane."""
    return sum(1 << 64 * lane for lane in range(num_lanes)), sum(lane << 64 * lane for lane in range(num_lanes))


@lru_cache(maxsize=4096)
def _lane_keys(seed: int, num_lanes: int) -> tuple[tuple[int, int], ...]:
    """Return the key words of the ten rounds, repeated in every lane."""
    ones, _ = _lanes(num_lanes)
    return tuple((ones * k0, ones * k1) for k0, k1 in _key_schedule(seed))


@lru_cache(maxsize=1024)
def _draws_of_pair(seed: int, turn: int, committed_len: int, num_draws: int, first_stream: int) -> list[int]:
    """Return 64 random bits for each index of two adjacent streams, those of the first one first.

    The draws are 64-bit lanes of wide integers, in which products of 32-bit words fit: twice as many lanes take little
    longer. Cached because a round needs the second stream after the first.
    """
    ones, lanes = _lanes(2 * num_draws)
    second = _lanes(num_draws)[0] << 64 * num_draws
    words = ones * _MASK
    c0, c1, c2, c3 = ones * turn, ones * committed_len, lanes - second * num_draws, ones * first_stream + second
    multiplier0, multiplier1 = _MULTIPLIERS
    for k0, k1 in _lane_keys(seed, 2 * num_draws):
        product0, product1 = c0 * multiplier0, c2 * multiplier1
        c0, c1, c2, c3 = (
            (product1 >> 32) & words ^ c1 ^ k0,
            product1 & words,
            (product0 >> 32) & words ^ c3 ^ k1,
            product0 & words,
        )
    draws: list[int] = np.frombuffer((c0 << 32 | c1).to_bytes(16 * num_draws, "little"), dtype="<u8").tolist()
    return draws


@dataclass(frozen=True, slots=True)
class DrawKey:
    """The key of one round's draws.

    The round's start is part of it, because block verification reads draws and then discards them: the same draws at
    the same position of the next round would make that round depend on a rejection.
    """

    seed: int
    """[0, 2^64)."""
    turn: int
    """Turn ordinal in the session."""
    committed_len: int
    """Committed tokens when the round starts."""

    def _words(self, index: int, stream: DrawStream) -> tuple[int, int, int, int]:
        """Return `philox4x32` on ints; the products need no mask after their shift."""
        c0, c1, c2, c3 = self.turn, self.committed_len, index, int(stream)
        multiplier0, multiplier1 = _MULTIPLIERS
        for k0, k1 in _key_schedule(self.seed):
            product0, product1 = c0 * multiplier0, c2 * multiplier1
            c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        return c0, c1, c2, c3

    def uniform(self, index: int, stream: DrawStream) -> float:
        """Return a uniform in the open interval (0, 1), on a grid of 2^52 points."""
        high, low, _, _ = self._words(index, stream)
        return float(((high << 20) | (low >> 12)) + 0.5) * 2.0**-UNIFORM_BITS

    def uint31s(self, num_draws: int, stream: DrawStream) -> list[int]:
        """Return uniform integers below 2^31 for the indices 0 to `num_draws` - 1; each is the same for any count."""
        return [draw >> 33 for draw in self.uint64s(num_draws, stream)]

    def uint64s(self, num_draws: int, stream: DrawStream) -> list[int]:
        """Return the 64 bits that `below` scales, for the indices 0 to `num_draws` - 1.

        A round asks for PROPOSE, to check its draft, and then for ACCEPT; both are computed in one pass.
        """
        pair = _draws_of_pair(self.seed, self.turn, self.committed_len, num_draws, stream & ~1)
        return pair[num_draws:] if stream & 1 else pair[:num_draws]

    def below(self, n: int, index: int, stream: DrawStream) -> int:
        """Return a uniform integer below `n`, 1 <= n <= 2^62; the probability of any range is off by at most 2^-64."""
        high, low, _, _ = self._words(index, stream)
        return int((((high << 32) | low) * n) >> 64)

    def tail_uniforms(self, num_draft_tokens: int) -> list[float]:
        """Return the uniforms of a round's L + 1 distribution rows: tail tokens of the drafts, then the bonus token."""
        tails = [self.uniform(index, DrawStream.TAIL) for index in range(num_draft_tokens)]
        return [*tails, self.uniform(num_draft_tokens, DrawStream.BONUS)]


def gumbel_noise(seed: int, turn: int, position: int, token_ids: TokenIds) -> NDArray[np.float64]:
    """Return standard Gumbel noise keyed by (seed, turn, absolute position, token id).

    One Philox block serves two adjacent ids: words 0 and 1 the even id, words 2 and 3 the odd one.

    Returns:
        float64 [n], finite.
    """
    ids = np.asarray(token_ids, dtype=np.uint64)
    words = philox4x32((turn, position, ids >> np.uint64(1), int(DrawStream.COUPLED)), seed_words(seed))
    is_odd = (ids & np.uint64(1)).astype(bool)
    high = np.where(is_odd, words[2], words[0])
    low = np.where(is_odd, words[3], words[1])
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    uniforms = (bits.astype(np.float64) + 0.5) * 2.0**-UNIFORM_BITS
    noise: NDArray[np.float64] = -np.log(-np.log(uniforms))
    return noise


def index_at(weights: NDArray[np.integer[Any]], point: int) -> int:
    """Return the outcome of an integer point: outcome i has `weights[i]` of the integers below the sum."""
    return int(np.searchsorted(np.cumsum(weights, dtype=np.int64), point, side="right"))


def index_at_mass(weights: NDArray[np.float64], point: float) -> int:
    """Return the outcome of a point in [0, sum of weights); despite rounding never one of weight 0."""
    reach = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(reach, min(point, np.nextafter(reach[-1], 0.0)), side="right"))


def locate_uniform(weights: NDArray[np.float64], uniform: float) -> tuple[int, float]:
    """Return the outcome of a uniform, in proportion to float64 weights, and the point's distance into its weight.

    The weights must be non-negative with a positive sum; an outcome of weight 0 is never returned.
    """
    reach = np.cumsum(weights, dtype=np.float64)
    point = uniform * float(reach[-1])
    index = index_at_mass(weights, point)
    return index, point - float(reach[index - 1]) if index else point


def index_at_uniform(weights: NDArray[np.float64], uniform: float) -> int:
    """Return the outcome of `locate_uniform`."""
    return locate_uniform(weights, uniform)[0]
