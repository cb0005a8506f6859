"""Cold tier of a divided model on its first rank: every rank keeps and fetches its own part.

    offer ──▶ own tier, and KEEP to the others          fetch ──▶ own tier decides; then FETCH to the others
    a run is fetched here ──▶ HAVE? until all others have their part, or one never will ──▶ tell the engine
    copied in ──▶ COPY to the others, between the same two steps

A run can be used only if all ranks have their part. Ranks fetch at the same time, so the parts arrive at about the same
time. Made by `engine.parallel.leader`; the other ranks' side is `engine.parallel.rank_tier`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from specdec.engine.base import WorkerLost
from specdec.engine.cold_tier import ColdTier, Fetch, Payload
from specdec.engine.parallel.rank_messages import COPY, DROP, FETCH, HAVE, KEEP, PartState, Words, pack_words

#: Time between two HAVE messages; each delays a step by a message and its answer.
_ASK_INTERVAL_S = 0.005

Tell = Callable[[Payload | None], None]


class LeaderTier:
    """Implements `engine.cold_tier.ColdTier`. Callable from any thread."""

    def __init__(self, own: ColdTier, send: Callable[[Words], None], ask: Callable[[Words], int]) -> None:
        """
        Args:
            own: cold tier of this rank's part.
            send: sends a message to the other ranks, unless the group is lost.
            ask: sends a message and returns the smallest answer. Raises WorkerLost.
        """
        self.run_blocks = own.run_blocks
        self._own = own
        self._send = send
        self._ask = ask
        self._numbers = itertools.count()

    def offer(self, name: bytes, block_ids: Sequence[int], read: Callable[[], Payload | None]) -> None:
        """Keep a run on all ranks; see `ColdTier.offer`. Call from the device thread, while the blocks hold the run."""
        self._send(pack_words(KEEP, *block_ids, names=[name]))
        self._own.offer(name, block_ids, read)

    def fetch(self, names: Sequence[bytes], replay_s: Sequence[float], tell: Tell) -> Fetch | None:
        """Fetch runs on all ranks; see `ColdTier.fetch`."""
        fetch = LeaderFetch(next(self._numbers) & 0x7FFFFFFF, tell, self._send, self._ask)
        own = self._own.fetch(names, replay_s, fetch.take_in)
        if own is None:
            return None
        fetch.begin(own, names)
        return fetch


class LeaderFetch:
    """Implements `engine.cold_tier.Fetch`."""

    def __init__(self, number: int, tell: Tell, send: Callable[[Words], None], ask: Callable[[Words], int]) -> None:
        self.patience_s = float("inf")
        self._number = number
        self._tell = tell
        self._send = send
        self._ask = ask
        self._num_come = 0
        self._begun = threading.Event()
        self._over = threading.Event()

    def begin(self, own: Fetch, names: Sequence[bytes]) -> None:
        """Make the others fetch the runs that this rank's tier decided to fetch."""
        self._own, self.patience_s = own, own.patience_s
        self._send(pack_words(FETCH, self._number, names=names))
        self._begun.set()

    def take_in(self, payload: Payload | None) -> None:
        """Pass on this rank's part of the next run once all ranks have theirs. Called from a thread of the tier."""
        self._begun.wait()
        if not self._over.is_set():
            self._tell(payload if payload is not None and self._all_have(self._num_come) else None)
        self._num_come += 1

    def copy_parts(self, run: int, first_row: int, block_ids: Sequence[int]) -> None:
        """Make the other ranks copy their parts; see `Fetch.copy_parts`."""
        self._send(pack_words(COPY, self._number, run, first_row, *block_ids))

    def note_copied(self, num_bytes: int, seconds: float) -> None:
        """Record the time of a copy; see `Fetch.note_copied`."""
        self._own.note_copied(num_bytes, seconds)

    def stop(self, *, is_late: bool = False) -> None:
        """Stop fetching on all ranks; see `Fetch.stop`."""
        self._over.set()
        self._own.stop(is_late=is_late)
        self._send(pack_words(DROP, self._number))

    def _all_have(self, run: int) -> bool:
        """Wait until all ranks have a run; return False if one never will, or the fetch was stopped."""
        try:
            while (state := self._ask(pack_words(HAVE, self._number, run))) == PartState.COMING:
                if self._over.wait(_ASK_INTERVAL_S):
                    return False
        except WorkerLost:
            return False
        return state == PartState.THERE
