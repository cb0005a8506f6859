"""A filter for records that libraries write about malformed requests: at most one a second, as a warning.

Each hostile request would otherwise add a line, with a traceback in some cases, so that a client could fill the disk
and hide other records. Installed by `specdec.observability.logging`.
"""

from __future__ import annotations

import logging
import time

#: Beginnings of such records, by the name of their logger.
_BEGINNINGS = {
    "grpc._cython.cygrpc": ("Invalid encoding on",),
    "uvicorn.error": ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket library"),
}

_INTERVAL_S = 1.0


class ClientFaults(logging.Filter):
    """Drops a record whose like was written less than a second ago."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        """`beginnings` of the messages of such records."""
        super().__init__()
        self._beginnings = beginnings
        self._written_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        beginning = next((words for words in self._beginnings if str(record.msg).startswith(words)), None)
        if beginning is None:
            return True
        now_s = time.monotonic()
        if now_s - self._written_s.get(beginning, float("-inf")) < _INTERVAL_S:
            return False
        self._written_s[beginning] = now_s
        record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
        return True


def install() -> None:
    """Filter the records of this process. A second call changes nothing."""
    for name, beginnings in _BEGINNINGS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, ClientFaults) for each in logger.filters):
            logger.addFilter(ClientFaults(beginnings))
