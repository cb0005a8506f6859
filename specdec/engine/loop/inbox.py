"""The queue of commands for the device thread, in which that thread also sleeps.

`device_loop` takes commands on the device thread and admits their calls. The thread sleeps in its own event loop and
runs it between two steps, so a socket that is read there (`specdec.rpc.device_thread_socket`) makes calls and gets
answers without waking another thread.

Any thread posts; the device thread takes.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any

Command = Callable[[], None]


class _Selector(selectors.DefaultSelector):
    """The selector of the device thread's event loop; other threads read whether that thread sleeps in it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_sleeps = 0
        self._is_asleep = False
        self._wakes_at_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
        self.num_sleeps += 1
        self._wakes_at_s = float("inf") if timeout is None else time.monotonic() + timeout
        self._is_asleep = True
        try:
            return super().select(timeout)
        finally:
            self._is_asleep = False

    @property
    def is_idle(self) -> bool:
        """True while the thread sleeps, and nothing that ends its sleep has come."""
        return self._is_asleep and time.monotonic() < self._wakes_at_s and not super().select(0)


class Inbox:
    """Commands that the device thread has not run yet."""

    def __init__(self) -> None:
        self._selector = _Selector()
        self.event_loop = asyncio.SelectorEventLoop(self._selector)
        """Event loop of the device thread. It runs while the thread sleeps and, if `is_shared`, between two steps."""
        self.is_shared = False
        """True if other code uses the event loop."""
        self._lock = threading.Lock()
        self._commands: list[Command] = []  # guarded by _lock
        self._is_closed = False  # guarded by _lock
        self._is_asleep = False  # guarded by _lock
        self._thread_id = 0
        self._num_run = 0

    @property
    def has_work(self) -> bool:
        """False while the device thread sleeps and has no reason to wake. Any thread may call this, without a lock."""
        return not self._selector.is_idle

    @property
    def progress(self) -> int:
        """Number that rises with every command and every sleep of the device thread."""
        return self._num_run + self._selector.num_sleeps

    @property
    def is_closed(self) -> bool:
        """True once the inbox takes no new commands."""
        return self._is_closed

    def post(self, command: Command, *, even_closed: bool = False) -> bool:
        """Queue a command; return False without queueing it once the inbox is closed."""
        with self._lock:
            if self._is_closed and not even_closed:
                return False
            self._commands.append(command)
            self._wake()
            return True

    def close(self) -> None:
        """Refuse new commands, and let the device thread end once it is idle. Idempotent."""
        with self._lock:
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
        if self.is_shared:
            self._look()
        if patience_s != 0.0:
            self._sleep(patience_s, may_end=may_end)
        with self._lock:
            if may_end and self._is_closed and not self._commands:
                return None
            commands, self._commands = self._commands, []
            return commands

    def end(self) -> None:
        """End the event loop: answers are written, all other tasks are cancelled."""
        self._look()
        for task in asyncio.all_tasks(self.event_loop):
            task.cancel()
        self._look()
        self.event_loop.close()

    def _look(self) -> None:
        """Run two turns of the event loop.

        The first turn reads messages, or resumes callers that were answered; the second begins the calls that were
        read, or writes the answers. Each turn ends by its own stop: a stop that the last sleep left behind would
        otherwise merge the two turns into one.
        """
        for _ in range(2):
            self.event_loop.call_soon(self.event_loop.stop)
            self.event_loop.run_forever()

    def _sleep(self, patience_s: float | None, *, may_end: bool) -> None:
        with self._lock:
            if self._commands or (may_end and self._is_closed):
                return
            self._thread_id = threading.get_ident()
            self._is_asleep = True
        timer = None if patience_s is None else self.event_loop.call_later(patience_s, self.event_loop.stop)
        self.event_loop.run_forever()
        with self._lock:
            self._is_asleep = False
        if timer is not None:
            timer.cancel()

    def _wake(self) -> None:
        """End the device thread's sleep, if it sleeps. The caller holds the lock."""
        if not self._is_asleep:
            return
        self._is_asleep = False
        if threading.get_ident() == self._thread_id:  # called from within the event loop
            self.event_loop.stop()
        else:
            self.event_loop.call_soon_threadsafe(self.event_loop.stop)
