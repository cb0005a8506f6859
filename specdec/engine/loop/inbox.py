"""The queue of commands for the device thread, in which that thread also sleeps.

`device_loop` takes commands on the device thread and admits their calls. Any thread posts; the device thread takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

Command = Callable[[], None]


class Inbox:
    """Commands that the device thread has not run yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._commands: list[Command] = []  # guarded by _changed, like the next two
        self._is_closed = False
        self._sleeps_until_s = 0.0
        """Time, by `time.monotonic`, at which the device thread's sleep ends; 0: it is awake, or is being woken."""
        self._num_run = 0

    @property
    def has_work(self) -> bool:
        """False while the device thread sleeps and has no reason to wake. Any thread may call this, without a lock."""
        return time.monotonic() >= self._sleeps_until_s

    @property
    def progress(self) -> int:
        """Number that rises with every command that the device thread has run."""
        return self._num_run

    @property
    def is_closed(self) -> bool:
        """True once the inbox takes no new commands."""
        return self._is_closed

    def post(self, command: Command, *, even_closed: bool = False) -> bool:
        """Queue a command; return False without queueing it once the inbox is closed."""
        with self._changed:
            if self._is_closed and not even_closed:
                return False
            self._commands.append(command)
            self._wake()
            return True

    def wait_for(self, command: Command) -> None:
        """Run a command on the device thread, or in this one once the inbox is closed; raise what it raises."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                command()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        if not self.post(run):
            run()
        done.result()

    def close(self) -> None:
        """Refuse new commands, and let the device thread end once it is idle. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._wake()

    def run_commands(self, patience_s: float | None, *, may_end: bool) -> bool:
        """Run all queued commands in order. Called by the device thread.

        Args:
            patience_s: longest sleep until a command is posted, in seconds; None for any time.
            may_end: True if no call is running, so that a closed inbox ends the thread.

        Returns:
            False when the inbox is closed and the thread may end.
        """
        commands = self._take(patience_s, may_end=may_end)
        for command in commands or ():
            command()
            self._num_run += 1
        return commands is not None

    def _take(self, patience_s: float | None, *, may_end: bool) -> list[Command] | None:
        """Return all queued commands; None when the inbox is closed and the thread may end."""
        with self._changed:
            if not self._commands and not (may_end and self._is_closed) and patience_s != 0.0:
                self._sleep(patience_s)
            if not self._commands and may_end and self._is_closed:
                return None
            commands, self._commands = self._commands, []
            return commands

    def _sleep(self, patience_s: float | None) -> None:
        """Sleep until `_wake` is called. The caller holds the lock, which is free during the sleep."""
        self._sleeps_until_s = float("inf") if patience_s is None else time.monotonic() + patience_s
        self._changed.wait(patience_s)
        self._sleeps_until_s = 0.0

    def _wake(self) -> None:
        """End the device thread's sleep, if it sleeps. The caller holds the lock."""
        self._sleeps_until_s = 0.0
        self._changed.notify()
