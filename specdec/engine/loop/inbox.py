"""What event loops ask of the device thread, in the order in which they ask.

A call goes from here to `device_loop`, on the device thread, which admits it.

Not here: what is asked (`device_loop`), answers on their way back (`delivery`). Any thread posts, the device thread
takes, and sleeps here while it has nothing to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Command = Callable[[], None]


class Inbox:
    """Commands that the device thread has not carried out yet."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._commands: list[Command] = []  # guarded by _wake
        self._is_closed = False  # guarded by _wake

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def post(self, command: Command, *, even_closed: bool = False) -> bool:
        """Gives the device thread something to do; False, and nothing is done, once the inbox is closed."""
        with self._wake:
            if self._is_closed and not even_closed:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    def close(self) -> None:
        """Takes nothing new, and lets the device thread end once it has nothing to do. Idempotent."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()

    def take(self, patience_s: float | None, *, may_end: bool) -> list[Command] | None:
        """Everything posted, in order. Called by the device thread.

        Args:
            patience_s: how long to sleep until something is posted; None: as long as it takes.
            may_end: whether nothing is in work, so that a closed inbox ends the thread.

        Returns:
            None when the inbox is closed and the thread may end.
        """
        with self._wake:
            if not self._commands and patience_s != 0.0:
                self._wake.wait_for(lambda: self._commands or (may_end and self._is_closed), patience_s)
            if may_end and self._is_closed and not self._commands:
                return None
            commands, self._commands = self._commands, []
            return commands
