"""The turns that a replica has answered calls of and that have not ended: those that need it while it drains.

`rpc.replica_servicer` notes calls and ends; `specdec.service.model_grace` asks.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

#: Most turns that are kept; beyond it the oldest ones are forgotten. Turns of a coordinator that died do not end here.
MAX_TURNS = 65_536

#: Longest time between two calls of a turn that runs.
CALLED_WITHIN_S = 5.0


class _Turn(NamedTuple):
    epoch: int
    called_s: float
    """Time of its last call or renewal of a run, by `time.monotonic`."""
    is_interrupted: bool = False
    """True once it has ended before its last token."""


class OpenTurns:
    """Turns by the session's id on this replica. Use from one event loop."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}

    def note_call(self, session_id: str, epoch: int) -> None:
        """Note a call of a turn."""
        if session_id not in self._turns and len(self._turns) >= MAX_TURNS:
            del self._turns[next(iter(self._turns))]
        self._turns[session_id] = _Turn(epoch, time.monotonic())

    def note_renewal(self, session_id: str, epoch: int) -> None:
        """Note that a run of a turn goes on, unless the turn has ended: a run lasts as long as its turn may."""
        turn = self._turns.get(session_id)
        if turn is not None and turn.epoch == epoch:
            self._turns[session_id] = turn._replace(called_s=time.monotonic())

    def end(self, epochs: Mapping[str, int], resumable_ids: Collection[str]) -> None:
        """Note the ends of turns, by session and epoch; those of `resumable_ids` are interrupted and stay open."""
        for session_id, epoch in epochs.items():
            turn = self._turns.get(session_id)
            if turn is None or turn.epoch > epoch:
                continue
            if session_id in resumable_ids:
                self._turns[session_id] = turn._replace(is_interrupted=True)
            else:
                del self._turns[session_id]

    def forget(self, session_ids: Collection[str]) -> None:
        """Forget the turns of sessions that are gone."""
        for session_id in session_ids:
            self._turns.pop(session_id, None)

    def num_open(self, within_s: float) -> int:
        """Return the number of open turns with a call or renewal within the last `within_s` seconds."""
        since_s = time.monotonic() - within_s
        return sum(turn.called_s >= since_s for turn in self._turns.values())

    def num_running(self, within_s: float) -> int:
        """Return the number of those that were not interrupted."""
        since_s = time.monotonic() - within_s
        return sum(turn.called_s >= since_s and not turn.is_interrupted for turn in self._turns.values())
