"""The cold tier of a divided model as its first rank's engine sees it: every rank keeps and fetches its own part.

    offer ──▶ own tier, and KEEP to the others          fetch ──▶ own tier decides; then FETCH to the others
    a run has come here ──▶ HAVE? until all others have theirs, or one has not ──▶ told
    copied in ──▶ COPY to the others, at the same place among the steps

What is fetched counts only where all ranks have it. Ranks fetch side by side, so the others' parts are there about when
the first one's is. Not here: how messages travel (`lead`), what other ranks do with them (`rank_tier`). Made by `lead`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from specdec.engine.base import WorkerLost
from specdec.engine.cold_tier import ColdTier, Fetch, Payload
from specdec.engine.parallel.messages import COPY, DROP, FETCH, HAVE, KEEP, PartState, Words, pack_words

#: Between two questions whether the others have a run; each holds up a step by a message and its answer.
_ASK_INTERVAL_S = 0.005

Tell = Callable[[Payload | None], None]


class LeaderTier:
    """Implements `engine.cold_tier.ColdTier`. Callable from any thread."""

    def __init__(self, own: ColdTier, send: Callable[[Words], None], ask: Callable[[Words], int]) -> None:
        """
        Args:
            own: keeps this rank's part.
            send: gives the other ranks a message, as long as they are there.
            ask: the same, and returns the least of their answers. Raises WorkerLost.
        """
        self.run_blocks = own.run_blocks
        self._own = own
        self._send = send
        self._ask = ask
        self._numbers = itertools.count()

    def offer(self, name: bytes, block_ids: Sequence[int], read: Callable[[], Payload | None]) -> None:
        """See `ColdTier.offer`. Called where steps are run from: the blocks hold the run now."""
        self._send(pack_words(KEEP, *block_ids, names=[name]))
        self._own.offer(name, block_ids, read)

    def fetch(self, names: Sequence[bytes], replay_s: Sequence[float], tell: Tell) -> Fetch | None:
        """See `ColdTier.fetch`."""
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
        """Has the others fetch what this rank's tier has been found to be worth asking."""
        self._own, self.patience_s = own, own.patience_s
        self._send(pack_words(FETCH, self._number, names=names))
        self._begun.set()

    def take_in(self, payload: Payload | None) -> None:
        """Tells of this rank's part of the next run once all have theirs. From a thread of the tier's."""
        self._begun.wait()
        if not self._over.is_set():
            self._tell(payload if payload is not None and self._all_have(self._num_come) else None)
        self._num_come += 1

    def copy_parts(self, run: int, first_row: int, block_ids: Sequence[int]) -> None:
        """See `Fetch.copy_parts`."""
        self._send(pack_words(COPY, self._number, run, first_row, *block_ids))

    def note_copied(self, num_bytes: int, seconds: float) -> None:
        """See `Fetch.note_copied`."""
        self._own.note_copied(num_bytes, seconds)

    def stop(self, *, is_late: bool = False) -> None:
        """See `Fetch.stop`."""
        self._over.set()
        self._own.stop(is_late=is_late)
        self._send(pack_words(DROP, self._number))

    def _all_have(self, run: int) -> bool:
        """Waits until all ranks have a run; False: one will not, or nobody wants it any more."""
        try:
            while (state := self._ask(pack_words(HAVE, self._number, run))) == PartState.COMING:
                if self._over.wait(_ASK_INTERVAL_S):
                    return False
        except WorkerLost:
            return False
        return state == PartState.THERE
