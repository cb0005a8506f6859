"""Tenants with sessions on a replica, and the KV blocks that are reserved for the running turns of each.

`kv_queue` shares the blocks among tenants by these numbers; `table` keeps them.
"""

from __future__ import annotations

from collections import Counter

from specdec.engine.sessions.block_manager import blocks_for
from specdec.engine.sessions.reservations import is_idle
from specdec.engine.sessions.sequence import Sequence


class TenantUse:
    """Use of one replica by its tenants. Used on the device thread."""

    def __init__(self) -> None:
        self._num_sessions: Counter[str] = Counter()
        """Number of sessions by tenant, above 0."""
        self._reserving: set[Sequence] = set()
        """Sequences with reserved blocks, and some that had them."""

    @property
    def num_tenants(self) -> int:
        """Number of tenants that have sessions."""
        return len(self._num_sessions)

    def opened(self, sequence: Sequence) -> None:
        """Note a new session."""
        self._num_sessions[sequence.tenant] += 1

    def closed(self, sequence: Sequence) -> None:
        """Note that a session is forgotten."""
        self._reserving.discard(sequence)
        self._num_sessions[sequence.tenant] -= 1
        if not self._num_sessions[sequence.tenant]:
            del self._num_sessions[sequence.tenant]

    def note_reserved(self, sequence: Sequence) -> None:
        """Note that blocks were reserved for a session's turn."""
        self._reserving.add(sequence)

    def reserved_blocks(self, now_s: float) -> Counter[str]:
        """Return the number of blocks that are reserved for running turns, by tenant."""
        self._reserving = {each for each in self._reserving if each.reserved_len and not is_idle(each, now_s)}
        reserved: Counter[str] = Counter()
        for sequence in self._reserving:
            reserved[sequence.tenant] += blocks_for(sequence.reserved_len)
        return reserved
