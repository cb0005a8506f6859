"""A Redis that needs no installation: `fakeredis` behind a Unix socket, in a thread of the caller's process.

For `specdec up` and tests, where several processes of one user share one throwaway store: the socket lies in a folder
that nobody else may enter. Not a database: nothing outlives the process, and one Python thread answers each connection.
Not here: what clients may ask (`embedded_server`). Called by the command line.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_FOLDER_PREFIX = "specdec-store-"
_SOCKET_NAME = "redis.sock"
#: Longest path a socket may have everywhere, and what mkdtemp and the socket's name need of it.
_MAX_SOCKET_PATH_BYTES = 100
_NAME_BYTES = len(f"/{_FOLDER_PREFIX}12345678/{_SOCKET_NAME}")
#: A folder this young may belong to a store that does not listen yet.
_STARTING_S = 60.0


class EmbeddedRedis:
    """Serves while the context is open.

    with EmbeddedRedis() as redis:
        start_children(redis.url)
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """unix://PATH of the open context."""
        if self._path is None:
            raise RuntimeError("the embedded Redis is not running")
        return f"unix://{self._path}"

    def __enter__(self) -> Self:
        from specdec.state.embedded_server import EmbeddedServer

        parent = short_temporary_folder(_NAME_BYTES)
        _clean_up_after_killed(parent)
        self._path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent)) / _SOCKET_NAME
        try:
            self._server = EmbeddedServer(self._path)
        except BaseException:
            _remove(self._path)
            raise
        self._thread = threading.Thread(target=self._server.serve_forever, name="embedded redis", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        if self._thread is not None:
            self._thread.join()
        if self._path is not None:
            _remove(self._path)
        self._path = self._server = self._thread = None


def short_temporary_folder(num_name_bytes: int) -> str:
    """Where a socket may lie whose path has so many bytes below it: $TMPDIR, or /tmp where that is too long."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) + num_name_bytes <= _MAX_SOCKET_PATH_BYTES else "/tmp"


def _clean_up_after_killed(parent: str) -> None:
    """Removes what stores of this user that were killed have left: no process can tidy up after its SIGKILL."""
    for folder in Path(parent).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and time.time() - status.st_mtime > _STARTING_S and not _is_answered(folder / _SOCKET_NAME):
                _remove(folder / _SOCKET_NAME)


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def _remove(path: Path) -> None:
    """Removes a socket and its folder, unless something else lies there."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
