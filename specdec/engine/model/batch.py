"""Turn a step's plan into tensors: the flat ragged batch, the KV slots it writes, and the attention masks.

The tensors are computed once per step and shared by all layers. From here a step's tokens go through the model's layers
and `specdec.engine.model.attention`. Called by `engine.model.model_runner`.

Slices of few rows (draft steps, verifications) with similar lengths form one padded group, which takes one attention
call per layer; longer prefill chunks are groups of their own. The flat batch is ordered by group, so a group's rows are
a range of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice, SliceStates, StepPlan

#: Longest slice that is padded into a group with others. One call keeps the device busy for a longer slice.
MAX_GROUPED_ROWS = 32

#: A group's longest context may exceed its shortest by this factor (and four blocks): padding is read and multiplied.
_MAX_CONTEXT_RATIO = 1.5
_MAX_CONTEXT_EXCESS_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Properties of a layer's attention that decide its masks."""

    window: int | None
    """A token sees itself and the `window - 1` tokens before it; None: all tokens before it."""
    queries_per_kv_head: int
    softcap: float | None
    has_sinks: bool = False
    """True if every head has an attention sink."""
    chunk: int | None = None
    """A token sees itself and the tokens before it in its chunk of this many positions; None: there are no chunks."""

    def first_visible(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        start = 0 if self.chunk is None else position // self.chunk * self.chunk
        return start if self.window is None else max(start, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows [first, first + num_rows) of the flat batch, which are a slice of one sequence."""

    first: int
    num_rows: int
    states: SliceStates

    def runs(self, most_rows: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        """Yield (from, to, saves) for runs of rows: a longer run than `most_rows` is cut where states are saved.

        The saves of a run count its own rows.
        """
        start, saves = 0, list[tuple[int, int]]()
        for end, slot in self.states.saves:
            if end - start > most_rows and saves:
                yield start, start + saves[-1][0], saves
                start, saves = start + saves[-1][0], []
            saves.append((end - start, slot))
            if end - start > most_rows:
                yield start, end, saves
                start, saves = end, []
        if self.num_rows - start > most_rows and saves:
            yield start, start + saves[-1][0], saves
            start, saves = start + saves[-1][0], []
        if start < self.num_rows:
            yield start, self.num_rows, saves


@dataclass(frozen=True, slots=True)
class KvView:
    """Part of a layer's cache that one group reads under one `AttentionKind`."""

    block_ids: torch.Tensor | None
    """int64 [B * n]; None if the blocks are adjacent and `run_start` is given instead."""
    run_start: int
    """First slot of one sequence whose blocks are adjacent."""
    length: int
    """L: tokens read per sequence, padding included."""
    mask: torch.Tensor | None
    """Additive, model dtype, [B, 1, Q * queries_per_kv_head, L]: 0 or -inf. None: every query sees all L."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows [first_row, first_row + num_rows) of the flat batch, as B sequences of Q queries."""

    first_row: int
    num_rows: int
    batch: int
    num_queries: int
    pad_index: torch.Tensor | None
    """int64 [B * Q] into the group's rows if its slices differ in length; a padding query repeats a real one."""
    unpad_index: torch.Tensor | None
    """int64 [num_rows] into the padded B * Q."""
    views: tuple[KvView | None, ...]
    """One per attention kind. None for a whole sequence from position 0 with a causal mask: no cache is read."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over T tokens."""

    token_ids: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]
    slots: torch.Tensor  # int64 [T]
    opened_blocks: torch.Tensor | None
    """int64 [n]: blocks of which this step writes the first slot but not the last. Their other slots still hold a
    former owner's numbers, which are read behind the mask. None if there are no such blocks."""
    logit_rows: torch.Tensor  # int64 [R], rows of the flat batch in the order of the plan
    groups: tuple[AttentionGroup, ...]
    slices: tuple[RowSlice, ...] = ()
    """The plan's slices in the order of the flat batch, for the recurrent layers of a hybrid."""


def build_batch(
    plan: StepPlan, kinds: Sequence[AttentionKind], *, dtype: torch.dtype, device: torch.device
) -> StepBatch:
    """Return the tensors of a plan.

    Args:
        plan: plan of at least one slice, each of at least one token.
        kinds: the model's attention kinds, in the order of `AttentionGroup.views`.
        dtype: dtype of the masks, which is the model's.
        device: device of every tensor.
    """
    grouped = list(_group_slices(plan.slices))
    order = [index for members in grouped for index in members]
    slices = [plan.slices[index] for index in order]
    counts = [len(piece.token_ids) for piece in slices]
    first_rows = np.concatenate(([0], np.cumsum(counts)))
    positions = np.concatenate(
        [np.arange(piece.start, piece.start + n) for piece, n in zip(slices, counts, strict=True)]
    )
    slots = np.concatenate([_slots(piece, n) for piece, n in zip(slices, counts, strict=True)])
    ends = {index: first_rows[place + 1] for place, index in enumerate(order)}
    logit_rows = [
        row for index, piece in enumerate(plan.slices) for row in range(ends[index] - piece.num_logit_rows, ends[index])
    ]
    groups, first_row = [], 0
    for members in grouped:
        group = _build_group([plan.slices[index] for index in members], first_row, kinds, dtype, device)
        groups.append(group)
        first_row += group.num_rows
    token_ids = [token_id for piece in slices for token_id in piece.token_ids]
    return StepBatch(
        token_ids=torch.tensor([token_ids], device=device),
        position_ids=_index(positions, device).unsqueeze(0),
        slots=_index(slots, device),
        opened_blocks=opened_blocks(slots, device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        groups=tuple(groups),
        slices=tuple(
            RowSlice(int(first), count, piece.states or SliceStates(None))
            for first, count, piece in zip(first_rows[:-1], counts, slices, strict=True)
        ),
    )


def _index(values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)


def _slots(piece: SequenceSlice, count: int) -> np.ndarray:
    if count == 1:
        return np.array([piece.block_table[piece.start // BLOCK_TOKENS] * BLOCK_TOKENS + piece.start % BLOCK_TOKENS])
    positions = np.arange(piece.start, piece.start + count)
    table = np.asarray(piece.block_table, dtype=np.int64)
    return table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS


def opened_blocks(slots: np.ndarray, device: torch.device) -> torch.Tensor | None:
    """Return `StepBatch.opened_blocks` for the slots of a step."""
    first_slots = slots[slots % BLOCK_TOKENS == 0]
    if not len(first_slots):  # most steps
        return None
    opened = np.setdiff1d(first_slots, slots - (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
    return _index(opened, device) if len(opened) else None


def _group_slices(slices: Sequence[SequenceSlice]) -> Iterator[list[int]]:
    """Yield the indices of slices that share an attention call; every index once."""
    if len(slices) == 1:
        yield [0]
        return
    buckets: dict[int, list[int]] = {}
    for index, piece in enumerate(slices):
        count = len(piece.token_ids)
        if count > MAX_GROUPED_ROWS:
            yield [index]
        else:
            # 1, 2..4, 5..8, 9..16, 17..32: at most half of a bucket's queries are padding.
            buckets.setdefault(max(2, (count - 1).bit_length()) if count > 1 else 0, []).append(index)
    for members in buckets.values():
        members.sort(key=lambda index: _num_blocks(slices[index]))
        group = [members[0]]
        for index in members[1:]:
            shortest = _num_blocks(slices[group[0]])
            if _num_blocks(slices[index]) > shortest * _MAX_CONTEXT_RATIO + _MAX_CONTEXT_EXCESS_BLOCKS:
                yield group
                group = []
            group.append(index)
        yield group


def _num_blocks(piece: SequenceSlice) -> int:
    return -(-(piece.start + len(piece.token_ids)) // BLOCK_TOKENS)


def _build_group(
    members: list[SequenceSlice],
    first_row: int,
    kinds: Sequence[AttentionKind],
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionGroup:
    counts = [len(piece.token_ids) for piece in members]
    num_queries = max(counts)
    pad_index = unpad_index = None
    # [B, Q] -> row of the sequence; a padding query repeats the last row.
    own_rows = np.minimum(np.arange(num_queries)[None, :], np.array(counts)[:, None] - 1)
    if min(counts) < num_queries:
        offsets = np.concatenate(([0], np.cumsum(counts)[:-1]))
        pad_index = _index((own_rows + offsets[:, None]).ravel(), device)
        padded_places = [b * num_queries + row for b, count in enumerate(counts) for row in range(count)]
        unpad_index = _index(padded_places, device)
    query_positions = own_rows + np.array([piece.start for piece in members])[:, None]  # [B, Q]
    views: dict[AttentionKind, KvView | None] = {}
    for kind in kinds:
        if kind not in views:
            views[kind] = _build_view(members, query_positions, kind, dtype, device)
    return AttentionGroup(
        first_row=first_row,
        num_rows=sum(counts),
        batch=len(members),
        num_queries=num_queries,
        pad_index=pad_index,
        unpad_index=unpad_index,
        views=tuple(views[kind] for kind in kinds),
    )


def _build_view(
    members: list[SequenceSlice],
    query_positions: np.ndarray,
    kind: AttentionKind,
    dtype: torch.dtype,
    device: torch.device,
) -> KvView | None:
    lone = members[0] if len(members) == 1 else None
    num_queries = query_positions.shape[1]
    if lone is not None and lone.start == 0 and num_queries > 1:
        unlimited = all(limit is None or limit >= num_queries for limit in (kind.window, kind.chunk))
        if unlimited and kind.softcap is None and not kind.has_sinks:
            return None
    first_blocks = [kind.first_visible(piece.start) // BLOCK_TOKENS for piece in members]
    tables = [piece.block_table[first : _num_blocks(piece)] for piece, first in zip(members, first_blocks, strict=True)]
    longest = max(len(table) for table in tables)
    length = longest * BLOCK_TOKENS
    block_ids, run_start = None, 0
    if lone is not None and tables[0] == tuple(range(tables[0][0], tables[0][0] + longest)):
        run_start = tables[0][0] * BLOCK_TOKENS
        length = lone.start + num_queries - first_blocks[0] * BLOCK_TOKENS
    else:
        # Padding reads the sequence's own first block again, so another sequence's numbers never enter the sum.
        block_ids = _index([[*table, *[table[0]] * (longest - len(table))] for table in tables], device).ravel()
    mask = _build_mask(query_positions, np.array(first_blocks) * BLOCK_TOKENS, length, kind, dtype, device)
    return KvView(block_ids=block_ids, run_start=run_start, length=length, mask=mask)


def _build_mask(
    query_positions: np.ndarray,
    first_positions: np.ndarray,
    length: int,
    kind: AttentionKind,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """Return the mask [B, 1, Q * queries_per_kv_head, L] of query_positions [B, Q] and first key positions [B]."""
    queries = _index(query_positions, device)[:, :, None]
    keys = (_index(first_positions, device)[:, None] + torch.arange(length, device=device))[:, None, :]
    visible = keys <= queries  # [B, Q, L]
    if kind.window is not None:
        visible &= keys > queries - kind.window
    if kind.chunk is not None:
        visible &= keys >= queries // kind.chunk * kind.chunk
    if device.type == "cpu" and visible.all():
        return None
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
    return mask.repeat_interleave(kind.queries_per_kv_head, dim=1).unsqueeze(1)
