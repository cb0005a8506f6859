"""The base class of a service that `specdec up` supervises: what it writes, and what its supervisor may ask of it.

Every line that a service writes arrives here. JSON log records go to stderr at once: while the service starts, those
of level info and above, because they say what takes so long; after `relay()`, those of `shown_level` and above. Plain
lines are held back until `relay()`, so that a failed start can be reported in one line; after it they go to stderr too.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from specdec.contract.errors import Internal, SpecdecError, Unavailable, parse_error_line, type_of_reason

#: Time that a service gets to drain and end once it was asked to stop.
STOP_GRACE_S = 10.0

_LEVELS = ("debug", "info", "warning", "error", "critical")
#: Least severe records that are shown while a service starts.
_START_LEVEL = "info"
#: Records of these levels are events rather than sentences: their fields are shown beside the message.
_DETAILED_LEVELS = {"debug", "info"}
#: Fields that every record has, and that are not shown.
_PLAIN_FIELDS = {"time", "level", "service", "logger", "message", "traceback"}
_LAST_WORD_LEVELS = {"error", "critical"}


def tell(message: str) -> None:
    """Write a line to stderr. A full disk or a closed pipe loses the line; the system runs on."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


class Service(ABC):
    """One service. It has been started by the time the object exists."""

    def __init__(self, name: str, *, shown_level: str = "warning") -> None:
        self.name = name
        self.address = ""
        """HOST:PORT at which others dial the service; "" until its log names it, which it does once it serves."""
        self.stage = "starting"
        """The service's last log message: what it is doing."""
        self.refusals: dict[str, SpecdecError] = {}
        """Replicas that the service has reported to refuse, by HOST:PORT."""
        self._shown_level = shown_level
        self._held: list[str] = []
        self._relaying = False
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """True until the service has ended."""

    @property
    def has_started(self) -> bool:
        """True once the service has reported its address, which it does when it serves."""
        return bool(self.address)

    @property
    def is_serving(self) -> bool:
        return self.has_started and self.is_alive

    @abstractmethod
    def again(self) -> Self:
        """Start the same service once more. Call this only after it has ended."""

    @abstractmethod
    def ending(self) -> str:
        """Return how the service ended, in a few words, and why if it ended before `relay()`."""

    @abstractmethod
    def last_words(self) -> str:
        """Return the last line of the service that says why it ended, or how it ended."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """Ask the service to drain and end. Returns at once."""

    @abstractmethod
    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask the service to stop, wait at most `grace_s`, then end it by force. Idempotent."""

    def failure(self) -> SpecdecError:
        """Return why the service ended before it served: its own error line if it wrote one."""
        words = self.last_words()
        return parse_error_line(words) or Unavailable(f"{self.name} did not start: {words}")

    def relay(self) -> None:
        """Show from now on what the service writes, and drop what it wrote while it started (progress bars)."""
        with self._lock:
            self._relaying = True
            self._held.clear()

    def say(self, message: str) -> None:
        """Write a line about this service to stderr."""
        tell(f"[{self.name}] {message}")

    def _hear(self, line: str) -> None:
        """Process a line that the service wrote."""
        record = _record(line)
        with self._lock:
            if record is not None:
                self._take(record)
            elif self._relaying:
                self.say(line.rstrip("\n"))
            else:
                self._held.append(line.rstrip("\n"))

    def _held_words(self) -> str:
        """Return the line that says why the service ended: its first error line, else its last line, else "".

        Of several processes the first to fail has the reason. The others only report that they lost it.
        """
        with self._lock:
            lines = [line.strip().removeprefix("error: ") for line in self._held if line.strip()]
        return next(filter(parse_error_line, lines), lines[-1] if lines else "")

    def _with_reason(self, outcome: str) -> str:
        words = "" if self._relaying else self._held_words()
        return f"{outcome}: {words}" if words else outcome

    def _take(self, record: Mapping[str, Any]) -> None:
        level, message = str(record.get("level", "")).lower(), str(record.get("message", json.dumps(record)))
        self.stage = text = " ".join(message.split())
        self.address = self.address or str(record.get("advertised", ""))
        if "refused" in record:
            error_type = type_of_reason(str(record.get("reason"))) or Internal
            self.refusals[str(record["refused"])] = error_type(text, reason=str(record.get("reason", "")))
        if _severity(level) >= _severity(self._shown_level if self._relaying else _START_LEVEL):
            self.say(text + _details(record) if self._relaying and level in _DETAILED_LEVELS else text)
        if level in _LAST_WORD_LEVELS:
            self._held.append(text)


def _severity(level: str) -> int:
    """Return the rank of a level. An unknown level ranks highest, so that its records are shown."""
    return _LEVELS.index(level) if level in _LEVELS else len(_LEVELS)


def _details(record: Mapping[str, Any]) -> str:
    return "".join(f" {key}={value}" for key, value in record.items() if key not in _PLAIN_FIELDS)


def _record(line: str) -> dict[str, Any] | None:
    """Return the log record that a line holds; None for a plain line."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
