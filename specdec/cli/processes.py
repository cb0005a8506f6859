"""Child processes of `specdec up`: start, watch, relay what they say, stop. Knows no service by name."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_QUIET_LEVELS = {"debug", "info"}
_STOP_GRACE_S = 10.0
_CHILD = Path(__file__).with_name("child.py")

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

    What it writes is read line by line and JSON log records below warning are dropped, but those of a long start (the
    ones that have a `progress`), which go to stderr at once. Until `relay()` the rest is held back, so that a failed
    start can be told in one line; from then on it goes to stderr.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts `python -m MODULE ARGUMENTS` in a session of its own: Ctrl-C reaches the parent alone."""
        self.name = name
        self._held: list[str] = []
        self._relaying = False
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**SERVICE_ENVIRONMENT, **environ},
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
            text = line.rstrip("\n") if record is None else _worth_telling(record)
            if text is None:
                continue
            with self._lock:
                if self._relaying or (record is not None and "progress" in record):
                    self._pass_on(text)
                else:
                    self._held.append(text)

    def _pass_on(self, text: str) -> None:
        print(f"[{self.name}] {text}", file=sys.stderr, flush=True)


def _record(line: str) -> dict[str, Any] | None:
    """A line's log record; None for a line that is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _worth_telling(record: Mapping[str, Any]) -> str | None:
    """A record as a person should see it; None below warning, unless it is a step of a long start."""
    if str(record.get("level", "")).lower() in _QUIET_LEVELS and "progress" not in record:
        return None
    return str(record.get("message", json.dumps(record)))
