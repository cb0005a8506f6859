"""Child processes of `specdec up`: start, watch, relay what they say, stop. Knows no service by name."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import specdec

_LEVELS = ("debug", "info", "warning", "error", "critical")
#: Least severe records that are shown of a start.
_START_LEVEL = "info"
#: Records that are events rather than sentences: their numbers are shown beside the message.
_DETAILED_LEVELS = {"debug", "info"}
#: What every record has, and is not shown.
_PLAIN_FIELDS = {"time", "level", "service", "logger", "message", "traceback"}
_LAST_WORD_LEVELS = {"error", "critical"}
_PACKAGE_ROOT = str(Path(specdec.__file__).resolve().parents[1])
_STOP_GRACE_S = 10.0
#: For the last lines of a child that has ended; a process of its own may hold their pipe for longer.
_LAST_LINES_S = 1.0

#: Set for services unless the caller has its own. gRPC reads it when it is imported. Its event engine hands every
#: message through two more threads than the polling it replaced: 40 % of a small call's time here
#: (docs/performance.md).
SERVICE_ENVIRONMENT = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}


def free_ports(count: int) -> list[int]:
    """Loopback TCP ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]


class Child:
    """One service as a child process.

    What it writes is read line by line. JSON log records go to stderr at once, while it starts those from info up:
    they say what takes so long; after `relay()` those from `shown_level` up. Plain lines are held back until then, so
    that a failed start can be told in one line; from then on they go to stderr too.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        shown_level: str = "warning",
    ) -> None:
        """Starts `python -m MODULE ARGUMENTS` in a session of its own: Ctrl-C reaches the parent alone.

        Whatever folder this is started from, the child imports the packages that we are: without -P its current folder
        would come first, where a folder called specdec may lie.
        """
        self.name = name
        self.arguments = tuple(arguments)
        self.has_started = False
        """Whether it has said where it listens, which services do once they serve."""
        self.stage = "starting"
        """What it last said that it does."""
        self.refusals: dict[str, str] = {}
        """Replicas that it said it refuses, by HOST:PORT, each as the "CODE REASON: message" of an error line."""
        self._module, self._environ, self._shown_level = module, environ, shown_level
        self._held: list[str] = []
        self._relaying = False
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "specdec.cli.child", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**SERVICE_ENVIRONMENT, **environ, "PYTHONPATH": _python_path(environ)},
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name=f"{name}-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def again(self) -> Child:
        """The same child, started once more. Only for one that has ended."""
        return Child(self.name, self._module, self.arguments, self._environ, shown_level=self._shown_level)

    def ending(self) -> str:
        """Once it has ended: "signal 9", or its exit code, and why, where it ended before it was relayed."""
        code = self._process.wait()
        self._reader.join(_LAST_LINES_S)  # what it said last is told first
        if code < 0:
            return f"signal {-code}"
        words = "" if self._relaying else self.last_words()
        return f"exit code {code}" + (f": {words}" if words and not words.startswith("exit code") else "")

    def last_words(self) -> str:
        """Once it has ended: the last line that says why, or its exit code."""
        self._reader.join()
        with self._lock:
            for line in reversed(self._held):
                if line.strip():
                    return line.strip().removeprefix("error: ")
        return f"exit code {self._process.returncode}"

    def relay(self) -> None:
        """It has started: what it says from now on matters, the chatter of loading (progress bars) does not."""
        with self._lock:
            self._relaying = True
            self._held.clear()

    def ask_to_stop(self) -> None:
        """SIGTERM: drain and end."""
        self._process.terminate()

    def stop(self) -> None:
        """Asks it to stop and waits; after a while makes it. Idempotent."""
        self.ask_to_stop()
        try:
            self._process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None  # it was opened above
        for line in self._process.stdout:
            record = _record(line)
            with self._lock:
                if record is not None:
                    self._take(record)
                elif self._relaying:
                    self._pass_on(line.rstrip("\n"))
                else:
                    self._held.append(line.rstrip("\n"))

    def _take(self, record: Mapping[str, Any]) -> None:
        level, message = str(record.get("level", "")).lower(), str(record.get("message", json.dumps(record)))
        self.stage = text = " ".join(message.split())
        self.has_started = self.has_started or "advertised" in record
        if "refused" in record:
            self.refusals[str(record["refused"])] = f"{record.get('code')} {record.get('reason')}: {text}"
        if _severity(level) >= _severity(self._shown_level if self._relaying else _START_LEVEL):
            self._pass_on(text + _details(record) if self._relaying and level in _DETAILED_LEVELS else text)
        if level in _LAST_WORD_LEVELS:
            self._held.append(text)

    def _pass_on(self, text: str) -> None:
        print(f"[{self.name}] {text}", file=sys.stderr, flush=True)


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


def _python_path(environ: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, (_PACKAGE_ROOT, environ.get("PYTHONPATH"))))
