"""The cold tier of KV: runs of full blocks in a Redis of their own, written behind, fetched where that beats prefill.

Two threads, each with a connection: one writes what was offered, one fetches what was asked for and measures both. No
caller ever waits for Redis: an offer is dropped where the queue is full, a fetch is told run by run, and its caller
goes on without it once its patience ends. Everything here may be lost at any time: it is what an `allkeys-lru` Redis
keeps.

Not here: when the engine offers and asks (`specdec.engine.loop`). Built by `specdec.service`.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.restore_rule import RestoreRule
from specdec.state.kv_link import KvLink
from specdec.state.kv_reader import KvFetch, KvReader, Tell
from specdec.state.kv_tally import KvTally
from specdec.state.kv_values import KvSpace
from specdec.state.kv_writer import KvWriter, Read

#: What is queued when the tier is closed is still written, for as long.
CLOSE_S = 2.0


class KvTier:
    """Implements `engine.cold_tier.ColdTier`. Call it from any thread; close it when done."""

    def __init__(self, url: str, space: KvSpace) -> None:
        """Starts the threads, which connect by themselves.

        Args:
            url: redis://, rediss:// or unix://.
            space: whose KV is kept.

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
        """Whether Redis answered last."""
        return self._link.is_up

    def offer(self, name: bytes, _block_ids: Sequence[int], read: Read) -> None:
        """See `ColdTier.offer`."""
        self._writer.offer(name, read)

    def fetch(self, names: Sequence[bytes], replay_s: Sequence[float], tell: Tell) -> KvFetch | None:
        """See `ColdTier.fetch`."""
        return self._reader.fetch(names, replay_s, tell)

    def close(self) -> None:
        """Writes what is queued, for a while, and ends the threads. Idempotent."""
        self._writer.close(CLOSE_S)
        self._link.close()
        self._reader.close(CLOSE_S)
