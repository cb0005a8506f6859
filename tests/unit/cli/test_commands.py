"""Whole command lines against a scripted coordinator: output, error lines, exit codes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec.cli.__main__ import run
from specdec.errors import InvalidRequest, NotFound, SessionLost, Unsupported
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import Script, ScriptedCoordinator, finished, serve, started, tokens

Serve = Callable[..., tuple[ScriptedCoordinator, dict[str, str]]]


@pytest.fixture
def coordinator() -> Iterator[Serve]:
    servers = []

    def start(*scripts: Script) -> tuple[ScriptedCoordinator, dict[str, str]]:
        servicer = ScriptedCoordinator(list(scripts))
        server, endpoint = serve(servicer)
        servers.append(server)
        return servicer, {"SPECDEC_ENDPOINT": endpoint}

    yield start
    for server in servers:
        server.stop(None)


def answer(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    sources = "ac" if request.return_provenance else ""
    return [started(request), tokens(0, [1, 2], sources), finished(2, pb.FINISH_REASON_STOP_STRING)]


def test_generate_writes_the_text_to_stdout_and_the_closing_line_to_stderr(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    assert run(["generate", "hi"], environ) == 0
    captured = capsys.readouterr()
    assert captured.out == "<1><2>\n"
    assert captured.err == "rounds 2  alpha 0.50  tau 1.00  4.0 tokens/s\n"
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
    assert run(["generate", "hi", *flags.split()], environ) == 0
    expected = pb.SamplingParams(max_new_tokens=7, temperature=0.5, top_p=0.25, top_k=3, seed=11)
    assert servicer.requests[0].sampling == expected
    assert servicer.requests[0].speculation == pb.SpeculationParams(mode=pb.SPECULATION_MODE_BLOCK, gamma=2)


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
    assert captured.err == "error: INVALID_ARGUMENT INVALID_REQUEST: sampling.top_p must be in (0, 1], not 2.0\n"
    assert captured.out == ""


def test_nobody_listening_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hi", "--endpoint", "127.0.0.1:1"], {}) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: UNAVAILABLE REPLICA_UNAVAILABLE: 127.0.0.1:1")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["fly"],
        ["generate"],
        ["generate", "hi", "--mode", "fast"],
        ["generate", "hi", "--temperature", "hot"],
        ["generate", "hi", "--max", "7"],
        ["chat", "hi"],
        ["up", "--replicas-target", "0"],
        ["up", "--target", "x", "--replicas-draft", "1"],
        ["up", "--metrics", "nowhere"],
        ["up", "--metrics", "127.0.0.1:65534"],
        ["up", "--max-context-tokens", "0"],
        ["up", "--num-threads-draft", "0"],
        ["up", "--log-level", "loud"],
        ["up", "--listen", "nowhere"],
        ["up", "--listen", "127.0.0.1:70000"],
        ["up", "--http", "127.0.0.1:8000"],
        ["health"],
    ],
    ids=" ".join,
)
def test_a_usage_error_is_one_line_and_exit_code_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args, {}) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: INVALID_ARGUMENT INVALID_REQUEST: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_text_that_is_not_unicode_is_refused_before_it_is_sent(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    assert run(["generate", "\udcff"], environ) == 1
    assert capsys.readouterr().err.startswith("error: INVALID_ARGUMENT INVALID_REQUEST: prompt:")
    assert servicer.requests == []


def test_a_line_that_is_not_unicode_is_refused_before_it_is_sent(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    assert run(["chat"], environ) == 1
    assert capsys.readouterr().err.startswith("error: INVALID_ARGUMENT INVALID_REQUEST: messages[0].content:")
    assert servicer.requests == []


def test_chat_keeps_one_session_and_sends_the_whole_conversation(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n"))
    assert run(["chat"], environ) == 0
    first, second = servicer.requests
    assert first.session_id == second.session_id
    assert [(m.role, m.content) for m in second.messages.messages] == [
        ("user", "hello"),
        ("assistant", "<1><2>"),
        ("user", "again"),
    ]
    assert servicer.deleted == [first.session_id]
    assert capsys.readouterr().out == "<1><2>\n<1><2>\n"


def test_chat_goes_on_with_its_messages_when_the_session_was_lost_and_says_so(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer, lambda r: [SessionLost("expected 5 tokens, it holds 0")], answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    assert run(["chat"], environ) == 0
    first, refused, again = servicer.requests
    assert [request.HasField("expected_session_tokens") for request in (first, refused, again)] == [False, True, False]
    assert refused.expected_session_tokens == 3 + 2
    assert again.messages == refused.messages
    assert servicer.deleted == [first.session_id] * 2
    shown = capsys.readouterr()
    assert shown.out == "<1><2>\n<1><2>\n"
    assert "expected 5 tokens, it holds 0; asking again" in shown.err


def test_chat_with_a_model_without_template_is_one_error_line(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(lambda r: [InvalidRequest("the model has no chat template", reason="NO_CHAT_TEMPLATE")])
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert run(["chat"], environ) == 1
    assert capsys.readouterr().err == "error: INVALID_ARGUMENT NO_CHAT_TEMPLATE: the model has no chat template\n"


def test_health_of_a_server_without_the_service_is_an_error_line(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(answer)
    assert run(["health", environ["SPECDEC_ENDPOINT"]], {}) == 1
    assert capsys.readouterr().err.startswith(f"error: {Unsupported.code} {Unsupported.default_reason}: ")


def test_an_error_message_of_several_lines_is_shown_on_one(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(lambda r: [NotFound("no\nsuch  session")])
    assert run(["generate", "hi"], environ) == 1
    assert capsys.readouterr().err == "error: NOT_FOUND SESSION_NOT_FOUND: no such session\n"


def test_bench_runs_every_prompt_with_and_without_speculation_and_deletes_its_sessions(
    coordinator: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    servicer, environ = coordinator(answer)
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    flags = ["--prompts", str(tmp_path / "prompts.txt"), "--repeats", "2", "--gamma", "3", "--json"]
    assert run(["bench", *flags], environ) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["speedup"], shown["num_pairs"]) == (1.0, 4)
    assert shown["speculative"]["draft_efficiency"] == 0.5
    modes = [request.speculation.mode for request in servicer.requests]
    assert modes.count(pb.SPECULATION_MODE_OFF) == 4
    assert modes[:4] == [0, pb.SPECULATION_MODE_OFF, pb.SPECULATION_MODE_OFF, 0]
    assert [request.prompt for request in servicer.requests] == ["one"] * 2 + ["two"] * 2 + ["one"] * 2 + ["two"] * 2
    assert len(servicer.deleted) == 8


def test_bench_refuses_a_file_without_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    assert run(["bench", "--prompts", str(tmp_path / "empty.txt")], {}) == 1
    assert "holds no prompt" in capsys.readouterr().err
