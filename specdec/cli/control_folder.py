"""The folder that holds the control sockets of this user's `specdec up`, and markers of those that are being imported.

A `specdec up` needs a second or more until it can open its control socket. Its marker, made first thing, tells commands
that were typed right after it to wait. Imports the standard library alone, so that a marker is made at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import time
from pathlib import Path

from specdec.state.socket_folder import short_temporary_folder

_MARKER_SUFFIX = ".starting"
#: Age at which a marker is ignored: its process hangs, or another process has its id.
_MARKER_AGE_S = 60.0


def control_folder(*, make: bool) -> Path:
    """Return this user's folder of control sockets.

    Raises:
        OSError: it does not exist, or other users may enter it.
    """
    name = f"specdec-up-{os.geteuid()}"
    folder = Path(short_temporary_folder(len(f"/{name}/65535.sock"))) / name
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of this user that no other user may enter")
    return folder


def mark_starting() -> None:
    """Make the marker of this process. It is removed by `unmark_starting`, or when the process ends."""
    with contextlib.suppress(OSError):
        (control_folder(make=True) / f"{os.getpid()}{_MARKER_SUFFIX}").touch(mode=0o600)
        atexit.register(unmark_starting)


def unmark_starting() -> None:
    """Remove the marker of this process, if there is one. Idempotent."""
    with contextlib.suppress(OSError):
        folder = control_folder(make=False)
        (folder / f"{os.getpid()}{_MARKER_SUFFIX}").unlink(missing_ok=True)
        folder.rmdir()  # fails while it holds anything


def is_any_starting() -> bool:
    """Return whether a `specdec up` of this user is being imported and has no control socket yet."""
    try:
        markers = list(control_folder(make=False).glob(f"*{_MARKER_SUFFIX}"))
    except OSError:
        return False
    return any(map(_is_fresh, markers))


def _is_fresh(marker: Path) -> bool:
    try:
        os.kill(int(marker.name.removesuffix(_MARKER_SUFFIX)), 0)
        return time.time() - marker.stat().st_mtime < _MARKER_AGE_S
    except (OSError, ValueError):  # its process has ended, or the file is not a marker
        return False
