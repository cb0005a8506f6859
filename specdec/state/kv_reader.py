"""Fetches runs of KV from the cold tier in a thread of its own if that is faster than prefill, and measures the
fetches.

    request ─▶ faster if all runs exist? ─▶ queue ─▶ faster for those that exist? ─▶ runs, one by one ─▶ end
                  │ no: refused at once                  │ no: end

Without requests it measures with a test value from time to time, and detects when a Redis that failed answers again.
The rule is `specdec.core.restore_rule`; `kv_values` defines values. Built by `kv_tier`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from specdec.core.restore_rule import RestoreRule
from specdec.state.kv_link import KvLink, touch
from specdec.state.kv_values import KvSpace, KvTally, Payload, checksum

#: Limit of runs that are fetched and not yet copied into KV blocks.
MAX_AHEAD = 2
#: Time limit of a fetch, after which its caller continues without it: PATIENCE_FACTOR times the predicted time, plus
#: PATIENCE_S or the time of computing the runs, whichever is less.
PATIENCE_FACTOR = 2.0
PATIENCE_S = 0.25
#: Time without requests after which the store is measured again; the shorter one holds after a request was refused by
#: the rule, because a refused request measures nothing.
PROBE_INTERVAL_S = 30.0
DOUBT_S = 5.0
MAX_PROBE_BYTES = 1 << 20
_PROBE_TTL_S = 120
_NUM_PROBES = 3

Tell = Callable[[Payload | None], None]


class KvFetch:
    """Implements `engine.cold_tier.Fetch`."""

    def __init__(self, reader: KvReader, names: Sequence[bytes], replay_s: Sequence[float], tell: Tell) -> None:
        self.names = names
        self.replay_s = replay_s
        self.tell = tell
        self.patience_s = float("inf")
        self.is_over = False
        self._reader = reader
        self._room = threading.Semaphore(MAX_AHEAD)

    def copy_parts(self, _run: int, _first_row: int, _block_ids: Sequence[int]) -> None:
        """See `engine.cold_tier.Fetch`; a tier knows of one rank."""
        return

    def note_copied(self, num_bytes: int, seconds: float) -> None:
        """See `engine.cold_tier.Fetch`."""
        self._reader.note_copied(num_bytes, seconds)
        self._room.release()

    def stop(self, *, is_late: bool = False) -> None:
        """See `engine.cold_tier.Fetch`."""
        self.is_over = True
        self._room.release()
        if is_late:
            self._reader.note_late()

    def wait_for_room(self) -> bool:
        """Wait until a further run may be fetched; return False if no more are wanted."""
        self._room.acquire(timeout=self.patience_s)
        return not self.is_over


class KvReader:
    """The reading side of one tier."""

    def __init__(
        self, link: KvLink, space: KvSpace, tally: KvTally, rule: RestoreRule, forget: Callable[[bytes], None]
    ) -> None:
        """Start the thread; `forget` is called with the names of runs that do not exist."""
        self._link = link
        self._space = space
        self._tally = tally
        self._rule = rule
        self._forget = forget
        self._client = link.connect()
        self._fetches: queue.SimpleQueue[KvFetch | None] = queue.SimpleQueue()
        self._queued_bytes = 0  # changed under _lock
        self._lock = threading.Lock()
        self._is_closed = False
        self._has_checked_policy = False
        self._measured_s = float("-inf")
        # Wakes the thread, which sleeps for the interval of a Redis that works.
        link.when_down = lambda: self._fetches.put(None)
        self._thread = threading.Thread(target=self._run, name="kv-tier-read", daemon=True)
        self._thread.start()

    def fetch(self, names: Sequence[bytes], replay_s: Sequence[float], tell: Tell) -> KvFetch | None:
        """See `engine.cold_tier.ColdTier.fetch`. From any thread; never waits."""
        self._tally.replay_s_per_run = replay_s[-1] / len(replay_s)
        if not self._link.is_up:
            self._tally.choices["unavailable"] += 1
            return None
        run_bytes = self._space.payload_bytes
        with self._lock:
            num_runs = self._rule.num_worth(replay_s, run_bytes, self._queued_bytes)
            if not num_runs:
                self._tally.choices["replay"] += 1
                self._fetches.put(None)
                return None
            self._queued_bytes += num_runs * run_bytes
            patience_s = PATIENCE_FACTOR * self._rule.restore_s(self._queued_bytes) + min(PATIENCE_S, replay_s[-1])
        fetch = KvFetch(self, names[:num_runs], replay_s[:num_runs], tell)
        fetch.patience_s = patience_s
        self._fetches.put(fetch)
        return fetch

    def note_copied(self, num_bytes: int, seconds: float) -> None:
        """Note that a fetched run was copied into KV blocks."""
        self._rule.observe_copy(num_bytes, seconds)
        self._tally.num_restored += 1

    def note_late(self) -> None:
        """Count a fetch that did not end in time. The store stays in use; the rule learns from the measured times."""
        self._tally.choices["late"] += 1

    def close(self, patience_s: float) -> None:
        """End the thread; fetches that have not begun by then get no answer."""
        self._is_closed = True
        self._fetches.put(None)
        self._thread.join(patience_s)
        if not self._thread.is_alive():
            self._client.close()

    # On the thread.

    def _run(self) -> None:
        self._probe()
        while not self._is_closed:
            try:
                fetch = self._fetches.get(timeout=PROBE_INTERVAL_S if self._link.is_up else self._link.retry_s)
            except queue.Empty:
                self._probe()
            else:
                if fetch is not None:
                    self._serve(fetch)
                elif self._link.is_up and time.monotonic() > self._measured_s + DOUBT_S:
                    self._probe()

    def _serve(self, fetch: KvFetch) -> None:
        try:
            if self._link.is_up and not fetch.is_over:
                self._fetch_runs(fetch)
        except Exception as error:
            self._link.fail_by(error)
        finally:
            with self._lock:
                self._queued_bytes -= len(fetch.names) * self._space.payload_bytes
            fetch.tell(None)

    def _fetch_runs(self, fetch: KvFetch) -> None:
        began_s = time.monotonic()
        there = touch(self._client, [self._space.key(name) for name in fetch.names])
        self._rule.observe_latency(time.monotonic() - began_s)
        num_there = (*there, False).index(False)
        num_runs = self._rule.num_worth(fetch.replay_s[:num_there], self._space.payload_bytes)
        self._tally.choices["restore" if num_runs else "replay" if num_there else "missing"] += 1
        for name in fetch.names[num_there : num_there + 1]:
            self._forget(name)
        for name in fetch.names[:num_runs]:
            if not fetch.wait_for_room() or (payload := self._get(name)) is None:
                return
            fetch.tell(payload)

    def _get(self, name: bytes) -> Payload | None:
        began_s = time.monotonic()
        value = self._client.get(self._space.key(name))
        payload = None if value is None else self._space.decode(name, value)
        if payload is None:
            self._forget(name)
            self._tally.num_damaged += value is not None
            return None
        self._measured_s = time.monotonic()
        self._rule.observe_transfer(payload.nbytes, self._measured_s - began_s)
        self._tally.num_bytes["read"] += payload.nbytes
        return payload

    def _probe(self) -> None:
        """Check whether Redis answers, and measure it with a test value."""
        num_bytes = min(self._space.payload_bytes, MAX_PROBE_BYTES)
        key = self._space.probe_key(num_bytes)
        try:
            if self._client.get(key) is None:
                self._client.set(key, bytes(num_bytes), ex=_PROBE_TTL_S)
            for _ in range(_NUM_PROBES):
                began_s = time.monotonic()
                touch(self._client, [key])
                answered_s = time.monotonic()
                value = self._client.get(key)
                if value:
                    checksum(value)
                    self._rule.observe_transfer(len(value), time.monotonic() - answered_s)
                self._rule.observe_latency(answered_s - began_s)
            self._measured_s = time.monotonic()
            self._check_policy()
        except Exception as error:
            self._link.fail_by(error)
        else:
            self._link.note_up()

    def _check_policy(self) -> None:
        """Warn, once, about a Redis that would never evict values."""
        if self._has_checked_policy:
            return
        self._has_checked_policy = True
        try:
            memory = self._client.info("memory")
        except RedisError:  # some hosts do not permit INFO
            return
        if not memory.get("maxmemory") or not str(memory.get("maxmemory_policy")).startswith("allkeys"):
            self._link.warn_of_growth()
