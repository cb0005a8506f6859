"""A command on a pseudo-terminal of its own, typed at and read by a test."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess

from tests.support.up_rig import ENVIRON, SPECDEC


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *args: str, endpoint: str, **environ: str) -> None:
        self._descriptor, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*SPECDEC, *args, "--endpoint", endpoint], stdin=theirs, stdout=theirs, stderr=theirs,
            env=ENVIRON | {"TERM": "xterm"} | environ,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""
        self._position = 0

    def read_until(self, text: str) -> None:
        """Reads on until `text` follows what was read up to before."""
        while (found := self.shown.find(text, self._position)) < 0:
            self.shown += os.read(self._descriptor, 4096).decode(errors="replace")
        self._position = found + len(text)

    def write(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def end(self) -> str:
        """Everything that was shown, once the command has ended well."""
        with contextlib.suppress(OSError):  # the end of a terminal is an error to read
            self.read_until("\0")
        os.close(self._descriptor)
        assert self.process.wait() == 0, self.shown
        return self.shown


def in_terminal(*args: str, endpoint: str, **environ: str) -> str:
    """What a command shows on a terminal."""
    return Terminal(*args, endpoint=endpoint, **environ).end()
