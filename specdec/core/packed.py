"""The supports and distribution rows of a round, each in one array, so that a decision needs no object per position.

Used as sequences they return the `Support` and `DistributionRow` of each position. `specdec.rpc.proposals` and
`specdec.rpc.verifications` make them from whole frames; `rejection` and `block` decide on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Internal
from specdec.contract.types import WEIGHT_TOTAL, DistributionRow, Support, TokenIds

#: The bonus position's row: its support is empty, so all mass is tail mass.
_BONUS_WEIGHTS = np.array([WEIGHT_TOTAL], dtype=np.uint32)
_BONUS_WEIGHTS.setflags(write=False)


NO_IDS: TokenIds = np.empty(0, np.uint32)
NO_IDS.setflags(write=False)


class PackedIds(Sequence[TokenIds]):
    """The ascending token ids of L supports."""

    __slots__ = ("sizes", "starts", "token_ids")

    def __init__(self, token_ids: TokenIds, sizes: Sequence[int]) -> None:
        """
        Args:
            token_ids: uint32 [sum(sizes)], one support after the other.
            sizes: entries of each support.
        """
        self.token_ids = token_ids
        self.sizes = sizes
        self.starts = [0, *accumulate(sizes)][: len(sizes)]

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> TokenIds: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenIds, ...]: ...
    def __getitem__(self, index: int | slice) -> TokenIds | tuple[TokenIds, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        start = self.starts[index]
        return self.token_ids[start : start + self.sizes[index]]


class PackedSupports(Sequence[Support]):
    """L supports, with the weights and places of the tokens drawn from them that a decision needs."""

    __slots__ = ("ids", "row_entries", "totals", "weights", "weights_drawn")

    def __init__(
        self,
        ids: PackedIds,
        weights: NDArray[np.uint16],
        row_entries: NDArray[np.int64],
        weights_drawn: Sequence[int],
        totals: Sequence[int],
    ) -> None:
        """
        Args:
            ids: ids of the L supports.
            weights: uint16 [sum of sizes], parallel to the ids.
            row_entries: int64 [L], index of each draft token in the concatenated rows over these supports. A row has
                one number more than its support, so entry e of support i is i places further than in `ids.token_ids`.
            weights_drawn: [L], w of each draft token.
            totals: [L], W of each support.
        """
        self.ids = ids
        self.weights = weights
        self.row_entries = row_entries
        self.weights_drawn = weights_drawn
        self.totals = totals

    def __len__(self) -> int:
        return len(self.totals)

    @overload
    def __getitem__(self, index: int) -> Support: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Support, ...]: ...
    def __getitem__(self, index: int | slice) -> Support | tuple[Support, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        start = self.ids.starts[index]
        return Support(self.ids[index], self.weights[start : start + self.ids.sizes[index]])


class PackedRows(Sequence[DistributionRow]):
    """L + 1 distribution rows, the bonus position's last."""

    __slots__ = ("sizes", "starts", "tail_probabilities", "tail_token_ids", "weights")

    def __init__(
        self,
        weights: NDArray[np.uint32],
        sizes: Sequence[int],
        tail_token_ids: Sequence[int],
        tail_probabilities: Sequence[float],
    ) -> None:
        """
        Args:
            weights: uint32 [sum(sizes)], the rows of the L draft positions one after the other.
            sizes: length of each of those rows, including the tail mass.
            tail_token_ids: [L + 1], -1 for a row without tail mass.
            tail_probabilities: [L + 1], probability of each tail token.
        """
        self.weights = weights
        self.sizes = sizes
        self.starts = [0, *accumulate(sizes)][: len(sizes)]
        self.tail_token_ids = tail_token_ids
        self.tail_probabilities = tail_probabilities

    def __len__(self) -> int:
        return len(self.tail_token_ids)

    @overload
    def __getitem__(self, index: int) -> DistributionRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[DistributionRow, ...]: ...
    def __getitem__(self, index: int | slice) -> DistributionRow | tuple[DistributionRow, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        index = range(len(self))[index]
        return DistributionRow(self.row_weights(index), self.tail_token_ids[index], self.tail_probabilities[index])

    def row_weights(self, index: int) -> NDArray[np.uint32]:
        """Return the weights of one position, 0..L: uint32 [S + 1]."""
        if index == len(self.sizes):
            return _BONUS_WEIGHTS
        start = self.starts[index]
        return self.weights[start : start + self.sizes[index]]


def locate_drawn(
    drawn: Sequence[int], token_ids: NDArray[Any], starts: Sequence[int], sizes: Sequence[int]
) -> NDArray[np.int64]:
    """Return the index of each drawn token in the concatenated ids of the supports: int64 [L].

    Raises:
        Internal: a draft token is outside its support, so the proposal does not describe what was sampled.
    """
    entries: NDArray[np.int64] = (token_ids == np.array(drawn, dtype=token_ids.dtype).repeat(sizes)).nonzero()[0]
    # Ids ascend within a support, so each token occurs at most once; too few entries mean that one is missing.
    if len(entries) != len(drawn):
        for token_id, start, size in zip(drawn, starts, sizes, strict=True):
            if token_id not in token_ids[start : start + size]:
                raise Internal(f"draft token {token_id} is not in its own support")
    return entries


def pack_supports(draft_token_ids: Sequence[int], supports: Sequence[Support]) -> PackedSupports:
    """Return supports in packed form; packed ones are returned unchanged.

    Raises:
        Internal: a draft token is outside its support.
    """
    if isinstance(supports, PackedSupports):
        return supports
    supports = supports[: len(draft_token_ids)]
    if not supports:
        return NO_SUPPORTS
    ids = PackedIds(
        np.concatenate([support.token_ids for support in supports]), [len(support.token_ids) for support in supports]
    )
    weights = np.concatenate([support.weights for support in supports])
    entries = locate_drawn(draft_token_ids, ids.token_ids, ids.starts, ids.sizes)
    totals = np.add.reduceat(weights, ids.starts, dtype=np.int64)
    row_entries = entries + np.arange(len(supports))
    return PackedSupports(ids, weights, row_entries, weights[entries].tolist(), totals.tolist())


def pack_rows(rows: Sequence[DistributionRow]) -> PackedRows:
    """Return rows in packed form; packed ones are returned unchanged."""
    if isinstance(rows, PackedRows):
        return rows
    drafted = rows[:-1]
    return PackedRows(
        np.concatenate([row.weights for row in drafted]) if drafted else NO_IDS,
        [len(row.weights) for row in drafted],
        [row.tail_token_id for row in rows],
        [row.tail_probability for row in rows],
    )


NO_SUPPORTS = PackedSupports(PackedIds(NO_IDS, ()), np.empty(0, np.uint16), np.empty(0, np.int64), (), ())
