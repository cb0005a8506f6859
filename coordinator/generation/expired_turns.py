"""Writes the usage records of turns that ended early and were not resumed before their sessions expired.

All other records are written by the script that ends a turn: its last commit, the next turn's beginning, or the
session's deletion (`specdec.state.usage_records`). Every coordinator looks, and each turn gets one record.
"""

from __future__ import annotations

import asyncio
import logging

from specdec.contract.errors import SpecdecError
from specdec.state.usage_records import UsageRecords

#: Pause between two looks: a share of the time after which sessions expire, between these limits.
_SHARE_OF_TTL = 0.1
_MIN_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


async def record_expired_turns(usage: UsageRecords, kept_s: float, session_ttl_s: float) -> None:
    """Look for turns of expired sessions until cancelled; `kept_s` is the time for which records are kept."""
    pause_s = min(max(session_ttl_s * _SHARE_OF_TTL, _MIN_PAUSE_S), _MAX_PAUSE_S)
    while True:
        try:
            await usage.note_kept(kept_s)
            if num_recorded := await usage.record_expired():
                _log.info("usage records of turns that were not resumed", extra={"num_turns": num_recorded})
        except SpecdecError as error:
            _log.warning("cannot write usage records of expired sessions, trying again: %s", error)
        await asyncio.sleep(pause_s)
