"""Messages of the first rank of a group to the others: step plans, the cold tier, keep-alive and end.

A message is int32 words, its kind first; it is not a pickle. `engine.parallel.group` sends it. Called by
`engine.parallel.leader` and `service.rank`.

    [STEP, copies, slices, (from, to)..., (start, logit rows, tokens, blocks, token ids..., block ids...)...]
    [NOTHING]
    [END]
    [KEEP, block ids..., name of the run]   [FETCH, fetch, names of runs...]   [HAVE, fetch, run]   [DROP, fetch]
    [COPY, fetch, run, first row, block ids...]

A name is 16 bytes. HAVE is answered (`PartState`); a run of a fetch is counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from specdec.core.chain import HASH_BYTES
from specdec.engine.base import SequenceSlice, StepPlan

Words = NDArray[np.int32]

STEP = 1
#: Keep-alive: it prevents a wait for the next plan that is longer than a group's timeout.
NOTHING = 2
END = 3
#: Messages of the cold tier; see `rank_tier`.
KEEP, FETCH, HAVE, COPY, DROP = range(4, 9)

_SLICE_WORDS = 4
NAME_WORDS = HASH_BYTES // np.dtype(np.int32).itemsize


class PartState(IntEnum):
    """State of a rank's part of a run that is being fetched. The run's state is the smallest of all ranks'."""

    GONE = 0
    """The part will not arrive."""
    COMING = 1
    THERE = 2


def pack_plan(plan: StepPlan) -> Words:
    """Return the message of a plan."""
    words: list[int] = [STEP, len(plan.block_copies), len(plan.slices)]
    for copy in plan.block_copies:
        words += copy
    for part in plan.slices:
        words += (part.start, part.num_logit_rows, len(part.token_ids), len(part.block_table))
        words += part.token_ids
        words += part.block_table
    return np.array(words, dtype=np.int32)


def unpack_plan(message: Words) -> StepPlan:
    """Return the plan of a message of kind STEP; the inverse of `pack_plan`."""
    _, num_copies, num_slices, *words = message.tolist()
    end = 2 * num_copies
    copies = tuple(zip(words[0:end:2], words[1:end:2], strict=True))
    return StepPlan(tuple(_slices(words, end, num_slices)), copies)


def _slices(words: list[int], place: int, count: int) -> Iterator[SequenceSlice]:
    for _ in range(count):
        start, num_logit_rows, num_tokens, num_blocks = words[place : place + _SLICE_WORDS]
        tokens_from = place + _SLICE_WORDS
        blocks_from = tokens_from + num_tokens
        place = blocks_from + num_blocks
        yield SequenceSlice(
            token_ids=tuple(words[tokens_from:blocks_from]),
            start=start,
            block_table=tuple(words[blocks_from:place]),
            num_logit_rows=num_logit_rows,
        )


def pack_words(kind: int, *numbers: int, names: Sequence[bytes] = ()) -> Words:
    """Return a message other than a plan: its kind, numbers, then names."""
    head = np.array([kind, *numbers], dtype=np.int32)
    return np.concatenate((head, np.frombuffer(b"".join(names), dtype=np.int32)))


def names_in(words: Words) -> list[bytes]:
    """Return the names in the words of a message."""
    packed = words.tobytes()
    return [packed[first : first + HASH_BYTES] for first in range(0, len(packed), HASH_BYTES)]
