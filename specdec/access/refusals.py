"""Log lines about refused callers: at most one a second for each host, so that a flood of calls does not fill the log.

A line has the address of the caller and the reason, and no part of a credential.
"""

from __future__ import annotations

import logging
import time

from specdec.contract.errors import SpecdecError

#: Shortest interval between two log lines about one host.
LOG_INTERVAL_S = 1.0

_MAX_REMEMBERED_HOSTS = 1024

_log = logging.getLogger(__name__)


class RefusalLog:
    """Logs refusals of one service."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def note(self, peer: str, error: SpecdecError) -> None:
        """Log a refusal, unless the same host's last line is too recent; `peer` is an address with a port."""
        host, now_s = peer.rpartition(":")[0], time.monotonic()
        if now_s - self._last_s.get(host, float("-inf")) < LOG_INTERVAL_S:
            return
        if len(self._last_s) >= _MAX_REMEMBERED_HOSTS:
            self._last_s.clear()
        self._last_s[host] = now_s
        _log.warning("refused a caller: %s", error.message, extra={"peer": peer, "reason": error.reason})
