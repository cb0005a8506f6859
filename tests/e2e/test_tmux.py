"""`specdec generate` and `chat` in a real terminal: Ctrl-C, pasted text, errors at the prompt."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from specdec.contract.errors import InvalidRequest
from specdec.v1 import coordinator_pb2 as pb
from tests.support.gateway_system import System
from tests.support.scripted_coordinator import ScriptedCoordinator, finished, serve, started, tokens
from tests.support.tmux import Tmux, needs_tmux
from tests.support.up_rig import ENVIRON, SPECDEC

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
