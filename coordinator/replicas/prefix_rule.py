"""Whether a prefix that a replica holds is worth going to a busier one: the one place that decides it.

Both sides are counted in rows, tokens that a forward pass runs, so that what a row takes cancels out:

    gain(replica) = prefix_tokens - num_running * request_rows

`prefix_tokens` are the leading tokens of the session that the replica holds, and so need not run. `num_running` are the
sessions that call it now: each shares this session's steps for as long as that lasts, and adds `request_rows` to them,
the rows that a request has lately needed after its prompt, measured. The replica of the larger gain is taken, the one
that would be without a prefix where they are equal. So a replica may be busier by one session for every `request_rows`
tokens that it saves, and a prefix that everybody shares spreads to as many replicas as its sessions need.

Arithmetic on what it is told, no clock. The choice goes back to `placement`, which keeps it for the session. Not here:
who holds what (`prefixes`), a session that comes back to the replica of its own KV (`placement`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.replicas.replica import LinkT, Replica
from specdec.core.forward_time import RunningMean

#: Rows of a request before the first has ended: of some hundred tokens, five rows for four of them.
FIRST_REQUEST_ROWS = 128.0


class PrefixRule:
    """Decides for every session of one coordinator."""

    def __init__(self) -> None:
        self._request_rows = RunningMean()
        self._is_measured = False

    @property
    def request_rows(self) -> float:
        """Rows that a request adds to a replica's steps after its prompt."""
        return self._request_rows.value if self._is_measured else FIRST_REQUEST_ROWS

    def note_request(self, num_rows: int) -> None:
        """A request has ended after so many rows of the target, its prompt's left out."""
        self._is_measured = True
        self._request_rows.observe(num_rows)

    def choose(
        self, usual: Replica[LinkT], candidates: Sequence[Replica[LinkT]], prefix_tokens: Mapping[str, int]
    ) -> Replica[LinkT]:
        """The replica for a session.

        Args:
            usual: where it would go without a prefix.
            candidates: those that may take it.
            prefix_tokens: leading tokens of the session by the incarnation that holds them.
        """
        best, best_gain = usual, self._gain(usual, prefix_tokens)
        for replica in candidates:
            gain = self._gain(replica, prefix_tokens)
            if replica.incarnation in prefix_tokens and gain > best_gain:
                best, best_gain = replica, gain
        return best

    def _gain(self, replica: Replica[Any], prefix_tokens: Mapping[str, int]) -> float:
        return prefix_tokens.get(replica.incarnation, 0) - replica.num_running * self.request_rows
