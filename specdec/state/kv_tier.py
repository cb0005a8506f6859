"""The cold tier of KV: runs of full blocks in a Redis of their own, written behind, fetched where that beats prefill.

Two threads, each with a connection: one writes what was offered, one fetches what was asked for and measures both. No
caller ever waits for Redis: an offer is dropped where the queue is full, a fetch is told run by run, and its caller
goes on without it once its patience ends. A Redis that does not answer is left alone for a while, with one warning;
until it does, nothing is offered to it or asked of it. Everything here may be lost at any time: it is what an
`allkeys-lru` Redis keeps.

Not here: what a value is (`kv_values`), the rule (`specdec.core.restore_rule`), when the engine offers and asks
(`specdec.engine.loop`). Built by `specdec.service`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError
from redis.retry import Retry

from specdec.core.restore_rule import RestoreRule
from specdec.state.connection import describe_url
from specdec.state.kv_tally import KvTally
from specdec.state.kv_values import VERSION, KvSpace, Payload

#: Offers that wait for the writer; they are names, not bytes.
MAX_OFFERS = 256
#: Offers that are looked up in one trip.
MAX_BATCH = 32
#: Names of runs that are known to be there, and for how long that is believed: the tier forgets as it likes.
MAX_KNOWN = 65_536
KNOWN_S = 600.0
#: Runs fetched ahead of those that are in KV blocks.
MAX_AHEAD = 2
#: A fetch may take this many times its prediction, and so much more, before its caller goes on without it.
PATIENCE_FACTOR = 2.0
PATIENCE_S = 0.05
#: Of every command. A caller has gone on long before.
SOCKET_TIMEOUT_S = 1.0
#: How long a Redis that failed is left alone: at first, doubled each time, and at most.
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 30.0
#: W and L are measured anew when nothing was fetched for so long.
PROBE_INTERVAL_S = 30.0
MAX_PROBE_BYTES = 1 << 20
_PROBE_TTL_S = 120
_NUM_PROBES = 3
#: What is queued when the tier is closed is still written, for as long.
CLOSE_S = 2.0
#: Of what is read of a socket at once: values have megabytes.
_READ_BYTES = 1 << 20

_log = logging.getLogger(__name__)

Tell = Callable[[Payload | None], None]
Read = Callable[[], Payload | None]
_Offer = tuple[bytes, Read]


class _Fetch:
    """Implements `engine.loop.cold_tier.Fetch`."""

    def __init__(self, tier: KvTier, names: Sequence[bytes], replay_s: Sequence[float], tell: Tell) -> None:
        self.names = names
        self.replay_s = replay_s
        self.tell = tell
        self.patience_s = float("inf")
        self.is_over = False
        self._tier = tier
        self._room = threading.Semaphore(MAX_AHEAD)

    def note_copied(self, num_bytes: int, seconds: float) -> None:
        """See `engine.loop.cold_tier.Fetch`."""
        self._tier.rule.observe_copy(num_bytes, seconds)
        self._tier.tally.num_restored += 1
        self._room.release()

    def stop(self, *, is_late: bool = False) -> None:
        """See `engine.loop.cold_tier.Fetch`."""
        self.is_over = True
        self._room.release()
        if is_late:
            self._tier.note_late(self.patience_s)

    def wait_for_room(self) -> bool:
        """Waits until few enough runs are fetched and not copied in; False: nobody wants more."""
        self._room.acquire(timeout=self.patience_s)
        return not self.is_over


class KvTier:
    """Implements `engine.loop.cold_tier.ColdTier`. Call it from any thread; close it when done."""

    def __init__(self, url: str, space: KvSpace, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts the threads; connects in them.

        Args:
            url: redis://, rediss:// or unix://.
            space: whose KV is kept.
            clock: seconds.
        """
        self.run_blocks = space.run_blocks
        self.rule = RestoreRule()
        self.tally = KvTally()
        self._space = space
        self._place = describe_url(url)
        self._clock = clock
        self._is_up = False
        self._retry_s = FIRST_RETRY_S
        self._has_warned = False
        self._is_closed = False
        self._known: OrderedDict[bytes, float] = OrderedDict()  # until when it is believed; changed under _lock
        self._offers: queue.Queue[_Offer | None] = queue.Queue(MAX_OFFERS)
        self._fetches: queue.SimpleQueue[_Fetch | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._writer, self._reader = _connect(url), _connect(url)
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._write_all, "kv-tier-write"), (self._read_all, "kv-tier-read"))
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, name: bytes, read: Read) -> None:
        """See `ColdTier.offer`."""
        if self._is_known(name):
            return
        if not self._is_up:
            self.tally.dropped["unavailable"] += 1
            return
        try:
            self._offers.put_nowait((name, read))
        except queue.Full:
            self.tally.dropped["queue_full"] += 1

    def fetch(self, names: Sequence[bytes], replay_s: Sequence[float], tell: Tell) -> _Fetch | None:
        """See `ColdTier.fetch`."""
        self.tally.replay_s_per_run = replay_s[-1] / len(replay_s)
        if not self._is_up:
            self.tally.choices["unavailable"] += 1
            return None
        with self._lock:
            num_runs = self.rule.num_worth(replay_s, self._space.payload_bytes, self._queued_bytes)
            if not num_runs:
                self.tally.choices["replay"] += 1
                return None
            self._queued_bytes += num_runs * self._space.payload_bytes
            patience_s = PATIENCE_FACTOR * self.rule.restore_s(self._queued_bytes) + PATIENCE_S
        fetch = _Fetch(self, names[:num_runs], replay_s[:num_runs], tell)
        fetch.patience_s = patience_s
        self._fetches.put(fetch)
        return fetch

    def note_late(self, patience_s: float) -> None:
        """A fetch was not told to its end within its patience."""
        self.tally.choices["late"] += 1
        self._fail(f"it did not answer within {patience_s * 1e3:.0f} ms")

    def close(self) -> None:
        """Writes what is queued, for a while, and ends the threads. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fetches.put(None)
        end_s = time.monotonic() + CLOSE_S
        try:
            self._offers.put(None, timeout=CLOSE_S)
        except queue.Full:
            self._is_up = False
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        for client in (self._writer, self._reader):
            client.close()

    # The writer's thread.

    def _write_all(self) -> None:
        while batch := self._next_offers():
            try:
                self._write(batch)
            except Exception as error:
                self._fail_by(error)

    def _next_offers(self) -> list[_Offer]:
        """Those that wait, or the next; empty once the tier is closed."""
        batch: list[_Offer] = []
        while len(batch) < MAX_BATCH and (not batch or not self._offers.empty()):
            offer = self._offers.get()
            if offer is None:
                break
            batch.append(offer)
        return batch

    def _write(self, batch: Sequence[_Offer]) -> None:
        offers = [(name, read) for name, read in batch if not self._is_known(name)]
        if not self._is_up or not offers:
            return
        there = self._touch(self._writer, [name for name, _ in offers])
        for (name, read), is_there in zip(offers, there, strict=True):
            if is_there or self._keep(name, read):
                self._note_known(name)

    def _is_known(self, name: bytes) -> bool:
        return self._known.get(name, 0.0) > self._clock()

    def _note_known(self, name: bytes) -> None:
        with self._lock:
            self._known[name] = self._clock() + KNOWN_S
            self._known.move_to_end(name)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _keep(self, name: bytes, read: Read) -> bool:
        payload = read()
        if payload is None:
            self.tally.dropped["evicted"] += 1
            return False
        try:
            self._writer.set(self._space.key(name), self._space.encode(name, payload))
        except OutOfMemoryError as error:
            self.tally.dropped["refused"] += 1
            self._warn_once(str(error))
            return False
        self.tally.num_bytes["written"] += payload.nbytes
        return True

    # The reader's thread.

    def _read_all(self) -> None:
        self._probe()
        while not self._is_closed:
            try:
                fetch = self._fetches.get(timeout=PROBE_INTERVAL_S if self._is_up else self._retry_s)
            except queue.Empty:
                self._probe()
            else:
                if fetch is not None:
                    self._serve(fetch)

    def _serve(self, fetch: _Fetch) -> None:
        try:
            if self._is_up and not fetch.is_over:
                self._fetch_runs(fetch)
        except Exception as error:
            self._fail_by(error)
        finally:
            with self._lock:
                self._queued_bytes -= len(fetch.names) * self._space.payload_bytes
            fetch.tell(None)

    def _fetch_runs(self, fetch: _Fetch) -> None:
        began_s = time.monotonic()
        there = self._touch(self._reader, fetch.names)
        self.rule.observe_latency(time.monotonic() - began_s)
        num_there = (*there, False).index(False)
        num_runs = self.rule.num_worth(fetch.replay_s[:num_there], self._space.payload_bytes)
        self.tally.choices["restore" if num_runs else "replay" if num_there else "missing"] += 1
        for name in fetch.names[:num_runs]:
            if not fetch.wait_for_room() or (payload := self._get(name)) is None:
                return
            fetch.tell(payload)

    def _get(self, name: bytes) -> Payload | None:
        began_s = time.monotonic()
        value = self._reader.get(self._space.key(name))
        payload = None if value is None else self._space.decode(name, value)
        if payload is None:
            with self._lock:
                self._known.pop(name, None)
            self.tally.num_damaged += value is not None
            return None
        self.rule.observe_transfer(payload.nbytes, time.monotonic() - began_s)
        self.tally.num_bytes["read"] += payload.nbytes
        return payload

    def _touch(self, client: Any, names: Sequence[bytes]) -> list[bool]:
        """Which runs are there; they count as used."""
        with client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.touch(self._space.key(name))
            return [bool(count) for count in pipeline.execute()]

    def _probe(self) -> None:
        """Finds out whether Redis answers, and measures it by a value of its own."""
        num_bytes = min(self._space.payload_bytes, MAX_PROBE_BYTES)
        key = f"specdec-kv:{VERSION}:probe:{num_bytes}"
        try:
            if self._reader.get(key) is None:
                self._reader.set(key, bytes(num_bytes), ex=_PROBE_TTL_S)
            for _ in range(_NUM_PROBES):
                began_s = time.monotonic()
                self._touch(self._reader, [b""])
                answered_s = time.monotonic()
                value = self._reader.get(key)
                if value:
                    self.rule.observe_transfer(len(value), time.monotonic() - answered_s)
                self.rule.observe_latency(answered_s - began_s)
        except Exception as error:
            self._fail_by(error)
            return
        if not self._is_up and self._has_warned:
            _log.warning("the KV tier at %s answers again", self._place)
        self._is_up, self._has_warned, self._retry_s = True, False, FIRST_RETRY_S

    def _fail_by(self, error: Exception) -> None:
        if not isinstance(error, RedisError | OSError):
            _log.error("the KV tier failed", exc_info=error)
        self._fail(" ".join(str(error).split()).rstrip(".") or type(error).__name__)

    def _fail(self, reason: str) -> None:
        """Leaves Redis alone for a while."""
        if self._is_closed:
            return
        self._retry_s = FIRST_RETRY_S if self._is_up else min(MAX_RETRY_S, 2 * self._retry_s)
        self._is_up = False
        self._warn_once(reason)
        self._fetches.put(None)  # the reader waits as long as for a Redis that is well

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("serving without the KV tier at %s for now: %s", self._place, reason)


def _connect(url: str) -> Any:
    return Redis.from_url(
        url,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=SOCKET_TIMEOUT_S,
        socket_read_size=_READ_BYTES,
        retry=Retry(NoBackoff(), 0),
        # One dialect for every client version the package admits.
        protocol=2,
    )
