"""A file of credentials that is read again when it changes, and must not be open to other users of the machine."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from specdec.contract.errors import InvalidRequest, SpecdecError

#: Interval of the checks whether the file has changed.
CHECK_INTERVAL_S = 1.0

#: Size of the largest file of credentials.
MAX_FILE_BYTES = 16 << 20

ContentT = TypeVar("ContentT")

_log = logging.getLogger(__name__)


class WatchedFile(Generic[ContentT]):
    """The parsed content of a file. A file that became unreadable or has a mistake leaves the old content."""

    def __init__(
        self,
        path: Path,
        parse: Callable[[str], ContentT],
        *,
        field: str,
        is_private: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            path: the file.
            parse: returns the content of the text; raises InvalidRequest.
            field: name of the setting that names the file, for messages.
            is_private: whether a file that other users may read is refused; one that they may write always is.
            clock: seconds, for the checks of the file.

        Raises:
            InvalidRequest: the file cannot be read, is open to other users, or has a mistake.
        """
        self._path, self._parse, self._field, self._is_private, self._clock = path, parse, field, is_private, clock
        self._version: tuple[int, int, int] | None = None
        self._checked_s = clock()
        self._content = self._read()

    def content(self) -> ContentT:
        """Return the content, read again if the file has changed and the last check is a second old."""
        now_s = self._clock()
        if now_s - self._checked_s >= CHECK_INTERVAL_S:
            self._checked_s = now_s
            self._read_if_changed()
        return self._content

    def _read_if_changed(self) -> None:
        try:
            if _version_of(self._path) != self._version:
                self._content = self._read()
                _log.info("credentials read again", extra={"file": str(self._path)})
        except (OSError, SpecdecError) as error:
            _log.error("cannot read credentials again, keeping the old ones: %s", error)

    def _read(self) -> ContentT:
        text, self._version = read_credentials(self._path, field=self._field, is_private=self._is_private)
        return self._parse(text)


def read_credentials(path: Path, *, field: str, is_private: bool = True) -> tuple[str, tuple[int, int, int]]:
    """Return the text of a file of credentials, and what differs after every change of it.

    Raises:
        InvalidRequest: the file cannot be read, is too large, or is open to other users.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            _require_private(path, status, field, may_be_read=not is_private)
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise InvalidRequest(f"{field}: {path} has more than {MAX_FILE_BYTES} bytes", field=field)
        return content.decode(), _version(status)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{field}: cannot read {path}: {error}", field=field) from error


def _require_private(path: Path, status: os.stat_result, field: str, *, may_be_read: bool) -> None:
    """Raise InvalidRequest if other users may write the file, or may read it although it is private.

    The group may read a file of root: so container systems mount secrets, with a group of the pod (mode 0440).
    """
    mode = stat.S_IMODE(status.st_mode)
    private = 0o037 if status.st_uid == 0 else 0o077
    if mode & (0o022 if may_be_read else private):
        verb = "write" if may_be_read else "read or write"
        raise InvalidRequest(
            f"{field}: other users may {verb} {path} (mode {mode:03o}): run chmod 600 {path}", field=field
        )


def _version_of(path: Path) -> tuple[int, int, int]:
    return _version(os.stat(path))


def _version(status: os.stat_result) -> tuple[int, int, int]:
    """Return what differs after every change of the file, also after a replacement."""
    return status.st_mtime_ns, status.st_size, status.st_ino
