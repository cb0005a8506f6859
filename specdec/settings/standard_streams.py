"""Standard streams of a service, which accept every line at once although nothing reads the pipe behind them.

A write to a full pipe waits until the reader reads, and with it the event loop, health checks and the handling of
signals. The streams made here write what fits now. The rest waits in a bounded buffer, from which a thread writes it
when the reader goes on. Lines that exceed the buffer are lost, and a warning then says how many. The `__main__` of each
service calls `never_wait_for_readers` before other imports, as it does `early_signals`; commands other than
`specdec up` wait for their readers, as is usual for programs of a shell.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import select
import stat
import sys
import threading
import time
from typing import TextIO

#: Limit of the bytes that wait for the reader of one stream: some 4,000 log lines.
MAX_WAITING_BYTES = 1 << 20
#: Time that lines get at the end of the process to reach a reader that reads.
FLUSH_S = 2.0
#: Bytes that a pipe takes without waiting once `poll` says that it takes any; other writers' bytes never split them.
_AT_ONCE_BYTES = select.PIPE_BUF

_log = logging.getLogger(__name__)
_outputs: list[_Output] = []


class _Output(io.RawIOBase):
    """The raw stream of a file descriptor, which accepts every write at once. Any thread may use it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lock = threading.RLock()
        self._waiting = bytearray()
        self._num_lost_lines = 0
        """Lines that were dropped since the buffer was full. No line is taken until what waits is written."""
        self._writer: threading.Thread | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Write what fits now and keep the rest; drop it if too much waits. Raises OSError if the reader has left."""
        with self._lock:
            if self._num_lost_lines:
                num_written, is_kept = 0, False
            else:
                num_written = 0 if self._waiting else self._write_now(data)
                is_kept = num_written > 0 or len(self._waiting) + len(data) <= MAX_WAITING_BYTES
            if is_kept:
                self._waiting += data[num_written:]
            else:
                self._num_lost_lines += max(1, bytes(data).count(b"\n"))
            if self._waiting or self._num_lost_lines:
                self._ensure_writer()
        return len(data)

    def flush_until(self, deadline_s: float) -> None:
        """Write what waits, at most until a time of `time.monotonic`."""
        while (left_s := deadline_s - time.monotonic()) > 0 and self._advance(left_s):
            pass

    def _write_now(self, data: bytes | bytearray) -> int:
        """Return how many bytes were written without waiting. Raises OSError if the reader has left."""
        written = 0
        while written < len(data) and self._is_writable(0):
            try:
                written += os.write(self._descriptor, bytes(data[written : written + _AT_ONCE_BYTES]))
            except BlockingIOError:
                break
        return written

    def _is_writable(self, timeout_s: float | None) -> bool:
        """Wait at most for a time until the descriptor takes `_AT_ONCE_BYTES`, or has failed."""
        writable = select.poll()
        writable.register(self._descriptor, select.POLLOUT)
        return bool(writable.poll(None if timeout_s is None else timeout_s * 1000))

    def _ensure_writer(self) -> None:
        # A process that was forked has no thread of its parent.
        if self._writer is None or not self._writer.is_alive():
            self._writer = threading.Thread(target=self._write_rest, name="output", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is ending; `flush_until` writes what waits
                self._writer.start()

    def _write_rest(self) -> None:
        while self._advance(None):
            pass

    def _advance(self, timeout_s: float | None) -> bool:
        """Wait at most for a time until more is taken, and write it; return whether lines still wait."""
        self._is_writable(timeout_s)
        with self._lock:
            try:
                del self._waiting[: self._write_now(self._waiting)]
            except OSError:  # the reader has left, or the disk is full
                self._waiting.clear()
            if self._waiting:
                return True
            num_lost, self._num_lost_lines = self._num_lost_lines, 0
            self._writer = None
        if num_lost:
            _log.warning("%d lines of output were lost because their reader did not read", num_lost)
        return False


def never_wait_for_readers() -> None:
    """Let this process write to stdout and stderr without ever waiting for a reader. Call it once, at the start.

    What native libraries write past Python is lost while the pipe is full. Lines that wait at the end of the process
    are written within `FLUSH_S`.
    """
    if sys.stdout is not None:
        sys.stdout = output_stream(sys.stdout.fileno())
    if sys.stderr is not None:
        sys.stderr = output_stream(sys.stderr.fileno(), errors="backslashreplace")


def output_stream(descriptor: int, *, errors: str = "replace") -> TextIO:
    """Return a text stream that writes to a descriptor without waiting for its reader."""
    _open_without_waiting(descriptor)
    output = _Output(descriptor)
    if not _outputs:
        atexit.register(flush_outputs)
    _outputs.append(output)
    return io.TextIOWrapper(output, encoding="utf-8", errors=errors, line_buffering=True)  # type: ignore[type-var]


def flush_outputs() -> None:
    """Wait, at most `FLUSH_S`, until the lines written so far have reached their readers."""
    deadline_s = time.monotonic() + FLUSH_S
    for output in _outputs:
        output.flush_until(deadline_s)


def _open_without_waiting(descriptor: int) -> None:
    """Open the pipe or terminal of a descriptor once more, so that writes of native libraries do not wait either.

    The flag O_NONBLOCK belongs to an open file. Processes that share the former one keep it as it was.
    """
    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    if not (is_pipe or os.isatty(descriptor)):
        return
    # Without /proc, or if another user has made the pipe, only Python's writes do not wait.
    with contextlib.suppress(OSError):
        opened = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.dup2(opened, descriptor)
        os.close(opened)
