"""A write to the session store, read back: a Redis that answers PING may still refuse every session."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

from specdec.cli.checks.finding import Finding, fail, ok
from specdec.contract.errors import SpecdecError

#: Lifetime of what is written, should the doctor be killed before it removes it.
_TTL_S = 60.0
_OWNER = "doctor"


def check_writes(url: str, cluster: str) -> Iterator[Finding]:
    """Store a session by the scripts of the coordinators, read it, and remove it.

    Args:
        url: the store, as `--redis-url` names it.
        cluster: name of the system whose keys are written.
    """
    try:
        asyncio.run(_store_and_remove(url, cluster))
    except SpecdecError as error:
        yield fail("redis writes", f"a session cannot be stored: {error.message}",
                   "free memory or disk, give the URL of the primary, or give its user +@write on specdec's keys; "
                   "look at the log of Redis")  # fmt: skip
    else:
        yield ok("redis writes", "a session was stored, read back and removed")


async def _store_and_remove(url: str, cluster: str) -> None:
    """Raise Unavailable if Redis refuses a step, or answers with something else than was written."""
    from specdec.contract.errors import Unavailable
    from specdec.state.redis_store import open_store

    store = open_store(url, cluster=cluster, session_ttl_s=_TTL_S)
    session_id = f"{_OWNER}-{secrets.token_hex(12)}"
    try:
        lease = await store.acquire(session_id, owner=_OWNER, ttl_s=_TTL_S, create=True)
        record = await store.load(session_id)
        await store.discard(lease)
        if record is None or (record.epoch, record.owner) != (lease.epoch, _OWNER):
            raise Unavailable("what was written was not read back; another program removes keys")
    finally:
        await store.close()
