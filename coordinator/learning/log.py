"""The learning log: segments of each tenant that a thread of its own writes, and deletes after their retention time.

No request waits for the log. Turns are dropped while the queue is full, and lost if a file cannot be written; both
are counted, and a failure is logged once, not for every segment. Each tenant has a folder of its own. Only the owner
may read the files and their folder. `specdec.learning.log_files` defines a segment, and `turn_record` makes its
contents.
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
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from specdec.contract.errors import InvalidRequest
from specdec.learning.log_files import SUFFIX, TENANT_PREFIX, LogFacts, LoggedTurn, encode_segment, tenant_folder

#: Largest number of tasks that wait for the thread, and of bytes of unfinished turns; anything more is dropped.
MAX_WAITING = 256
MAX_HELD_BYTES = 64 << 20

#: Size and age at which a segment is written, and the bytes of all tenants' segments at which all are written.
SEGMENT_BYTES = 1 << 20
SEGMENT_AGE_S = 5.0
MAX_SEGMENTS_BYTES = 64 << 20

#: Interval at which old segments are deleted.
RETENTION_INTERVAL_S = 60.0

#: Longest time that closing waits for what is still to be written.
CLOSE_TIMEOUT_S = 5.0

_UNFINISHED = ".unfinished"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Segment:
    """The turns of a tenant's next file, all with the same facts."""

    facts: LogFacts
    due_s: float
    """Time, by `time.monotonic`, at which the file is written."""
    turns: list[LoggedTurn] = field(default_factory=list)
    num_bytes: int = 0


