"""The cold tier of KV: runs of full blocks in a Redis of their own, written in the background.

Runs are fetched if that is faster than prefill. Two threads have a connection each: one writes offered runs, the other
fetches requested ones and measures both. No caller waits for Redis: an offer is dropped if the queue is full, a fetch
delivers run by run, and its caller continues without it after a time limit. Every value may disappear at any time,
because an `allkeys-lru` Redis evicts. `specdec.engine.loop` offers and fetches; `specdec.service` builds the tier.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.restore_rule import RestoreRule
from specdec.state.kv_link import KvLink
from specdec.state.kv_reader import KvFetch, KvReader, Tell
from specdec.state.kv_tally import KvTally
from specdec.state.kv_values import KvSpace
from specdec.state.kv_writer import KvWriter, Read

#: Time for which queued runs are still written when the tier is closed.
CLOSE_S = 2.0


class KvTier:
    """Implements `engine.cold_tier.ColdTier`. Call it from any thread; close it when done."""

    def __init__(self, url: str, space: KvSpace) -> None:
        """Start the threads, which connect on their own.

        Args:
            url: redis://, rediss:// or unix://.
            space: identity of the KV: model, type and rank.

        Raises:
            InvalidRequest: the URL has another form.
        """
        self.space = space
        self.run_blocks = space.run_blocks
        self.rule = RestoreRule()
        self.tally = KvTally()
        self._link = KvLink(url)
        self._writer = KvWriter(self._link, space, self.tally)
        self._reader = KvReader(self._link, space, self.tally, self.rule, self._writer.forget)

    @property
    def is_up(self) -> bool:
        """Return whether Redis answered the last command."""
        return self._link.is_up

    def offer(self, name: bytes, _block_ids: Sequence[int], read: Read) -> None:
        """See `ColdTier.offer`."""
        self._writer.offer(name, read)

    def fetch(self, names: Sequence[bytes], replay_s: Sequence[float], tell: Tell) -> KvFetch | None:
        """See `ColdTier.fetch`."""
        return self._reader.fetch(names, replay_s, tell)

    def close(self) -> None:
        """Write queued runs for at most CLOSE_S and end the threads. Idempotent."""
        self._writer.close(CLOSE_S)
        self._link.close()
        self._reader.close(CLOSE_S)
