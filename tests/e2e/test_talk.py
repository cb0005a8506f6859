"""`specdec generate`, `chat`, `status` and `bench` as a user runs them: real processes, the demo pair."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess

import pytest

from tests.support.gateway_system import System
from tests.support.up_rig import ENVIRON, SPECDEC, specdec


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


ANSI = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(scope="module")
def endpoint(demo: System) -> str:
    return demo.grpc


def test_generate_json_is_one_object_and_mode_changes_no_greedy_token(endpoint: str) -> None:
    outputs = {}
    for mode in ("off", "rejection", "block", "coupled"):
        flags = (
            "--json",
            "--temperature",
            "0",
            "--max-new-tokens",
            "24",
            "--mode",
            mode,
            "--gamma",
            "3",
            "--endpoint",
            endpoint,
        )
        result = specdec("generate", "import os\n", *flags)
        assert result.returncode == 0, result.stderr
        shown = json.loads(result.stdout)
        outputs[mode] = shown["token_ids"]
        assert shown["usage"]["num_output_tokens"] == len(shown["token_ids"]) == 24
        assert (shown["stats"]["num_draft_tokens"] > 0) is (mode != "off")
    assert len(set(map(tuple, outputs.values()))) == 1


def test_generate_without_a_terminal_is_plain_text_and_a_closing_line(endpoint: str) -> None:
    result = specdec(
        "generate", "def f(", "--seed", "7", "--gamma", "3", "--max-new-tokens", "16", SPECDEC_ENDPOINT=endpoint
    )
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    assert re.fullmatch(r"\d+ tokens in \d+\.\d+ s( · .+)?\n", result.stderr)


def test_generate_in_a_terminal_colours_tokens_by_source_and_shows_a_legend(endpoint: str) -> None:
    args = ("generate", "import os\n", "--temperature", "0", "--max-new-tokens", "24", "--gamma", "3")
    output = in_terminal(*args, endpoint=endpoint)
    text, legend, _ = output.replace("\r\n", "\n").rsplit("\n", 3)[0:3]
    plain = ANSI.sub("", output).replace("\r\n", "\n")
    assert set(ANSI.findall(text)) & set(ANSI.findall(legend))
    assert ANSI.sub("", legend) == "accepted  corrected  bonus  target-only"
    assert re.search(r"(draft|default|eagle3|default and eagle3) right \d+ % of the time", plain)
    assert plain.startswith(specdec(*args, "--endpoint", endpoint).stdout)


def test_no_color_turns_colour_off_in_a_terminal(endpoint: str) -> None:
    words = ("generate", "import os\n", "--max-new-tokens", "8", "--temperature", "0")
    output = in_terminal(*words, endpoint=endpoint, NO_COLOR="1")
    assert "\x1b" not in output
    assert " tokens in " in output


def test_chat_in_a_terminal_stops_an_answer_on_ctrl_c_and_leaves_on_ctrl_d(endpoint: str) -> None:
    # Greedily the demo model answers this with 1,500 tokens of code: it cannot have ended by itself when it is stopped.
    terminal = Terminal("chat", "--temperature", "0", "--max-new-tokens", "1500", endpoint=endpoint)
    terminal.read_until("> ")
    for _ in range(2):
        terminal.write("import os\n")
        terminal.read_until("\x1b[3")  # the first coloured token
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until("stopped")
        terminal.read_until("> ")
    terminal.write("\x04")
    shown = terminal.end()
    assert "error" not in shown
    assert "Traceback" not in shown


def test_chat_answers_each_line_over_one_session(endpoint: str) -> None:
    flags = ("--temperature", "0", "--max-new-tokens", "8", "--endpoint", endpoint)
    result = specdec("chat", *flags, stdin="hello\nand again\n")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(" tokens in ") == 2


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["generate", ""], "INVALID_REQUEST"),
        (["generate", "x", "--temperature", "nan"], "INVALID_REQUEST"),
        (["generate", "x", "--top-p", "0"], "INVALID_REQUEST"),
        (["generate", "x", "--gamma", "4000"], "INVALID_REQUEST"),
        (["generate", "x " * 9000], "CONTEXT_TOO_LONG"),
    ],
    ids=["empty prompt", "nan temperature", "top-p 0", "gamma", "long prompt"],
)
def test_a_refused_request_is_one_error_line(endpoint: str, args: list[str], reason: str) -> None:
    result = specdec(*args, "--endpoint", endpoint)
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(rf"error: .+ \({reason}\)\n", result.stderr), result.stderr
    assert result.stderr.count("\n") == 1
