"""The leases under which this coordinator writes sessions: take them, and renew those of running generations.

`turn_preparer` takes a lease before it writes a turn, and `log_repair` before a repair; `specdec.state.store` defines
what a lease grants. Leases are short, so that another coordinator can soon take the sessions of a dead one. The event
loop may block for longer than a lease lives, so a thread with its own connection to the store renews them. If the loop
has not run for `LOOP_TIMEOUT_S`, the thread considers it hung and lets the leases expire. `held_session` adds and drops
leases; the next commit under a lost lease fails.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from specdec.contract.errors import LeaseLost, NotFound, SessionBusy, SpecdecError
from specdec.contract.tenant import SessionKey
from specdec.state.store import Lease, SessionStore

#: Pause between attempts to take over a session whose owner may be dead.
TAKEOVER_PAUSE_S = 0.1


class Leases:
    """Leases under this coordinator's name."""

    def __init__(self, store: SessionStore, coordinator_id: str, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        # The random part tells this process from another one that was given the same id.
        self._owner_prefix = f"{coordinator_id}:{secrets.token_hex(8)}:"
        self._nonces = itertools.count()

    def is_ours(self, owner: str) -> bool:
        """Return whether this process took the lease of this owner name."""
        return owner.startswith(self._owner_prefix)

    async def acquire(self, key: SessionKey, *, create: bool, owner: str = "") -> Lease:
        """Take a session that is free, or whose lease `owner` holds. Raises as `SessionStore.acquire`.

        Cancelling leaves no lease behind, and no session that was created by this call.
        """
        owner = owner or f"{self._owner_prefix}{next(self._nonces)}"
        store = self._store.of_tenant(key.tenant)
        taking = asyncio.ensure_future(store.acquire(key.session_id, owner=owner, ttl_s=self._ttl_s, create=create))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.shield(self._give_back(taking))
            raise

    async def _give_back(self, taking: asyncio.Future[Lease]) -> None:
        """Undo an acquisition whose caller was cancelled. Where the store cannot be reached, the lease expires."""
        with suppress(SpecdecError):
            lease = await taking
            record = await self._store.of_tenant(lease.tenant).load(lease.session_id)
            if record is not None and record.request is None:
                await self._store.discard(lease)
            await self._store.release(lease, left=lease.was_left)

    async def take_over(self, key: SessionKey) -> Lease:
        """Take a session with an unfinished request. Wait as long as the lease of a dead owner may still live.

        Raises:
            SessionBusy: the owner of the session lives.
            NotFound: the session is gone.
        """
        deadline = time.monotonic() + self._ttl_s + TAKEOVER_PAUSE_S
        while True:
            try:
                return await self.acquire(key, create=False)
            except SessionBusy:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(TAKEOVER_PAUSE_S)


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