class LearningLog:
    """Writes turns in a thread of its own, which ends with `close`."""

    def __init__(
        self,
        folder: Path,
        *,
        tenant: str,
        max_bytes: int,
        max_age_s: float,
        serves_all_tenants: bool = False,
        count: Callable[[str, int], None] = lambda outcome, num_tokens: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            folder: folder of the logs of all tenants; created if it does not exist.
            tenant: the coordinator's own tenant, whose folder is created at once.
            max_bytes: largest size of all segments of a tenant; the oldest are deleted first.
            max_age_s: age at which a segment is deleted.
            serves_all_tenants: delete old segments of every tenant in the folder, also of those that send nothing.
            count: called with the number of output tokens that were written, dropped or failed; from any thread.
            clock: returns seconds since 1970.

        Raises:
            InvalidRequest: no private folder can be created there.
        """
        self._folder, self._tenant = folder, tenant
        _require_usable(folder, tenant)
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        self._serves_all_tenants = serves_all_tenants
        self._count, self._clock = count, clock
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._held: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        """Bytes of unfinished turns. Only the thread uses this field and those below."""
        self._segments: dict[str, _Segment] = {}
        """Segments that are not written yet, by tenant."""
        self._retention_due_s = 0.0
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="learning-log", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> bool:
        """Pass work to the thread and return at once; False if the queue is full."""
        if self._waiting.qsize() >= MAX_WAITING:
            return False
        self._waiting.put(work)
        return True

    def drop(self, num_tokens: int) -> None:
        """Count tokens that are not logged because part of their turn was dropped. From any thread."""
        self._count("dropped", num_tokens)

    def hold(self, record: object, num_bytes: int) -> bool:
        """Note the bytes of an unfinished turn; False if the limit is exceeded. Called in the thread."""
        self._held.pop(record, None)
        if sum(self._held.values()) + num_bytes > MAX_HELD_BYTES:
            return False
        self._held[record] = num_bytes
        return True

    def add(self, tenant: str, facts: LogFacts, turn: LoggedTurn) -> None:
        """Add a complete turn to a tenant's next segment. Called in the thread."""
        segment = self._segments.get(tenant)
        if segment is not None and facts != segment.facts:
            self._write(tenant)
            segment = None
        if segment is None:
            self._segments[tenant] = segment = _Segment(facts, time.monotonic() + SEGMENT_AGE_S)
        segment.turns.append(turn)
        segment.num_bytes += turn.num_bytes
        if segment.num_bytes >= SEGMENT_BYTES:
            self._write(tenant)
        elif sum(waiting.num_bytes for waiting in self._segments.values()) >= MAX_SEGMENTS_BYTES:
            self._write_due(float("inf"))

    def close(self) -> None:
        """Write the remaining turns, for at most `CLOSE_TIMEOUT_S`. Blocks; idempotent."""
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            try:
                is_open = self._step()
            except Exception:
                _log.exception("learning log failed")
        self._write_due(float("inf"))

    def _step(self) -> bool:
        """Do one piece of work; return False after the last one."""
        now_s = time.monotonic()
        if now_s >= self._retention_due_s:
            self._retention_due_s = now_s + RETENTION_INTERVAL_S
            self._delete_old()
        due_s = min([self._retention_due_s, *(segment.due_s for segment in self._segments.values())])
        work = None
        try:
            work = self._waiting.get(timeout=max(0.0, due_s - now_s))
            is_open = work is not None
        except queue.Empty:
            is_open = True
        if work is not None:
            work()
        self._write_due(time.monotonic())
        return is_open

    def _write_due(self, now_s: float) -> None:
        for tenant, segment in list(self._segments.items()):
            if segment.due_s <= now_s:
                self._write(tenant)

    def _write(self, tenant: str) -> None:
        segment = self._segments.pop(tenant)
        num_tokens = sum(len(turn.num_entries) for turn in segment.turns)
        name = f"{round(self._clock() * 1e3):015d}-{secrets.token_hex(4)}"
        try:
            folder = _private_folder(self._folder, tenant)
            _write_private(folder / f"{name}{SUFFIX}", encode_segment(segment.facts, segment.turns))
            self._delete_old_of(folder)
        except OSError as error:
            self._count("failed", num_tokens)
            self._warn(error)
            return
        self._has_warned = False
        self._count("written", num_tokens)

    def _delete_old(self) -> None:
        folders = [tenant_folder(self._folder, self._tenant)]
        if self._serves_all_tenants:
            folders = sorted(self._folder.glob(f"{TENANT_PREFIX}*"))
        for folder in folders:
            try:
                _require_private(folder)
                self._delete_old_of(folder)
            except OSError as error:
                self._warn(error)

    def _delete_old_of(self, folder: Path) -> None:
        """Delete segments that are too old, then the oldest while all are too large, of any coordinator.

        Raises OSError.
        """
        segments = sorted(_segments(folder))
        oldest_s = self._clock() - self._max_age_s
        left = sum(num_bytes for _, num_bytes, _ in segments)
        for written_s, num_bytes, path in segments:
            if written_s < oldest_s or left > self._max_bytes:
                path.unlink(missing_ok=True)
                left -= num_bytes

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("cannot write the learning log in %s: %s", self._folder, error.strerror or error)


def _segments(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the time, size and path of each segment and of each unfinished file."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.suffix in (SUFFIX, _UNFINISHED):
                yield status.st_mtime, status.st_size, path


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, as a whole or not at all. Raises OSError."""
    unfinished = path.with_suffix(_UNFINISHED)
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        unfinished.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _require_usable(log: Path, tenant: str) -> None:
    """Create the log's folder and the tenant's if they do not exist. Raises InvalidRequest if that fails."""
    try:
        log.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = _private_folder(log, tenant) / f"{secrets.token_hex(4)}.probe"
        _write_private(probe, b"")
        probe.unlink()
    except OSError as error:
        words = f"--learning-log: {tenant_folder(log, tenant)} cannot be used: {error.strerror or error}"
        raise InvalidRequest(words, field="learning_log") from error


def _private_folder(log: Path, tenant: str) -> Path:
    """Return the tenant's folder, created if it does not exist. Raises OSError."""
    folder = tenant_folder(log, tenant)
    folder.mkdir(mode=0o700, exist_ok=True)
    _require_private(folder)
    return folder


def _require_private(folder: Path) -> None:
    """Raise PermissionError unless the folder is this user's and closed to other users."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(0, "it must be a folder that this user owns and no other user may enter")
