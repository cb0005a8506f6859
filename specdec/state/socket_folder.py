"""Socket paths of temporary stores, in folders that only their user may enter."""

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
#: Longest path of a socket on every system, and the part of it that mkdtemp and the socket's name take.
_MAX_SOCKET_PATH_BYTES = 100
_NAME_BYTES = len(f"/{_FOLDER_PREFIX}12345678/{_SOCKET_NAME}")
#: A folder this young may belong to a store that does not listen yet.
_STARTING_S = 60.0


def make_socket_path() -> Path:
    """Return a path for a socket in a new folder; folders of this user's killed stores are removed first."""
    parent = short_temporary_folder(_NAME_BYTES)
    _clean_up_after_killed(parent)
    return Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent)) / _SOCKET_NAME


def short_temporary_folder(num_name_bytes: int) -> str:
    """Return a folder for a socket whose path has `num_name_bytes` below it: $TMPDIR, or /tmp if that is too long."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) + num_name_bytes <= _MAX_SOCKET_PATH_BYTES else "/tmp"


def _clean_up_after_killed(parent: str) -> None:
    """Remove the folders of this user's stores that were killed, because a process cannot clean up after a SIGKILL."""
    for folder in Path(parent).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and time.time() - status.st_mtime > _STARTING_S and not is_answered(folder / _SOCKET_NAME):
                remove_socket(folder / _SOCKET_NAME)


def is_answered(path: Path) -> bool:
    """Return whether a process listens on a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def remove_socket(path: Path) -> None:
    """Remove a socket and its folder, unless the folder holds something else."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
