"""Renews the leases of all running generations, from a thread with its own connection to the store.

Leases are short, so that another coordinator can soon take the sessions of a dead one. The event loop may block for
longer than a lease lives, which is why a thread renews them. When the loop has not turned for `LOOP_TIMEOUT_S`, the
thread takes it for hung and lets the leases expire. `held_session` adds and drops leases; the next commit under a lost
lease fails.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from dataclasses import dataclass

from specdec.contract.errors import LeaseLost, NotFound, SpecdecError
from specdec.contract.tenant import SessionKey
from specdec.state.store import Lease, SessionStore

#: Time without a turn of the event loop after which the loop is taken for hung.
LOOP_TIMEOUT_S = 10.0

#: Limit on renewals sent to the store together, because commits wait behind them.
MAX_BATCH = 64

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Kept:
    lease: Lease
    renew_at: float
    context: contextvars.Context
    """Context of the lease's owner, whose ids the records about the lease have."""


class LeaseKeeper:
    """Renews leases. Used from one event loop; the thread starts with the first lease."""

    def __init__(self, store: SessionStore, *, loop_timeout_s: float = LOOP_TIMEOUT_S) -> None:
        """`store` is opened a second time in the thread."""
        self._store = store
        self._loop_timeout_s = loop_timeout_s
        self._lock = threading.Lock()
        self._kept: dict[SessionKey, _Kept] = {}
        """Leases by session. The thread reads them too, under the lock."""
        self._turned_at = 0.0
        """`time.monotonic()` of the event loop's last known turn."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_kept(self) -> int:
        """Number of leases that are renewed."""
        return len(self._kept)

    def keep(self, lease: Lease) -> None:
        """Renew a lease that was just taken, until `drop` or until it is lost."""
        with self._lock:
            self._kept[lease.key] = _Kept(lease, time.monotonic() + lease.ttl_s / 3, contextvars.copy_context())
        if self._thread is None:
            self._closing = threading.Event()
            self._note_turn()
            # Six checks in the life of a lease: a renewal is due after a third, which leaves time for several attempts.
            arguments = (self._closing, asyncio.get_running_loop(), lease.ttl_s / 6)
            self._thread = threading.Thread(target=self._run, args=arguments, name="lease keeper", daemon=True)
            self._thread.start()

    def drop(self, lease: Lease) -> None:
        """Stop renewing a lease; a renewal under way may still reach the store. Idempotent."""
        with self._lock:
            kept = self._kept.get(lease.key)
            if kept is not None and kept.lease is lease:
                del self._kept[lease.key]

    async def close(self) -> None:
        """End the thread; leases that are still kept expire. Idempotent."""
        thread, self._thread = self._thread, None
        self._closing.set()
        if thread is not None:
            await asyncio.to_thread(thread.join, 1.0)  # a store that does not answer may block it for longer

    def _note_turn(self) -> None:
        self._turned_at = time.monotonic()

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _run(self, closing: threading.Event, loop: asyncio.AbstractEventLoop, period_s: float) -> None:
        try:
            asyncio.run(self._renew_until(closing, loop, period_s))
        except RuntimeError:
            if not loop.is_closed():  # a closed loop ended without calling `close`
                raise

    async def _renew_until(self, closing: threading.Event, loop: asyncio.AbstractEventLoop, period_s: float) -> None:
        store = self._store.reopen()
        try:
            while not closing.wait(period_s):  # may block: nothing else runs on this thread's loop
                is_hung = time.monotonic() - self._turned_at > self._loop_timeout_s
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
                    self._note_lost(kept, error)

    def _note_lost(self, kept: _Kept, error: SpecdecError) -> None:
        lease = kept.lease
        with self._lock:
            is_ours = lease.key in self._kept and self._kept[lease.key].lease is lease
        if is_ours:  # otherwise it was given back during the renewal
            words = "lease lost: tenant=%s session=%s: %s"
            kept.context.run(_log.warning, words, lease.tenant, lease.session_id, error)
            self.drop(lease)
