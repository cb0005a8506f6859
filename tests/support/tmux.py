"""A shell in tmux, typed at and read as a person does: the screen is what a real terminal emulator makes of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not on the PATH (apt-get install tmux)")

_POLL_S = 0.05
_PATIENCE_S = 60.0
_SHELL_PROMPT = "shell% "


class Tmux:
    """One shell on a screen of 100 x 50. Use as a context manager; nothing of it is left behind."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """`environ`: of the shell."""
        self._folder = tempfile.TemporaryDirectory(prefix="tmux-", dir="/tmp")  # a socket's path must be short
        self._socket = str(Path(self._folder.name) / "s")
        self._environ = dict(environ) | {"PS1": _SHELL_PROMPT, "LANG": "C.UTF-8"}

    def __enter__(self) -> Self:
        shell = ("bash", "--norc", "--noprofile")
        self._run("-f", os.devnull, "new-session", "-d", "-x", "100", "-y", "50", *shell)
        self.wait_for(re.escape(_SHELL_PROMPT.strip()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run("kill-server")
        self._folder.cleanup()

    @property
    def screen(self) -> str:
        """All lines so far, without what is empty at the end."""
        return self._run("capture-pane", "-p", "-S", "-").rstrip("\n")

    def type(self, text: str) -> None:
        """Types a line and Enter."""
        self._run("send-keys", "-l", text)
        self._run("send-keys", "Enter")

    def press(self, key: str) -> None:
        """`key`: in tmux's words, as C-c."""
        self._run("send-keys", key)

    def paste(self, text: str) -> None:
        """Pastes as a terminal does: bracketed where the program has asked for it."""
        self._run("set-buffer", text)
        self._run("paste-buffer", "-p", "-r")

    def wait_for(self, pattern: str, *, count: int = 1) -> str:
        """Returns the screen once the pattern is there `count` times; `^` and `$` are of lines."""
        deadline = time.monotonic() + _PATIENCE_S
        while len(re.findall(pattern, screen := self.screen, re.MULTILINE)) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"{pattern!r} is not {count} times on the screen:\n{screen}")
            time.sleep(_POLL_S)
        return screen

    def _run(self, *args: str) -> str:
        command = ["tmux", "-S", self._socket, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=self._environ).stdout
