"""Cold tier of a rank that follows, for its part of the KV blocks.

The first rank (`leader_tier`) decides which runs are kept and fetched and when they are copied in. This rank does the
same with its own part of the blocks, between the same two steps. Blocks are read while later steps run; a read is void
if one of those steps wrote to a block of it, which the plans tell. Called by `service.rank`, from its
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import StepPlan, Worker
from specdec.engine.cold_tier import ColdTier, Fetch, Payload
from specdec.engine.parallel.rank_messages import COPY, DROP, FETCH, HAVE, KEEP, NAME_WORDS, PartState, Words, names_in

#: Seconds that computing a run is said to take, so that the tier always fetches: the first rank has decided already.
_REPLAY_S = 1e6


class RankTier:
    """Cold tier of one rank that follows. Without a tier of its own it keeps nothing."""

    def __init__(self, tier: ColdTier | None, worker: Worker) -> None:
        self._tier = tier
        self._worker = worker
        self._num_writes = np.zeros(worker.shape.num_kv_blocks, dtype=np.int64)  # of each block
        self._fetched: dict[int, _Fetched] = {}

    def note(self, plan: StepPlan) -> None:
        """Record which blocks a step will write; call before the step runs."""
        if self._tier is None:
            return
        written = [to for _, to in plan.block_copies]
        for part in plan.slices:
            end = part.start + len(part.token_ids)
            written += part.block_table[part.start // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]
        self._num_writes[written] += 1  # a block that is written twice in a step counts once

    def hear(self, message: Words, answer: Callable[[int], object]) -> bool:
        """Handle a message if it concerns the tier; return whether it does.

        Args:
            message: message of the first rank.
            answer: sends a number to the first rank, for messages that need an answer.
        """
        kind, *numbers = message[: -NAME_WORDS if message[0] == KEEP else None].tolist()
        if kind == KEEP:
            self._keep(names_in(message[-NAME_WORDS:])[0], numbers)
        elif kind == FETCH:
            self._fetch(numbers[0], names_in(message[2:]))
        elif kind == HAVE:
            fetched = self._fetched.get(numbers[0])
            answer(PartState.GONE if fetched is None else fetched.state(numbers[1]))
        elif kind == COPY:
            number, run, first_row, *block_ids = numbers
            self._num_writes[block_ids] += 1
            self._worker.write_blocks(block_ids, self._fetched[number].take(run)[first_row:])
        elif kind == DROP:
            if (fetched := self._fetched.pop(numbers[0], None)) is not None:
                fetched.stop()
        else:
            return False
        return True

    def _keep(self, name: bytes, block_ids: Sequence[int]) -> None:
        if self._tier is not None:
            self._tier.offer(name, block_ids, partial(self._read, block_ids, self._num_writes[block_ids]))

    def _read(self, block_ids: Sequence[int], num_writes: NDArray[np.int64]) -> Payload | None:
        """Return the blocks' bytes if no step has written there since. Called from a thread of the tier."""
        rows = self._worker.read_blocks(block_ids)
        return rows if np.array_equal(self._num_writes[block_ids], num_writes) else None

    def _fetch(self, number: int, names: Sequence[bytes]) -> None:
        if self._tier is None:
            return
        fetched = _Fetched()
        replay_s = [_REPLAY_S * count for count in range(1, len(names) + 1)]
        fetched.fetch = self._tier.fetch(names, replay_s, fetched.take_in)
        if fetched.fetch is not None:
            self._fetched[number] = fetched


class _Fetched:
    """Fetched runs. They arrive in order, from a thread of the tier."""

    def __init__(self) -> None:
        self.fetch: Fetch | None = None
        self._runs: list[Payload | None] = []
        self._is_over = False

    def take_in(self, payload: Payload | None) -> None:
        if payload is None:
            self._is_over = True
        else:
            self._runs.append(payload)

    def state(self, run: int) -> PartState:
        is_over = self._is_over  # read first: the last run arrives before the end is set
        if run < len(self._runs):
            return PartState.THERE
        return PartState.GONE if is_over else PartState.COMING

    def take(self, run: int) -> Payload:
        """Return a run that has arrived and forget it."""
        payload, self._runs[run] = self._runs[run], None
        assert payload is not None  # the first rank has asked for its state, and takes each run once
        assert self.fetch is not None
        self.fetch.note_copied(payload.nbytes, 0.0)
        return payload

    def stop(self) -> None:
        if self.fetch is not None:
            self.fetch.stop()
