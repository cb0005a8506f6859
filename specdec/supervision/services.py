"""A service that `specdec up` keeps, wherever it runs: what it says, and what its keeper may ask of it.

What a service writes comes here line by line. JSON log records go to stderr at once, while it starts those from info
up: they say what takes so long; after `relay()` those from `shown_level` up. Plain lines are held back until then, so
that a failed start can be told in one line; from then on they go to stderr too.

Not here: where it runs, which its kinds know (`processes`: on this machine, `placed`: on a node of a Ray cluster).
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from specdec.errors import Unavailable

#: To drain and end, when asked to.
STOP_GRACE_S = 10.0

_LEVELS = ("debug", "info", "warning", "error", "critical")
#: Least severe records that are shown of a start.
_START_LEVEL = "info"
#: Records that are events rather than sentences: their numbers are shown beside the message.
_DETAILED_LEVELS = {"debug", "info"}
#: What every record has, and is not shown.
_PLAIN_FIELDS = {"time", "level", "service", "logger", "message", "traceback"}
_ERROR_LINE = re.compile(r"[A-Z_]+ [A-Z_]+: ")
_LAST_WORD_LEVELS = {"error", "critical"}


def tell(words: str) -> None:
    """Says something to the user. On a full disk, or to a reader who left, it is lost, and the system runs on."""
    with contextlib.suppress(OSError):
        print(words, file=sys.stderr, flush=True)


class Service(ABC):
    """One service; it has been started when the object is made."""

    def __init__(self, name: str, *, shown_level: str = "warning") -> None:
        self.name = name
        self.address = ""
        """HOST:PORT where others dial it; services say so once they serve."""
        self.stage = "starting"
        """What it last said that it does."""
        self.refusals: dict[str, str] = {}
        """Replicas that it said it refuses, by HOST:PORT, each as the "CODE REASON: message" of an error line."""
        self._shown_level = shown_level
        self._held: list[str] = []
        self._relaying = False
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""

    @property
    def has_started(self) -> bool:
        """Whether it has said where it listens, which services do once they serve."""
        return bool(self.address)

    @property
    def is_serving(self) -> bool:
        return self.has_started and self.is_alive

    @abstractmethod
    def again(self) -> Self:
        """The same service, started once more. Only for one that has ended."""

    @abstractmethod
    def ending(self) -> str:
        """Once it has ended: how, in a few words, and why, where it ended before it was relayed."""

    @abstractmethod
    def last_words(self) -> str:
        """Once it has ended: the last line that says why, or how it ended."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """Drain and end. Returns at once."""

    @abstractmethod
    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Asks it to stop and waits for so long at most, then makes it. Idempotent."""

    def failure(self) -> str:
        """Once it has ended before it served: why, as the "CODE REASON: message" of an error line."""
        words = self.last_words()
        if _ERROR_LINE.match(words):
            return words
        return f"{Unavailable.code} {Unavailable.default_reason}: {self.name} did not start: {words}"

    def relay(self) -> None:
        """It has started: what it says from now on matters, the chatter of loading (progress bars) does not."""
        with self._lock:
            self._relaying = True
            self._held.clear()

    def say(self, words: str) -> None:
        """Says something of this service to the user."""
        tell(f"[{self.name}] {words}")

    def _hear(self, line: str) -> None:
        """Takes a line that it wrote."""
        record = _record(line)
        with self._lock:
            if record is not None:
                self._take(record)
            elif self._relaying:
                self.say(line.rstrip("\n"))
            else:
                self._held.append(line.rstrip("\n"))

    def _held_words(self) -> str:
        """What says why it ended: the first error line, else the last line; "" where there is none.

        Of several processes the first to fail has the reason: what the others say then is that they have lost it.
        """
        with self._lock:
            lines = [line.strip().removeprefix("error: ") for line in self._held if line.strip()]
        return next(filter(_ERROR_LINE.match, lines), lines[-1] if lines else "")

    def _with_reason(self, outcome: str) -> str:
        words = "" if self._relaying else self._held_words()
        return f"{outcome}: {words}" if words else outcome

    def _take(self, record: Mapping[str, Any]) -> None:
        level, message = str(record.get("level", "")).lower(), str(record.get("message", json.dumps(record)))
        self.stage = text = " ".join(message.split())
        self.address = self.address or str(record.get("advertised", ""))
        if "refused" in record:
            self.refusals[str(record["refused"])] = f"{record.get('code')} {record.get('reason')}: {text}"
        if _severity(level) >= _severity(self._shown_level if self._relaying else _START_LEVEL):
            self.say(text + _details(record) if self._relaying and level in _DETAILED_LEVELS else text)
        if level in _LAST_WORD_LEVELS:
            self._held.append(text)


def _severity(level: str) -> int:
    """Of a level; one that is unknown is shown."""
    return _LEVELS.index(level) if level in _LEVELS else len(_LEVELS)


def _details(record: Mapping[str, Any]) -> str:
    return "".join(f" {key}={value}" for key, value in record.items() if key not in _PLAIN_FIELDS)


def _record(line: str) -> dict[str, Any] | None:
    """A line's log record; None for a line that is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
