"""`specdec chat` against a scripted coordinator."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli.__main__ import run
from specdec.contract.errors import InvalidRequest, SessionLost, SpecdecError, Unavailable
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import ScriptedCoordinator
from tests.unit.cli.conftest import Serve, answer

Talk = Callable[..., int]


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a text the input of a terminal."""

    def type_in(text: str) -> None:
        terminal = io.StringIO(text)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", terminal)

    return type_in


def said(request: pb.GenerateRequest) -> list[str]:
    return [message.content for message in request.messages.messages]


def too_long(request: pb.GenerateRequest) -> list[SpecdecError]:
    return [InvalidRequest("the session would hold 600 tokens", reason="CONTEXT_TOO_LONG", field="messages")]


def test_a_line_that_is_not_unicode_is_refused_before_it_is_sent(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    assert run(["chat"], environ) == 1
    assert capsys.readouterr().err.startswith("error: messages[0].content:")
    assert servicer.requests == []


def test_chat_uses_one_session_and_sends_the_whole_conversation(
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


def test_chat_sends_its_messages_again_when_the_session_was_lost_and_says_so(
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
    assert "expected 5 tokens, it holds 0; sending the whole conversation again" in shown.err


def test_a_model_without_a_chat_template_is_refused_before_the_first_message(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    servicer.tokenize_error = InvalidRequest("the model has no chat template", reason="NO_CHAT_TEMPLATE")
    monkeypatch.setattr("sys.stdin", Unread())
    assert run(["chat"], environ) == 1
    expected = "the model has no chat template: it is a completion model; use `specdec generate PROMPT`"
    assert capsys.readouterr().err == f"error: {expected} (NO_CHAT_TEMPLATE)\n"
    assert servicer.requests == []


class Unread(io.StringIO):
    def readline(self, size: int = -1, /) -> str:
        raise AssertionError("a message was read")


def test_a_chat_with_the_demo_pair_warns_that_it_is_a_completion_model(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    servicer.served = pb.GetInfoResponse(target_model="/somewhere/models/demo/target")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(["chat"], environ) == 0
    err = capsys.readouterr().err
    assert "completion model" in err
    assert "`specdec generate " in err


def test_at_a_terminal_an_error_returns_to_the_prompt_with_the_conversation_unchanged(
    coordinator: Serve, at_terminal: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer, too_long, lambda r: [Unavailable("gone", retry_after_s=60)], answer)
    at_terminal("one\nrefused\nlost\ntwo\n")
    assert run(["chat"], environ) == 0
    assert said(servicer.requests[-1]) == ["one", "<1><2>", "two"]
    err = capsys.readouterr().err
    assert "error: the session would hold 600 tokens (CONTEXT_TOO_LONG)\n" in err
    assert "/trim" in err
    assert "error: gone (REPLICA_UNAVAILABLE)\n" in err


def test_without_a_terminal_an_error_ends_the_chat(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(too_long, answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert run(["chat"], environ) == 1
    assert len(servicer.requests) == 1
    assert capsys.readouterr().err == ("error: the session would hold 600 tokens (CONTEXT_TOO_LONG)\n")


def test_trim_drops_the_oldest_turns(coordinator: Serve, at_terminal: Callable[[str], None]) -> None:
    servicer, environ = coordinator(answer)
    at_terminal("one\ntwo\nthree\n/trim\nfour\n/trim 1\nfive\n/trim 99\nsix\n")
    assert run(["chat", "--system", "be brief"], environ) == 0
    four, five, six = map(said, servicer.requests[3:])
    assert four == ["be brief", "three", "<1><2>", "four"]
    assert five == ["be brief", "four", "<1><2>", "five"]
    assert six == ["be brief", "six"]


def with_context(servicer: ScriptedCoordinator, num_characters: int) -> None:
    """Count each character of a message as a token, with a context of this size, the answer included."""
    servicer.served = pb.GetInfoResponse(max_context_tokens=num_characters)
    servicer.num_tokens = lambda request: sum(len(message.content) for message in request.messages.messages)


def beyond(num_characters: int) -> Callable[[pb.GenerateRequest], list[object]]:
    return lambda request: too_long(request) if sum(map(len, said(request))) >= num_characters else answer(request)


def test_json_is_one_object_for_each_answer_and_for_an_error(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer, answer, lambda r: [InvalidRequest("no", field="messages")])
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    assert run(["chat", "--json"], environ) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["text"] for line in captured.out.splitlines()] == ["<1><2>", "<1><2>"]
    assert json.loads(captured.err)["field"] == "messages"
    assert said(servicer.requests[1]) == ["one", "<1><2>", "two"]


def test_with_trim_the_oldest_turns_are_dropped_automatically(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(beyond(20))
    with_context(servicer, 20)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    assert run(["chat", "--trim"], environ) == 0
    assert said(servicer.requests[-1]) == ["two", "<1><2>", "three"]
    err = capsys.readouterr().err
    assert err.count("dropped") == 1
    assert "dropped the 1 oldest turns, 2 are left" in err


def test_with_trim_all_turns_that_must_go_are_dropped_at_once(
    coordinator: Serve, at_terminal: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(beyond(70))
    with_context(servicer, 70)
    at_terminal("a\nb\nc\nd\ne\n" + "x" * 50 + "\n")
    assert run(["chat", "--trim"], environ) == 0
    *_, refused, long = map(said, servicer.requests)
    assert len(refused) == 11
    assert long == ["d", "<1><2>", "e", "<1><2>", "x" * 50]
    assert "dropped the 3 oldest turns, 3 are left" in capsys.readouterr().err


def test_with_trim_a_message_that_alone_is_too_long_drops_no_turn(
    coordinator: Serve, at_terminal: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(beyond(40))
    with_context(servicer, 40)
    at_terminal("one\ntwo\n" + "word " * 10 + "\nthree\n")
    assert run(["chat", "--trim"], environ) == 0
    assert said(servicer.requests[-1]) == ["one", "<1><2>", "two", "<1><2>", "three"]
    err = capsys.readouterr().err
    assert "the message alone is too long: it has 50 tokens, and the context of 40 has room for 39 before" in err
    assert "the conversation is unchanged\n" in err
    assert "dropped the" not in err


def test_dropped_turns_return_when_their_request_fails(
    coordinator: Serve, at_terminal: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    gone = Unavailable("gone", retry_after_s=60)
    servicer, environ = coordinator(answer, answer, too_long, lambda r: [gone], answer)
    with_context(servicer, 20)
    at_terminal("one\ntwo\nthree\nfour\n")
    assert run(["chat", "--trim"], environ) == 0
    assert said(servicer.requests[3]) == ["two", "<1><2>", "three"]
    assert said(servicer.requests[4]) == ["one", "<1><2>", "two", "<1><2>", "four"]
    assert "dropped" not in capsys.readouterr().err


def test_with_trim_a_first_message_that_is_too_long_is_refused(
    coordinator: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, environ = coordinator(too_long)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert run(["chat", "--trim"], environ) == 1


def test_commands_are_run_and_not_sent(
    coordinator: Serve, at_terminal: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    at_terminal("/help\n/nonsense 1\none\n/system speak French\n/system\ntwo\n/clear\nthree\n /path\n/exit\nno\n")
    assert run(["chat"], environ) == 0
    assert [said(request) for request in servicer.requests] == [
        ["one"],
        ["speak French", "one", "<1><2>", "two"],
        ["speak French", "three"],
        ["speak French", "three", "<1><2>", "/path"],
    ]
    assert [request.messages.messages[0].role for request in servicer.requests] == ["user"] + 3 * ["system"]
    assert not servicer.requests[2].HasField("expected_session_tokens")  # the session was deleted
    err = capsys.readouterr().err
    assert "/trim [N]" in err
    assert "/nonsense 1 is not a command" in err
    assert "speak French\n" in err


def test_lines_between_triple_quotes_are_one_message(coordinator: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    servicer, environ = coordinator(answer)
    monkeypatch.setattr("sys.stdin", io.StringIO('"""\none\n\n two\n"""\n"""three"""\n'))
    assert run(["chat"], environ) == 0
    assert said(servicer.requests[1]) == ["one\n\n two", "<1><2>", "three"]


def test_a_chat_without_a_coordinator_says_so_before_a_message_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Unread())
    assert run(["chat", "--endpoint", "127.0.0.1:1"], {}) == 1
    assert "no coordinator at 127.0.0.1:1: the connection was refused; start one" in capsys.readouterr().err


TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def calling(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Answer with two tool calls."""
    events = answer(request)
    for event in events:
        if event.WhichOneof("event") == "tokens":
            event.tokens.text = ""
            for detail in event.tokens.details:
                detail.text = ""
            for index in range(2):
                call = pb.ToolCallDelta(index=index, id=f"c{index}", name="now", arguments='{"zone": "\x1b"}')
                event.tokens.parts.add(tool_call=call)
            break
    events[-1].finished.reason = pb.FINISH_REASON_TOOL_CALLS
    return events


def test_calls_are_printed_and_the_next_lines_are_their_results(
    coordinator: Serve, at_terminal: Callable[[str], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    servicer, environ = coordinator(calling, answer)
    at_terminal("what time is it?\nnoon\nthree\nthanks\n")
    assert run(["chat", "--tools", str(tmp_path / "tools.json")], environ) == 0
    first, second, third = servicer.requests
    assert first.tools.definitions[0].name == "now"
    assert [message.role for message in second.messages.messages] == ["user", "assistant", "tool", "tool"]
    assert said(second)[2:] == ["noon", "three"]
    calls = json.loads(second.messages.messages[1].extra_json)["tool_calls"]
    assert [call["id"] for call in calls] == ["c0", "c1"]
    assert json.loads(second.messages.messages[3].extra_json) == {"tool_call_id": "c1"}
    assert said(third)[-1] == "thanks"
    assert 'now({"zone": "' in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{}", "[]", "[1]", "x"])
def test_a_file_without_tools_is_refused_before_a_message_is_read(
    text: str, coordinator: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "tools.json").write_text(text)
    _, environ = coordinator(answer)
    monkeypatch.setattr("sys.stdin", Unread())
    assert run(["chat", "--tools", str(tmp_path / "tools.json")], environ) == 1
    assert "tools.json" in capsys.readouterr().err
