"""Writes usage records of turns that ended early and were not resumed before their sessions expired; trims old ones.

All other records are written by the script that ends a turn: its last commit, the next turn's beginning, or the
session's deletion (`specdec.state.usage_records`). Every coordinator looks, and each turn gets one record.
"""

from __future__ import annotations

import asyncio
import logging
import time

from specdec.contract.errors import SpecdecError
from specdec.state.usage_records import UsageRecords

#: Pause between two looks: a share of the time after which sessions expire, between these limits.
_SHARE_OF_TTL = 0.1
_MIN_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0

#: Pause between two removals of old records.
_TRIM_PAUSE_S = 3600.0

_log = logging.getLogger(__name__)


async def record_expired_turns(usage: UsageRecords, kept_s: float, session_ttl_s: float) -> None:
    """Look for turns of expired sessions, and for old records to remove, until cancelled.

    Args:
        kept_s: time for which records are kept.
        session_ttl_s: time after which sessions expire.
    """
    pause_s = min(max(session_ttl_s * _SHARE_OF_TTL, _MIN_PAUSE_S), _MAX_PAUSE_S)
    trimmed_s = float("-inf")
    while True:
        try:
            await usage.note_kept(kept_s)
            if num_recorded := await usage.record_expired():
                _log.info("usage records of turns that were not resumed", extra={"num_turns": num_recorded})
            if time.monotonic() - trimmed_s >= _TRIM_PAUSE_S:
                await usage.trim()
                trimmed_s = time.monotonic()
        except SpecdecError as error:
            _log.warning("cannot write usage records of expired sessions, trying again: %s", error)
        await asyncio.sleep(pause_s)
