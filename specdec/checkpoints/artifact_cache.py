"""The cache of files that outlive a process, with checks of their owner and, for machine code, integrity.

A user who can write such a file can run code as the user who loads it. A file is therefore used only if only root and
this user can have written it, in a folder in which no other user can replace it. Each file ends with a digest of its
content, because damaged machine code would be run too. Called by `specdec.engine.kernels.library` and
`specdec.engine.kernels.compiler`; `specdec.checkpoints.gguf.folder` and
`specdec.engine.native.kept_layout` use its folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

_SEAL_BYTES = 16
_READ_BYTES = 1 << 20
_UNUSED_S = 30 * 24 * 3600.0


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Return the folder of this user's files that can be made again, by the XDG base directory specification."""
    try:
        return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
    except RuntimeError:  # containers often run under a user id without a home directory
        return Path("/var/cache/specdec")


def is_usable(path: Path) -> bool:
    """Return whether `path` is an undamaged file of `keep` that only root and this user can have written."""
    try:
        content_bytes = path.stat().st_size - _SEAL_BYTES
        if content_bytes < 0 or not is_own(path):
            return False
        with path.open("rb") as file:
            file.seek(content_bytes)
            return file.read() == _seal(path, content_bytes)
    except OSError:
        return False


def is_own(path: Path) -> bool:
    """Return whether only root and this user can have written the file `path`. Raises OSError: there is none."""
    status = path.stat()
    is_ours = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_ours and _is_guarded(path.parent)


def keep(built: Path, path: Path) -> None:
    """Copy a file to `path`, with the digest that `is_usable` checks; create the folder as `make_folder` does.

    The copy is renamed into place, so processes that start at the same time find a whole file or none.

    Raises:
        OSError: the file cannot be written.
    """
    make_folder(path.parent)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as unfinished:
        copy = Path(unfinished) / path.name
        shutil.copyfile(built, copy)
        with copy.open("ab") as file:
            file.write(_seal(built, built.stat().st_size))
        copy.chmod(0o755)  # independent of the umask
        copy.replace(path)


def make_folder(directory: Path) -> None:
    """Create a folder for cached files that only this user may enter, unless it exists.

    Raises:
        OSError: it cannot be created, or other users could replace its files.
    """
    for folder in (*reversed(directory.parents), directory):
        if not folder.is_dir():
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except FileExistsError as error:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
    if not _is_guarded(directory):
        raise PermissionError(errno.EPERM, "other users could replace files in this folder", str(directory))


def make_room(folder: Path, num_bytes: int) -> None:
    """Remove files of a folder that no process has used for 30 days, and require room for a new one.

    Raises:
        OSError: less than twice `num_bytes` is free.
    """
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may have removed it
            if path.stat().st_mtime < time.time() - _UNUSED_S:
                path.unlink()
    if shutil.disk_usage(folder).free < 2 * num_bytes:
        raise OSError(errno.ENOSPC, f"{num_bytes >> 20} MB would take more than half of the free disk", str(folder))


def note_use(path: Path) -> None:
    """Note that a file of `make_room` was used now, if this process may."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _is_guarded(directory: Path) -> bool:
    """Return whether only root and this user, or a group that they permit, can move the files of a folder."""
    resolved = directory.resolve()
    for folder in (resolved, *resolved.parents):
        status = folder.stat()
        is_open = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        if is_open or status.st_uid not in (0, os.geteuid()):
            return False
    return True


def _seal(path: Path, num_bytes: int) -> bytes:
    """Return the digest that follows `num_bytes` of content in a cached file. Loaders ignore bytes after the
    content."""
    digest = hashlib.blake2b(digest_size=_SEAL_BYTES)
    with path.open("rb") as file:
        while num_bytes > 0 and (read := file.read(min(num_bytes, _READ_BYTES))):
            digest.update(read)
            num_bytes -= len(read)
    return digest.digest()
