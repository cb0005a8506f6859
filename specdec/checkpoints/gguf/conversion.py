"""Convert a GGUF file to a checkpoint, once per file, and keep the result in this user's cache.

A child process (`specdec.checkpoints.gguf_convert`) does the conversion, because it needs torch and other libraries
that this process does not load. The name of a conversion is a hash of the file's size, modification time and samples of
its content: a changed file is converted again, a moved file is not. A conversion appears whole or not at all. When
several processes need the same one, the first converts under a file lock and the others wait. Conversions are never
removed; a user who deletes one only pays for it again. What an interrupted conversion wrote is removed when it ends, or
by the next use of a GGUF file. A terminal shows a bar meanwhile, a log lines with a bar. Called by
`specdec.checkpoints.locate`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from specdec.checkpoints import artifact_cache
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.version import install_command

#: Without a terminal, a line for each tenth.
_NUM_LINES = 10
_BAR_WIDTH = 20


class ConversionProgress:
    """Progress of one conversion while the context is open."""

    def __init__(self, path: Path) -> None:
        # Every coordinator and replica imports this module, and few convert a file.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._path = path
        self._num_shown = 0
        self._bar = Progress(
            TextColumn(f"converting {path.name}", markup=False), BarColumn(), TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, share: float) -> None:
        """Show that this share of the conversion is done, 0 to 1."""
        self._bar.update(self._task, completed=share)
        if self._bar.disable and int(share * _NUM_LINES) > self._num_shown:
            self._num_shown = int(share * _NUM_LINES)
            progress = f"{share:.0%}"
            bar = "#" * round(share * _BAR_WIDTH)
            _log.info(
                "converting %s [%s] %s", self._path.name, bar.ljust(_BAR_WIDTH, "-"), progress,
                extra={"progress": progress},
            )  # fmt: skip


_log = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_UNFINISHED, _LOCK = ".unfinished", ".lock"
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
_REQUIRED_PACKAGES = ("gguf", "accelerate")

#: Version of the conversion, part of its name. Increase it when the same file is to be converted differently.
_FORMAT = 3

_NUM_SAMPLES = 256
_SAMPLE_BYTES = 1 << 16


def is_gguf(path: Path) -> bool:
    """Return whether the file starts with the GGUF magic bytes; its name does not matter."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def convert_gguf(path: Path, *, tokenizer_only: bool) -> Path:
    """Return a directory with the checkpoint of a GGUF file, converting the file unless it was converted before.

    Args:
        path: the GGUF file.
        tokenizer_only: convert the tokenizer and the chat template only.

    Raises:
        InvalidRequest: the file is unreadable, a package that reads it is missing, or the cache is not writable.
        Unsupported: transformers cannot read the model, or reads only a part of it.
    """
    kind = "tokenizer" if tokenizer_only else "model"
    try:
        folder = _folder(path)
        _remove_interrupted(folder.parent)
        whole = [folder / "model"] + [folder / "tokenizer"] * tokenizer_only
        if found := next(filter(Path.is_dir, whole), None):
            return found
        artifact_cache.make_folder(folder)
        with _alone(folder / f"{kind}{_LOCK}"):
            if not whole[-1].is_dir():  # another process may have converted it while this one waited
                _convert(path, whole[-1], tokenizer_only)
        return whole[-1]
    except OSError as error:
        raise InvalidRequest(
            f"{error.filename or path} cannot be read or written: {error.strerror}; converted models are kept in the "
            "folder that XDG_CACHE_HOME names",
            field="model",
        ) from error


def converted_gguf(path: Path) -> Path | None:
    """Return the directory of the checkpoint that a GGUF file was converted to; None if it was not converted before."""
    directory = _folder(path) / "model"
    return directory if directory.is_dir() else None


def _folder(path: Path) -> Path:
    return artifact_cache.cache_directory(os.environ) / "gguf" / _digest(path)


def _digest(path: Path) -> str:
    """Return a hash of everything that a conversion depends on: 32 hex digits."""
    status = path.stat()
    what = (_FORMAT, version("transformers"), status.st_size, status.st_mtime_ns)
    digest = hashlib.blake2b(repr(what).encode(), digest_size=16)
    with path.open("rb") as file:
        for offset in range(0, status.st_size, max(_SAMPLE_BYTES, status.st_size // _NUM_SAMPLES)):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@contextmanager
def _alone(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive file lock. The operating system releases it when this process ends, even by a crash.

    Raises BlockingIOError if another process holds it and this one is not to wait.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _remove_interrupted(cache: Path) -> None:
    """Remove what conversions wrote whose processes were killed: nothing else holds their lock."""
    for unfinished in cache.glob(f"*/*{_UNFINISHED}"):
        with suppress(OSError), _alone(unfinished.with_suffix(_LOCK), wait=False):
            shutil.rmtree(unfinished, ignore_errors=True)


def _convert(path: Path, directory: Path, tokenizer_only: bool) -> None:
    missing = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise InvalidRequest(
            f"reading {str(path)!r} needs {' and '.join(missing)}, which this installation lacks: run "
            f"{install_command('gguf')}",
            field="model",
        )
    what = "tokenizer of " if tokenizer_only else ""
    _log.info("converting %sGGUF file: path=%s directory=%s", what, path, directory, extra={"progress": "converting"})
    unfinished = directory.with_name(f"{directory.name}{_UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)  # left over from a process that was killed
    try:
        _run_child(path, unfinished, tokenizer_only)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _run_child(path: Path, directory: Path, tokenizer_only: bool) -> None:
    arguments = [str(path.resolve()), str(directory), *["--tokenizer-only"] * tokenizer_only]
    python_path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    # The child ends when its standard input closes, so it does not outlive this process.
    with (
        ConversionProgress(path) as progress,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "specdec.supervision.child", "specdec.checkpoints.gguf_convert", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": python_path},
            text=True,
        ) as child,
    ):
        assert child.stdout is not None  # it was opened above
        try:
            for line in child.stdout:
                if line.startswith("{"):  # other lines are prints of libraries
                    _take(path, json.loads(line), progress)
        except BaseException:
            child.kill()  # else it would go on writing what this process removes
            child.wait()
            raise
    if child.returncode:
        raise InvalidRequest(
            f"{str(path)!r} cannot be converted: the conversion ended with exit code {child.returncode}"
            + (" (out of memory?)" if child.returncode < 0 else ""),
            field="model",
        )


def _take(path: Path, said: Mapping[str, str], progress: ConversionProgress) -> None:
    """Show the progress, log the warning, or raise the error that one line of the child's output reports."""
    if "progress" in said:
        progress.show(float(said["progress"]))
    if "warning" in said:
        _log.warning("%s: %s", path, said["warning"])
    if "unsupported" in said:
        raise Unsupported(f"{str(path)!r} {said['unsupported']}", field="model")
    if "error" in said:
        raise InvalidRequest(f"{str(path)!r} {said['error']}", field="model")
