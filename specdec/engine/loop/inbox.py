"""What is asked of the device thread, in the order in which it is asked, and where that thread sleeps.

A call goes from here to `device_loop`, on the device thread, which admits it. The thread sleeps in an event loop of its
own, and looks into it between two steps: what reads a socket there (`specdec.rpc.device_thread_socket`)
can ask without waking anybody, and is answered without.

Not here: what is asked (`device_loop`), answers on their way back (`delivery`). Any thread posts, the device thread
takes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

Command = Callable[[], None]


class Inbox:
    """Commands that the device thread has not carried out yet."""

    def __init__(self) -> None:
        self.event_loop = asyncio.new_event_loop()
        """Runs on the device thread: while that sleeps, and for a look between two steps if `is_shared`."""
        self.is_shared = False
        """Whether others have put something into the event loop."""
        self._lock = threading.Lock()
        self._commands: list[Command] = []  # guarded by _lock
        self._is_closed = False  # guarded by _lock
        self._is_asleep = False  # guarded by _lock
        self._thread_id = 0

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def post(self, command: Command, *, even_closed: bool = False) -> bool:
        """Gives the device thread something to do; False, and nothing is done, once the inbox is closed."""
        with self._lock:
            if self._is_closed and not even_closed:
                return False
            self._commands.append(command)
            self._wake()
            return True

    def close(self) -> None:
        """Takes nothing new, and lets the device thread end once it has nothing to do. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._wake()

    def take(self, patience_s: float | None, *, may_end: bool) -> list[Command] | None:
        """Everything posted, in order. Called by the device thread.

        Args:
            patience_s: how long to sleep until something is posted; None: as long as it takes.
            may_end: whether nothing is in work, so that a closed inbox ends the thread.

        Returns:
            None when the inbox is closed and the thread may end.
        """
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
        """The thread's last act here: answers leave, what else is under way in the event loop is cancelled."""
        self._look()
        for task in asyncio.all_tasks(self.event_loop):
            task.cancel()
        self._look()
        self.event_loop.close()

    def _look(self) -> None:
        """Two turns of the event loop: the first reads what has come, or goes on with whoever has been answered; the
        second begins what was read, or writes the answers. Each ends by a stop of its own: one that the last sleep left
        behind would make two in one go into a single turn, look after look.
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
        """Ends the sleep there is. The lock is held."""
        if not self._is_asleep:
            return
        self._is_asleep = False
        if threading.get_ident() == self._thread_id:  # asked from within the event loop
            self.event_loop.stop()
        else:
            self.event_loop.call_soon_threadsafe(self.event_loop.stop)
