"""Renews the leases of everything that runs here, from a thread with a store connection of its own.

A lease is short, so that a dead coordinator's sessions are soon another's; the event loop may be held up for longer
than that, and a lease must not run out meanwhile. A loop that has not turned for `LOOP_PATIENCE_S` is taken for hung:
its leases are left to expire. Not here: taking a lease (`leases`), what a lost one means (the next commit finds out).
Called by `generation`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass

from specdec.errors import LeaseLost, NotFound, SpecdecError
from specdec.state.store import Lease, SessionStore

#: A loop that has not turned for this long will hardly turn again.
LOOP_PATIENCE_S = 10.0

#: Most renewals sent to the store together: commits wait behind them.
MAX_BATCH = 64

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Kept:
    lease: Lease
    renew_at: float


class LeaseKeeper:
    """Use from one event loop. The thread starts with the first lease."""

    def __init__(self, store: SessionStore, *, loop_patience_s: float = LOOP_PATIENCE_S) -> None:
        """`store` is opened once more for the thread."""
        self._store = store
        self._loop_patience_s = loop_patience_s
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        """By session. The thread reads it too, under the lock."""
        self._turned_at = 0.0
        """When the event loop was last seen to turn."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_kept(self) -> int:
        """Leases it renews."""
        return len(self._kept)

    def keep(self, lease: Lease) -> None:
        """Renews a lease, taken a moment ago, until `drop` or until it is no longer ours."""
        with self._lock:
            self._kept[lease.session_id] = _Kept(lease, time.monotonic() + lease.ttl_s / 3)
        if self._thread is None:
            self._closing = threading.Event()
            self._note_turn()
            # Looked at six times in a lease's life: one that is due after a third of it has time for several attempts.
            arguments = (self._closing, asyncio.get_running_loop(), lease.ttl_s / 6)
            self._thread = threading.Thread(target=self._run, args=arguments, name="lease keeper", daemon=True)
            self._thread.start()

    def drop(self, lease: Lease) -> None:
        """Stops renewing it; a renewal under way may still reach the store. Idempotent."""
        with self._lock:
            kept = self._kept.get(lease.session_id)
            if kept is not None and kept.lease is lease:
                del self._kept[lease.session_id]

    async def close(self) -> None:
        """Ends the thread; leases that are still kept expire. Idempotent."""
        thread, self._thread = self._thread, None
        self._closing.set()
        if thread is not None:
            await asyncio.to_thread(thread.join, 1.0)  # a store that does not answer may hold it for longer

    def _note_turn(self) -> None:
        self._turned_at = time.monotonic()

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _run(self, closing: threading.Event, loop: asyncio.AbstractEventLoop, period_s: float) -> None:
        try:
            asyncio.run(self._renew_until(closing, loop, period_s))
        except RuntimeError:
            if not loop.is_closed():  # else it went away without closing us
                raise

    async def _renew_until(self, closing: threading.Event, loop: asyncio.AbstractEventLoop, period_s: float) -> None:
        store = self._store.reopen()
        try:
            while not closing.wait(period_s):  # nothing else runs on this thread's own loop
                is_hung = time.monotonic() - self._turned_at > self._loop_patience_s
                loop.call_soon_threadsafe(self._note_turn)
                if not is_hung:
                    await self._renew_due(store)
        finally:
            await store.close()

    async def _renew_due(self, store: SessionStore) -> None:
        now = time.monotonic()
        with self._lock:
            due = [kept for kept in self._kept.values() if kept.renew_at <= now]
        for start in range(0, len(due), MAX_BATCH):
            batch = due[start : start + MAX_BATCH]
            answers = await store.renew_all([kept.lease for kept in batch])
            for kept, error in zip(batch, answers, strict=True):
                if error is None:
                    kept.renew_at = now + kept.lease.ttl_s / 3
                elif isinstance(error, LeaseLost | NotFound):
                    self._note_lost(kept.lease, error)

    def _note_lost(self, lease: Lease, error: SpecdecError) -> None:
        with self._lock:
            is_ours = lease.session_id in self._kept and self._kept[lease.session_id].lease is lease
        if is_ours:  # else it was given back while it was being renewed
            _log.warning("lost the lease of session %s: %s", lease.session_id, error)
            self.drop(lease)
