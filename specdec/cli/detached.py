"""`specdec up --detach`: starts `specdec up` in the background and returns once it is ready.

The background process is the same command without `--detach`, in a session of its own. Its stderr goes to a log file,
which is copied to this command's stderr until the system is ready.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from specdec.cli import INTERRUPTED
from specdec.cli.control import down_command
from specdec.cli.control_folder import control_folder
from specdec.cli.listening import listen_address
from specdec.contract.errors import Unavailable
from specdec.settings.addresses import split_address
from specdec.supervision.service_process import python_path
from specdec.supervision.services import tell

_POLL_S = 0.1
_DETACH_FLAG = "--detach"


def start_detached(
    args: argparse.Namespace, argv: Sequence[str], environ: Mapping[str, str], stop: threading.Event
) -> int:
    """Start the system in the background; return the exit code once it is ready, has failed, or `stop` is set.

    Args:
        args: the parsed flags.
        argv: the whole command line that they were parsed from.
        environ: environment of the system.
        stop: set to end the start; the system is ended too then.

    Raises:
        Unavailable: the address is in use, or the log file cannot be written.
    """
    endpoint = listen_address(args, environ)
    path = _log_path(endpoint)
    words = [word for word in argv if word != _DETACH_FLAG]
    with open(path, "w", opener=_private) as log:
        up = subprocess.Popen(
            [sys.executable, "-P", "-m", "specdec.cli", *words, "--listen", endpoint],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**environ, "PYTHONPATH": python_path(environ)},
            start_new_session=True,
            text=True,
        )
    ready = _ReadyLine(up)
    with path.open(errors="replace") as log:
        while not (ready.ended.wait(_POLL_S) or stop.is_set()):
            _copy(log)
        if stop.is_set() and not ready.line:
            up.terminate()
            up.wait()
            _copy(log)
            return INTERRUPTED
        if not ready.line:
            exit_code = up.wait()
            _copy(log)  # its last line says why it ended
            return exit_code or 1
        _copy(log)
    print(ready.line, flush=True)
    tell(f"running in the background as process {up.pid}; stop it with: {down_command(endpoint)}; log: {path}")
    return 0


class _ReadyLine:
    """Reads the first line that the system prints, in a thread of its own."""

    def __init__(self, up: subprocess.Popen[str]) -> None:
        self.line = ""
        """The line, once `ended` is set; "" if the system ended without one."""
        self.ended = threading.Event()
        self._up = up
        threading.Thread(target=self._read, name="ready-line", daemon=True).start()

    def _read(self) -> None:
        assert self._up.stdout is not None  # it was opened above
        self.line = self._up.stdout.readline().rstrip("\n")
        self.ended.set()


def _log_path(endpoint: str) -> Path:
    """Return the log file of the system at `endpoint`. Raises Unavailable if its folder cannot be used."""
    try:
        return control_folder(make=True) / f"{split_address(endpoint)[1]}.log"
    except OSError as error:
        raise Unavailable(f"no folder for the log: {error}") from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # at level debug it holds users' texts


def _copy(log: TextIO) -> None:
    """Write what the log has gained to stderr."""
    if text := log.read():
        tell(text.rstrip("\n"))
