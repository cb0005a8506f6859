"""A child process that a template has forked, with the methods of `subprocess.Popen` that its callers use.

Made by `process_template`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from typing import IO, Any


class ForkedProcess:
    """A child process. Any thread may use it."""

    def __init__(self, pid: int) -> None:
        """`pid`: of a child of this process that has not been waited for."""
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self._lock = threading.Lock()
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises subprocess.TimeoutExpired if the process still runs."""
        with self._lock:
            if self.returncode is not None:
                return self.returncode
        waiting = select.poll()
        waiting.register(self._ended, select.POLLIN)
        if not waiting.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                try:
                    self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:  # SIGCHLD is ignored, so the kernel has forgotten the code; as in `Popen`
                    self.returncode = 0
                os.close(self._ended)
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; no effect once the process has been waited for."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
