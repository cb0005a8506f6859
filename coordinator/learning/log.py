"""The learning log of one tenant: segments written by a thread of its own, and deleted when their time is over.

Nothing here is ever waited for. What comes while too much waits is dropped, what cannot be written is lost, and both
are counted; the log says so once, not for every segment. Files and their folder are the owner's alone.

Not here: what a segment is (`specdec.learning.log_files`), what goes into it (`turn_record`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

from specdec.errors import InvalidRequest
from specdec.learning.log_files import SUFFIX, LogFacts, LoggedTurn, encode_segment, tenant_folder

#: Pieces that wait for the thread, and bytes of turns that are not written yet; one more is dropped.
MAX_WAITING = 256
MAX_HELD_BYTES = 64 << 20

#: A segment is written when it has so many bytes, or its first turn has waited so long.
SEGMENT_BYTES = 1 << 20
SEGMENT_AGE_S = 5.0

#: Between two looks at what is too old.
RETENTION_INTERVAL_S = 60.0

#: At the end, for what is still to be written.
CLOSE_TIMEOUT_S = 5.0

_UNFINISHED = ".unfinished"

_log = logging.getLogger(__name__)


class LearningLog:
    """Writes what it is given, in a thread of its own that ends with `close`."""

    def __init__(
        self,
        folder: Path,
        *,
        tenant: str,
        max_bytes: int,
        max_age_s: float,
        count: Callable[[str, int], None] = lambda outcome, num_tokens: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            folder: of the logs of all tenants; made where there is none.
            tenant: whose log it is.
            max_bytes: of all its segments; the oldest go first.
            max_age_s: after which a segment is deleted.
            count: told of output tokens that were written, dropped or failed; from any thread.
            clock: seconds since 1970.

        Raises:
            InvalidRequest: there can be no private folder there.
        """
        self._folder = _private_folder(folder, tenant)
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        self._count, self._clock = count, clock
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._held: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        """Bytes of turns that go on. The thread's, as all that follows."""
        self._turns: list[LoggedTurn] = []
        """Of the segment that is written next."""
        self._facts: LogFacts | None = None
        self._num_bytes = 0
        self._due_s = 0.0
        self._retention_due_s = 0.0
        self._has_complained = False
        self._thread = threading.Thread(target=self._run, name="learning-log", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> bool:
        """Has the thread do something; False where too much waits. Returns at once."""
        if self._waiting.qsize() >= MAX_WAITING:
            return False
        self._waiting.put(work)
        return True

    def drop(self, num_tokens: int) -> None:
        """So many tokens are not logged: something of their turn was dropped. From any thread."""
        self._count("dropped", num_tokens)

    def hold(self, record: object, num_bytes: int) -> bool:
        """A turn that goes on has so many bytes now; False where it must not. The thread's."""
        self._held.pop(record, None)
        if sum(self._held.values()) + num_bytes > MAX_HELD_BYTES:
            return False
        self._held[record] = num_bytes
        return True

    def add(self, facts: LogFacts, turn: LoggedTurn) -> None:
        """A turn is complete. The thread's."""
        if facts != self._facts:
            self._write()
        if not self._turns:
            self._due_s = time.monotonic() + SEGMENT_AGE_S
        self._facts = facts
        self._turns.append(turn)
        self._num_bytes += turn.num_bytes
        if self._num_bytes >= SEGMENT_BYTES:
            self._write()

    def close(self) -> None:
        """Writes what there is, unless that takes too long. Blocks; idempotent."""
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            try:
                is_open = self._step()
            except Exception:
                _log.exception("the learning log failed")
        self._write()

    def _step(self) -> bool:
        """Does one thing; False once there is nothing more to come."""
        now_s = time.monotonic()
        if now_s >= self._retention_due_s:
            self._retention_due_s = now_s + RETENTION_INTERVAL_S
            self._delete_old()
        due_s = min(self._retention_due_s, self._due_s) if self._turns else self._retention_due_s
        try:
            work = self._waiting.get(timeout=max(0.0, due_s - now_s))
        except queue.Empty:
            self._write()
            return True
        if work is not None:
            work()
        if self._turns and time.monotonic() >= self._due_s:
            self._write()
        return work is not None

    def _write(self) -> None:
        turns, self._turns, self._num_bytes = self._turns, [], 0
        if not turns or self._facts is None:
            return
        num_tokens = sum(len(turn.num_entries) for turn in turns)
        name = f"{round(self._clock() * 1e3):015d}-{secrets.token_hex(4)}"
        try:
            _write_private(self._folder / f"{name}{SUFFIX}", encode_segment(self._facts, turns))
            self._delete_old()
        except OSError as error:
            self._count("failed", num_tokens)
            self._complain(error)
            return
        self._has_complained = False
        self._count("written", num_tokens)

    def _delete_old(self) -> None:
        """Deletes what is too old, then the oldest of what is too much, whoever wrote it."""
        try:
            segments = sorted(_segments(self._folder))
            oldest_s = self._clock() - self._max_age_s
            left = sum(num_bytes for _, num_bytes, _ in segments)
            for written_s, num_bytes, path in segments:
                if written_s < oldest_s or left > self._max_bytes:
                    path.unlink(missing_ok=True)
                    left -= num_bytes
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning("the learning log cannot be kept in %s: %s", self._folder, error.strerror or error)


def _segments(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """When each file was written, its bytes and its path: segments, and what was left of one that was not finished."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.suffix in (SUFFIX, _UNFINISHED):
                yield status.st_mtime, status.st_size, path


def _write_private(path: Path, content: bytes) -> None:
    """Writes a file that its owner alone may read; there is all of it or nothing. Raises OSError."""
    unfinished = path.with_suffix(_UNFINISHED)
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        unfinished.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _private_folder(log: Path, tenant: str) -> Path:
    """Raises InvalidRequest."""
    folder = tenant_folder(log, tenant)
    try:
        log.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(0, "it is not a folder of yours that nobody else may enter")
        probe = folder / f"{secrets.token_hex(4)}.probe"
        _write_private(probe, b"")
        probe.unlink()
    except OSError as error:
        words = f"--learning-log: {folder} cannot be used: {error.strerror or error}"
        raise InvalidRequest(words, field="learning_log") from error
    return folder
