"""Files of machine code that outlive a process: who may have written them, and whether they are whole.

Whoever writes such a file runs code as whoever loads it, so only one is used that nobody but root and this user can
have written, in a folder where nobody else can put another in its place. Each ends with a digest of itself, because
damaged machine code would be run too. Not here: what is in a file and what it is called. Called by
`specdec.engine.kernels.library` and `specdec.engine.kernels.prebuilt`; their folder is `specdec.checkpoints.gguf`'s
too.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

_SEAL_BYTES = 16
_READ_BYTES = 1 << 20


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Return the folder of this user's files that can be made again (the XDG base directories)."""
    try:
        return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
    except RuntimeError:  # containers often run under a user id without a home directory
        return Path("/var/cache/specdec")


def is_usable(path: Path) -> bool:
    """Whether there is a file that `keep` wrote, whole, and that nobody but root and this user may have written."""
    try:
        status = path.stat()
        is_ours = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        content_bytes = status.st_size - _SEAL_BYTES
        if not is_ours or content_bytes < 0 or not _is_guarded(path.parent):
            return False
        with path.open("rb") as file:
            file.seek(content_bytes)
            return file.read() == _seal(path, content_bytes)
    except OSError:
        return False


def keep(built: Path, path: Path) -> None:
    """Copies a file to where `is_usable` finds it, with its seal; see `make_folder`.

    It is renamed into place, so that processes that start at once all find a whole file or none.

    Raises:
        OSError: it cannot be written.
    """
    make_folder(path.parent)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as unfinished:
        copy = Path(unfinished) / path.name
        shutil.copyfile(built, copy)
        with copy.open("ab") as file:
            file.write(_seal(built, built.stat().st_size))
        copy.chmod(0o755)  # whatever the umask says
        copy.replace(path)


def make_folder(directory: Path) -> None:
    """Makes a folder for kept files, for this user alone, unless there is one.

    Raises:
        OSError: it cannot be made, or others could put their files in the place of ours.
    """
    for folder in (*reversed(directory.parents), directory):
        if not folder.is_dir():
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except FileExistsError as error:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
    if not _is_guarded(directory):
        raise PermissionError(errno.EPERM, "others could put their files in the place of ours", str(directory))


def _is_guarded(directory: Path) -> bool:
    """Whether nobody but root and this user, or a group they gave it to, can move what lies in a folder."""
    resolved = directory.resolve()
    for folder in (resolved, *resolved.parents):
        status = folder.stat()
        is_open = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        if is_open or status.st_uid not in (0, os.geteuid()):
            return False
    return True


def _seal(path: Path, num_bytes: int) -> bytes:
    """What follows that many bytes in a kept file; loaders look at what headers name."""
    digest = hashlib.blake2b(digest_size=_SEAL_BYTES)
    with path.open("rb") as file:
        while num_bytes > 0 and (read := file.read(min(num_bytes, _READ_BYTES))):
            digest.update(read)
            num_bytes -= len(read)
    return digest.digest()
