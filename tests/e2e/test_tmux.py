"""`specdec generate` and `chat` in a real terminal: Ctrl-C, pasted text, errors at the prompt."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from specdec.contract.errors import InvalidRequest
from specdec.v1 import coordinator_pb2 as pb
from tests.support.gateway_system import System
from tests.support.scripted_coordinator import ScriptedCoordinator, finished, serve, started, tokens
from tests.support.up_rig import ENVIRON, SPECDEC

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


pytestmark = needs_tmux

COMMAND = shlex.join(SPECDEC)
LONG = "--temperature 0 --max-new-tokens 1500"  # seconds of text: it cannot have ended by itself when it is stopped


@pytest.fixture(scope="module")
def endpoint(demo: System) -> str:
    return demo.grpc


@pytest.fixture
def scripted() -> Iterator[tuple[ScriptedCoordinator, str]]:
    def answer(request: pb.GenerateRequest) -> list[pb.GenerateResponse | InvalidRequest]:
        if "refuse" in request.messages.messages[-1].content:
            return [InvalidRequest("too long", reason="CONTEXT_TOO_LONG")]
        return [started(request), tokens(0, [1, 2], "ac"), finished(2)]

    servicer = ScriptedCoordinator([answer])
    server, endpoint = serve(servicer)
    yield servicer, endpoint
    server.stop(None)


def test_ctrl_c_ends_generate_with_its_closing_line_and_130_and_the_shell_begins_a_line(endpoint: str) -> None:
    with Tmux(ENVIRON | {"SPECDEC_ENDPOINT": endpoint}) as shell:
        shell.type(f"{COMMAND} generate 'import os' {LONG}; echo exit=$?")
        shell.wait_for("^import", count=2)
        shell.press("C-c")
        screen = shell.wait_for(r"^exit=130$")
        *_, legend, closing, status, prompt = screen.splitlines()
        assert re.fullmatch(r"stopped after \d+ tokens( · [\w ]+ right \d+ % of the time)?", closing)
        assert legend == "accepted  corrected  bonus  target-only"
        assert (status, prompt.strip()) == ("exit=130", "shell%")
        assert "Traceback" not in screen


def test_ctrl_c_stops_an_answer_of_chat_and_ctrl_d_leaves(endpoint: str) -> None:
    with Tmux(ENVIRON | {"SPECDEC_ENDPOINT": endpoint}) as shell:
        shell.type(f"{COMMAND} chat {LONG}; echo exit=$?")
        shell.wait_for("^> ?$")
        for number in (1, 2):
            num_lines = len(shell.screen.splitlines())
            shell.type("import os")
            shell.wait_for(rf"(.*\n){{{num_lines + 3}}}")  # the answer has begun
            shell.press("C-c")
            shell.wait_for(r"^stopped after \d+ tokens", count=number)
        shell.wait_for("^> ?$")
        shell.press("C-c")  # at the prompt it discards the line, and goes on
        shell.press("C-d")
        screen = shell.wait_for("^exit=0$")
        assert "error" not in screen
        assert "Traceback" not in screen


def test_a_pasted_text_is_one_message_and_so_is_one_in_triple_quotes(
    scripted: tuple[ScriptedCoordinator, str],
) -> None:
    servicer, endpoint = scripted
    with Tmux(ENVIRON | {"SPECDEC_ENDPOINT": endpoint}) as shell:
        shell.type(f"{COMMAND} chat --system 'be brief'; echo exit=$?")
        shell.wait_for("^> ?$")
        shell.paste("one\n  two\nthree")
        shell.wait_for("three")
        assert servicer.requests == []
        shell.press("Enter")
        shell.wait_for(r"^\d+ tokens in ")
        for line in ('"""', "four", "five", '"""'):
            shell.type(line)
        shell.wait_for(r"^\d+ tokens in ", count=2)
        shell.press("C-d")
        shell.wait_for("^exit=0$")
    contents = [[message.content for message in request.messages.messages] for request in servicer.requests]
    assert contents == [
        ["be brief", "one\n  two\nthree"],
        ["be brief", "one\n  two\nthree", "<1><2>", "four\nfive"],
    ]


def test_an_error_returns_to_the_prompt(scripted: tuple[ScriptedCoordinator, str]) -> None:
    servicer, endpoint = scripted
    with Tmux(ENVIRON | {"SPECDEC_ENDPOINT": endpoint}) as shell:
        shell.type(f"{COMMAND} chat; echo exit=$?")
        shell.wait_for("^> ?$")
        shell.type("refuse this")
        shell.wait_for(r"^error: too long \(CONTEXT_TOO_LONG\)$")
        shell.type("one")
        shell.wait_for(r"^\d+ tokens in ")
        shell.type("/exit")
        shell.wait_for("^exit=0$")
    assert [message.content for message in servicer.requests[-1].messages.messages] == ["one"]
