"""The cold tier of KV: runs of full blocks in a Redis of their own, written in the background.

Runs are fetched if that is faster than prefill. Two threads have a connection each: one writes offered runs, the other
fetches requested ones and measures both. No caller waits for Redis: an offer is dropped if the queue is full, a fetch
delivers run by run, and its caller continues without it after a time limit. Every value may disappear at any time,
because an `allkeys-lru` Redis evicts. `KvWriter` neither reads nor sends runs that exist already. `specdec.engine.loop`
offers and fetches; `specdec.service` builds the tier.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from redis.exceptions import OutOfMemoryError

from specdec.core.restore_rule import RestoreRule
from specdec.state.kv_link import KvLink, touch
from specdec.state.kv_reader import KvFetch, KvReader, Tell
from specdec.state.kv_values import KvSpace, KvTally, Payload

#: Limit of waiting offers; they hold names, not bytes.
MAX_OFFERS = 256
#: Limit of offers that are looked up in one round trip.
MAX_BATCH = 32
#: Limit of runs that are known to exist, and time for which that is assumed; Redis may evict any of them.
MAX_KNOWN = 65_536
KNOWN_S = 600.0

#: Time limit for sending a whole run, as a multiple of the time limit of an answer; no caller waits for it.
SEND_FACTOR = 10.0

Read = Callable[[], Payload | None]
_Offer = tuple[bytes, Read]


class KvWriter:
    """The writing side of one tier."""

    def __init__(self, link: KvLink, space: KvSpace, tally: KvTally) -> None:
        """Start the thread."""
        self._link = link
        self._space = space
        self._tally = tally
        self._client = link.connect(send_factor=SEND_FACTOR)
        self._known: OrderedDict[bytes, float] = OrderedDict()  # time until which it is assumed; changed under _lock
        self._lock = threading.Lock()
        self._offers: queue.Queue[_Offer | None] = queue.Queue(MAX_OFFERS)
        self._is_closed = False  # set by the thread after the last offer
        self._thread = threading.Thread(target=self._run, name="kv-tier-write", daemon=True)
        self._thread.start()

    def offer(self, name: bytes, read: Read) -> None:
        """Write a run later if it does not exist yet (`ColdTier.offer`). From any thread; never waits."""
        if self._is_known(name):
            return
        if not self._link.is_up:
            self._tally.dropped["unavailable"] += 1
            return
        try:
            self._offers.put_nowait((name, read))
        except queue.Full:
            self._tally.dropped["queue_full"] += 1

    def forget(self, name: bytes) -> None:
        """Note that a run does not exist."""
        with self._lock:
            self._known.pop(name, None)

    def close(self, patience_s: float) -> None:
        """Write queued runs for at most `patience_s` and end the thread."""
        end_s = time.monotonic() + patience_s
        try:
            self._offers.put(None, timeout=patience_s)
        except queue.Full:
            return
        self._thread.join(max(0.0, end_s - time.monotonic()))
        if not self._thread.is_alive():
            self._client.close()

    def _run(self) -> None:
        while batch := self._next_writes():
            try:
                self._write(batch)
            except Exception as error:
                self._link.fail_by(error)

    def _next_writes(self) -> list[_Offer]:
        """Return the waiting offers, or wait for the next one; empty once the tier is closed."""
        batch: list[_Offer] = []
        while not self._is_closed and len(batch) < MAX_BATCH and (not batch or not self._offers.empty()):
            offer = self._offers.get()
            if offer is None:
                self._is_closed = True
            else:
                batch.append(offer)
        return batch

    def _write(self, batch: Sequence[_Offer]) -> None:
        offers = [(name, read) for name, read in batch if not self._is_known(name)]
        if not self._link.is_up or not offers:
            return
        there = touch(self._client, [self._space.key(name) for name, _ in offers])
        for (name, read), is_there in zip(offers, there, strict=True):
            if is_there or self._keep(name, read):
                self._note_known(name)

    def _keep(self, name: bytes, read: Read) -> bool:
        payload = read()
        if payload is None:
            self._tally.dropped["evicted"] += 1
            return False
        try:
            self._client.set(self._space.key(name), self._space.encode(name, payload))
        except OutOfMemoryError as error:
            self._tally.dropped["refused"] += 1
            self._link.warn_once(str(error))
            return False
        self._tally.num_bytes["written"] += payload.nbytes
        return True

    def _is_known(self, name: bytes) -> bool:
        return self._known.get(name, 0.0) > time.monotonic()

    def _note_known(self, name: bytes) -> None:
        with self._lock:
            self._known[name] = time.monotonic() + KNOWN_S
            self._known.move_to_end(name)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)


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
