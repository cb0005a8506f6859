"""Where a throwaway store's socket lies: in a folder that nobody but its user may enter.

Not here: what listens on it (`embedded`, `own_redis`).
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_FOLDER_PREFIX = "specdec-store-"
_SOCKET_NAME = "redis.sock"
#: Longest path a socket may have everywhere, and what mkdtemp and the socket's name need of it.
_MAX_SOCKET_PATH_BYTES = 100
_NAME_BYTES = len(f"/{_FOLDER_PREFIX}12345678/{_SOCKET_NAME}")
#: A folder this young may belong to a store that does not listen yet.
_STARTING_S = 60.0


def make_socket_path() -> Path:
    """A path for a socket in a new folder; what stores of this user that were killed have left goes first."""
    parent = short_temporary_folder(_NAME_BYTES)
    _clean_up_after_killed(parent)
    return Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent)) / _SOCKET_NAME


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
            if is_ours and time.time() - status.st_mtime > _STARTING_S and not is_answered(folder / _SOCKET_NAME):
                remove_socket(folder / _SOCKET_NAME)


def is_answered(path: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def remove_socket(path: Path) -> None:
    """Removes a socket and its folder, unless something else lies there."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
