"""Whole command lines against a scripted coordinator: output, error lines, exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from specdec.cli.__main__ import _COMMANDS, run
from specdec.contract.errors import InvalidRequest, NotFound, Unsupported
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import finished, started, tokens
from tests.unit.cli.conftest import Serve, answer


def test_generate_writes_the_text_to_stdout_and_the_closing_line_to_stderr(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    assert run(["generate", "hi"], environ) == 0
    captured = capsys.readouterr()
    assert captured.out == "<1><2>\n"
    assert captured.err == "2 tokens in 0.50 s · draft right 50 % of the time · 1.0 tokens a step\n"
    assert servicer.requests[0].prompt == "hi"


def test_generate_json_prints_one_object_with_the_names_of_the_proto(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(answer)
    assert run(["generate", "hi", "--json"], environ) == 0
    captured = capsys.readouterr()
    shown = json.loads(captured.out)
    assert list(shown) == ["session_id", "request_id", "text", "token_ids", "finish_reason", "usage", "stats"]
    assert (shown["text"], shown["token_ids"], shown["finish_reason"]) == ("<1><2>", [1, 2], "stop_string")
    assert shown["stats"]["wire_bytes"] == 9
    assert captured.err == ""


def test_every_flag_of_generate_reaches_its_field(coordinator: Serve) -> None:
    servicer, environ = coordinator(answer)
    flags = "--max-new-tokens 7 --temperature 0.5 --top-p 0.25 --top-k 3 --seed 11 --gamma 2 --mode block --json"
    flags += " --min-p 0.125 --stop END --stop ; --draft-pool code --task sql"
    assert run(["generate", "hi", *flags.split()], environ) == 0
    expected = pb.SamplingParams(
        max_new_tokens=7, temperature=0.5, top_p=0.25, top_k=3, seed=11, min_p=0.125, stop=["END", ";"]
    )
    assert servicer.requests[0].sampling == expected
    asked = pb.SpeculationParams(mode=pb.SPECULATION_MODE_BLOCK, gamma=2, draft_pool="code", task="sql")
    assert servicer.requests[0].speculation == asked


def test_endpoint_flag_wins_over_the_environment(coordinator: Serve) -> None:
    _, environ = coordinator(answer)
    args = ["generate", "hi", "--json", "--endpoint", environ["SPECDEC_ENDPOINT"]]
    assert run(args, {"SPECDEC_ENDPOINT": "127.0.0.1:1"}) == 0


def test_an_error_of_the_server_is_one_line_with_code_and_reason(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(lambda r: [InvalidRequest("sampling.top_p must be in (0, 1], not 2.0", field="x")])
    assert run(["generate", "hi"], environ) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: sampling.top_p must be in (0, 1], not 2.0 (INVALID_REQUEST)\n"
    assert captured.out == ""


def test_an_endpoint_without_a_system_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hi", "--endpoint", "127.0.0.1:1"], {}) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        "error: no coordinator at 127.0.0.1:1: the connection was refused; start one with `specdec up`"
    )
    assert err.endswith(" (COORDINATOR_UNAVAILABLE)\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("args", [["generate", "-"], ["generate"]], ids=" ".join)
def test_standard_input_is_a_prompt_to_its_last_byte(
    args: list[str], coordinator: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, environ = coordinator(answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):\n    return\n"))
    assert run(args, environ) == 0
    assert servicer.requests[0].prompt == "def f(x):\n    return\n"


def test_bytes_on_standard_input_that_are_no_text_are_told_in_words(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é\xff".encode("latin-1")), encoding="utf-8"))
    assert run(["generate"], environ) == 1
    told = "the text on standard input is not UTF-8: there is a byte 0xe9 after 0 characters"
    assert capsys.readouterr().err == f"error: {told} (INVALID_REQUEST)\n"
    assert servicer.requests == []


def test_generate_without_a_prompt_at_a_terminal_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO("never read")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert run(["generate"], {}) == 2
    assert "required: PROMPT" in capsys.readouterr().err
    assert terminal.tell() == 0


def test_json_lines_are_one_object_per_chunk_and_then_the_whole_output(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(lambda r: [started(r), tokens(0, [1, 2]), tokens(2, [3]), finished(3)])
    assert run(["generate", "hi", "--json-lines"], environ) == 0
    first, second, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"event": "tokens", "index": 0, "token_ids": [1, 2], "text": "<1><2>"}
    assert (second["index"], second["token_ids"]) == (2, [3])
    assert (last["event"], last["token_ids"], last["text"]) == ("finished", [1, 2, 3], "<1><2><3>")
    assert last["stats"]["wire_bytes"] == 9


class Interrupting(io.StringIO):
    """Sends Ctrl-C once it shows the second token."""

    def write(self, text: str) -> int:
        num_written = super().write(text)
        if "<2>" in text and "cancelled" not in text:
            os.kill(os.getpid(), signal.SIGINT)
        return num_written


@pytest.mark.parametrize("shape", [[], ["--json-lines"]], ids=["text", "json-lines"])
def test_ctrl_c_shows_the_tokens_so_far_and_is_exit_code_130(
    shape: list[str], coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(lambda r: [started(r), *(tokens(index, [index + 1]) for index in range(5000))])
    stdout = Interrupting()
    monkeypatch.setattr("sys.stdout", stdout)
    assert run(["generate", "hi", *shape], environ) == 130
    if not shape:
        assert stdout.getvalue() == "<1><2>\n"
        assert capsys.readouterr().err == "stopped after 2 tokens\n"
        return
    shown = json.loads(stdout.getvalue().splitlines()[-1])
    assert (shown["text"], shown["token_ids"], shown["finish_reason"]) == ("<1><2>", [1, 2], "cancelled")


@pytest.mark.parametrize("shape", ["--json", "--json-lines"])
def test_logprobs_are_shown_with_each_token(shape: str, coordinator: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    def with_logprobs(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        chunk = tokens(0, [5], "a")
        chunk.tokens.details[0].logprob = -0.5
        chunk.tokens.details[0].token_bytes = b"<5>"
        chunk.tokens.details[0].top_logprobs.add(token_id=7, logprob=-0.25, token_bytes=b"\xc3")
        return [started(request), chunk, finished(1)]

    servicer, environ = coordinator(with_logprobs)
    assert run(["generate", "hi", shape, "--logprobs", "1"], environ) == 0
    (detail,) = json.loads(capsys.readouterr().out.splitlines()[0])["details"]
    assert (detail["text"], detail["source"], detail["logprob"]) == ("<5>", "accepted", -0.5)
    assert bytes(detail["token_bytes"]) == b"<5>"
    assert detail["top_logprobs"] == [{"token_id": 7, "logprob": -0.25, "token_bytes": [0xC3]}]
    assert servicer.requests[0].sampling.logprobs == 1


def test_text_that_is_not_unicode_is_refused_before_it_is_sent(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    assert run(["generate", "\udcff"], environ) == 1
    assert capsys.readouterr().err.startswith("error: prompt:")
    assert servicer.requests == []


def test_health_of_a_server_without_the_service_is_an_error_line(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(answer)
    assert run(["health", environ["SPECDEC_ENDPOINT"]], {}) == 1
    assert capsys.readouterr().err.endswith(f" ({Unsupported.default_reason})\n")


def test_an_error_message_of_several_lines_is_shown_on_one(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(lambda r: [NotFound("no\nsuch  session")])
    assert run(["generate", "hi"], environ) == 1
    assert capsys.readouterr().err == "error: no such session (SESSION_NOT_FOUND)\n"


@pytest.mark.parametrize(
    ("args", "code", "fields"),
    [
        (["generate", "hi", "--json", "--json-lines"], 2, {"code": "INVALID_ARGUMENT", "reason": "INVALID_REQUEST"}),
        (["status", "--json", "--endpoint", "127.0.0.1:1"], 1, {"reason": "COORDINATOR_UNAVAILABLE"}),
    ],
)
def test_an_error_of_a_command_that_prints_json_is_a_json_object(
    args: list[str], code: int, fields: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args, {}) == code
    shown = json.loads(capsys.readouterr().err)
    assert set(shown) == {"error", "code", "reason", "field"}
    assert fields.items() <= shown.items()


@pytest.mark.parametrize(
    "args",
    [["generate", "hi"], ["status"], ["pools"], ["top"], ["promote", "default"], ["bench", "--repeats", "1"]],
    ids=lambda args: args[0],
)
def test_the_key_of_the_flag_or_else_of_the_environment_is_sent_with_every_call(
    args: list[str], coordinator: Serve
) -> None:
    servicer, environ = coordinator(answer)
    environ["SPECDEC_API_KEY"] = "from-environ"
    assert run(args, environ) == 0
    assert set(servicer.authorizations) == {"Bearer from-environ"}
    servicer.authorizations.clear()
    assert run([*args, "--api-key", "from-flag"], environ) == 0
    assert set(servicer.authorizations) == {"Bearer from-flag"}
    servicer.authorizations.clear()
    assert run(args, environ | {"SPECDEC_API_KEY": ""}) == 0
    assert set(servicer.authorizations) == {""}


def test_a_malformed_key_is_refused_and_not_shown(coordinator: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    _, environ = coordinator(answer)
    assert run(["status", "--json"], environ | {"SPECDEC_API_KEY": "two words"}) == 1
    err = capsys.readouterr().err
    assert json.loads(err)["field"] == "api_key"
    assert "two words" not in err


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_takes_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"], {}) == 0
    assert "--json" in capsys.readouterr().out.split()


def test_a_json_error_names_the_field_that_the_server_refuses(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(lambda r: [InvalidRequest("top_p must be in (0, 1]", field="sampling.top_p")])
    assert run(["generate", "hi", "--json"], environ) == 1
    assert json.loads(capsys.readouterr().err) == {
        "error": "top_p must be in (0, 1]",
        "code": "INVALID_ARGUMENT",
        "reason": "INVALID_REQUEST",
        "field": "sampling.top_p",
    }


def test_every_command_has_a_line_in_the_help_and_flags_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"], {}) == 0
    shown = capsys.readouterr().out
    for name in _COMMANDS:
        assert f"\n    {name} " in shown.replace("\n        ", " ")  # a long name has its text in the next line
        assert run([name, "--help"], {}) == 0
        assert f"usage: specdec {name}" in capsys.readouterr().out


def test_the_help_is_quick_because_no_command_is_imported() -> None:
    program = (
        "import sys\nfrom specdec.cli.__main__ import run\ncode = run(['--help'], {})\n"
        "print(code, sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'grpc', 'google', 'numpy', 'pydantic', 'rich', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
