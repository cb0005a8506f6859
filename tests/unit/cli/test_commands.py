"""Whole command lines against a scripted coordinator: output, error lines, exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli.__main__ import _COMMANDS, run
from specdec.client.endpoints import check_endpoint
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


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["fly"],
        ["generate", "hi", "--mode", "fast"],
        ["generate", "hi", "--logprobs", "2"],
        ["generate", "hi", "--endpoint", "http://127.0.0.1:50051"],
        ["chat", "--endpoint", "localhost"],
        ["status", "--endpoint", "127.0.0.1:0"],
        ["status", "--endpoint", "::1:50051"],
        ["health", "127.0.0.1"],
        ["generate", "hi", "--temperature", "hot"],
        ["generate", "hi", "--max", "7"],
        ["chat", "hi"],
        ["up", "--replicas-target", "0"],
        ["up", "--target", "x", "--replicas-draft", "1"],
        ["up", "--metrics", "nowhere"],
        ["up", "--metrics", "127.0.0.1:65534"],
        ["up", "--max-context-tokens", "0"],
        ["up", "--tenant", "a/b"],
        ["up", "--num-threads-draft", "0"],
        ["up", "--tensor-parallel", "0"],
        ["up", "--log-level", "loud"],
        ["up", "--listen", "nowhere"],
        ["up", "--listen", "127.0.0.1:70000"],
        ["up", "--http", "8000"],
        ["up", "--http", "0.0.0.0:8000"],
        ["health"],
        ["up", "--target", ""],
        ["up", "--draft", ""],
        ["up", "--tokenizer", ""],
        ["bench", "--repeats", "0"],
        ["bench", "--mode", "off"],
        ["bench", "--gamma", "0"],
    ],
    ids=" ".join,
)
def test_a_usage_error_is_one_line_and_exit_code_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args, {}) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.endswith(" (INVALID_REQUEST)\n")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://127.0.0.1:8000", "without http://, got 'http://127.0.0.1:8000'; did you mean 127.0.0.1:8000?"),
        ("https://host/v1", "without https://, got 'https://host/v1'; did you mean host:50051?"),
        ("localhost", "with a port, got 'localhost'; did you mean localhost:50051?"),
    ],
)
def test_a_malformed_endpoint_is_refused_with_a_suggestion(
    endpoint: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "hi"], {"SPECDEC_ENDPOINT": endpoint}) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["[::1]:50051", "a-b.c:1", "ipv4:127.0.0.1:1,127.0.0.1:2", "unix:///tmp/x"])
def test_addresses_and_grpc_targets_are_endpoints(endpoint: str) -> None:
    assert check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize("args", [["generate", "-"], ["generate"]], ids=" ".join)
def test_standard_input_is_a_prompt_to_its_last_byte(
    args: list[str], coordinator: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, environ = coordinator(answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):\n    return\n"))
    assert run(args, environ) == 0
    assert servicer.requests[0].prompt == "def f(x):\n    return\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["generate", "--max-tokens", "3", "hi"],
            "--max-tokens is not a flag of specdec: use --max-new-tokens N; see specdec generate --help",
        ),
        (["generate", "--max-tokens=3", "hi"], "--max-tokens is not a flag of specdec: use --max-new-tokens N"),
        (["up", "--tensor-paralel", "2"], "did you mean --tensor-parallel? See specdec up --help"),
        (["status", "--xyzzy"], "unrecognized argument --xyzzy; see specdec status --help"),
        (["status", "--api-keys", "k"], "--api-keys is not a flag of specdec: keys are a matter of specdec up --http"),
        (["scale", "--api-key", "k", "draft=1"], "--api-key is not a flag of specdec: this command sends no key"),
        (
            ["up", "--parallel", "4"],
            "--parallel is not a flag of specdec: a replica runs all its sessions in one batch",
        ),
        (["up", "--timeline", "FILE"], "--timeline is not a flag of specdec: use --otlp-endpoint URL: traces have"),
        (["serve", "m", "--seed", "1"], "--seed is not a flag of specdec: use --seed with each request"),
        (["generate", "hi", "--max-new-tokens", "0"], "argument --max-new-tokens: must be at least 1, got '0'"),
        (["status", "now"], "unrecognized arguments: now; see specdec status --help"),
    ],
)
def test_a_flag_that_does_not_exist_asks_which_was_meant_and_names_the_right_help(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args, {}) == 2
    assert words in capsys.readouterr().err


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


def drafted(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Two tokens that two pools drafted; target-only, none."""
    is_alone = request.speculation.mode == pb.SPECULATION_MODE_OFF
    chunk = tokens(0, [1, 2, 3], "ttt" if is_alone else "aaa")
    for detail, pool in zip(chunk.tokens.details, ("code", "head", "head"), strict=True):
        detail.draft_pool = "" if is_alone else pool
    return [started(request), chunk, finished(3)]


def test_bench_warms_up_and_runs_every_prompt_with_and_without_speculation_and_deletes_its_sessions(
    coordinator: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    servicer, environ = coordinator(drafted)
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    flags = ["--prompts", str(tmp_path / "prompts.txt"), "--repeats", "2", "--gamma", "3", "--json"]
    assert run(["bench", *flags], environ) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"{number} of 4 pairs" for number in (1, 2, 3, 4)]
    shown = json.loads(captured.out)
    assert (shown["speedup"], shown["num_pairs"]) == (1.0, 4)
    assert shown["speculative"]["acceptance"] == 0.5
    assert shown["by_prompt"] == {"one": 1.0, "two": 1.0}
    assert shown["reason"].startswith("no gain: a round emits ")
    warm_up, requests = servicer.requests[:2], servicer.requests[2:]
    modes = [request.speculation.mode for request in requests]
    assert modes.count(pb.SPECULATION_MODE_OFF) == 4
    assert modes[:4] == [0, pb.SPECULATION_MODE_OFF, pb.SPECULATION_MODE_OFF, 0]
    assert [request.prompt for request in requests] == ["one"] * 2 + ["two"] * 2 + ["one"] * 2 + ["two"] * 2
    assert [request.speculation.mode for request in warm_up] == [0, pb.SPECULATION_MODE_OFF]
    assert len(servicer.deleted) == 10


def test_bench_names_the_pools_whose_draft_tokens_were_kept(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(drafted)
    assert run(["bench", "--repeats", "1"], environ) == 0
    assert "draft tokens kept: 6 of head, 3 of code\n" in capsys.readouterr().out
    assert run(["bench", "--repeats", "1", "--json"], environ) == 0
    assert json.loads(capsys.readouterr().out)["kept_draft_tokens"] == {"head": 6, "code": 3}


@pytest.mark.parametrize(("flags", "temperature"), [([], 0.0), (["--temperature", "0.5"], 0.5)])
def test_bench_is_greedy_unless_told_otherwise(
    flags: list[str], temperature: float, coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(drafted)
    assert run(["bench", "--repeats", "1", *flags], environ) == 0
    assert {request.sampling.temperature for request in servicer.requests} == {temperature}
    assert all(request.sampling.HasField("temperature") for request in servicer.requests)


def test_bench_refuses_a_file_without_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    assert run(["bench", "--prompts", str(tmp_path / "empty.txt")], {}) == 1
    assert "holds no prompt" in capsys.readouterr().err


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


@pytest.mark.parametrize("args", [["status"], ["generate", "hi"], ["doctor"]], ids=lambda args: args[0])
def test_a_key_for_another_machine_needs_tls_or_the_flag_that_allows_plaintext(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*args, "--endpoint", "192.0.2.1:1"], {"SPECDEC_API_KEY": "secret"}) == 2
    err = capsys.readouterr().err
    assert "the way to 192.0.2.1:1 is not encrypted" in err
    assert "--insecure" in err
    assert "secret" not in err


def test_promote_json_is_one_object(coordinator: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    _, environ = coordinator(answer)
    assert run(["promote", "default", "--json"], environ) == 0
    assert json.loads(capsys.readouterr().out) == {"promotion": None}


TARGET_MODELS = [
    pb.TargetModelInfo(fingerprint="abc1", model="/models/old", num_replicas=1, share=0.25),
    pb.TargetModelInfo(fingerprint="abd2", model="/models/new", num_replicas=3, share=0.75),
]


def test_a_target_model_is_promoted_by_the_first_characters_of_its_fingerprint(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    servicer.served.target_models.extend(TARGET_MODELS)
    assert run(["promote", "--target", "abd", "0.5"], environ) == 0
    assert capsys.readouterr().out.splitlines() == [
        "abc1 old: 1 replica, 25% of the new sessions",
        "abd2 new: 3 replicas, 75% of the new sessions",
    ]
    assert run(["promote", "--target", "abc1", "auto", "--json"], environ) == 0
    shown = json.loads(capsys.readouterr().out)["target_models"]
    assert [(model["fingerprint"], model["share"]) for model in shown] == [("abc1", 0.25), ("abd2", 0.75)]
    assert servicer.target_shares == [("abd2", 0.5), ("", 0.0)]
    assert run(["status"], environ) == 0
    assert "abd2 new: 3 replicas, 75% of the new sessions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "promote needs one of POOL and --target FINGERPRINT SHARE"),
        (["pool", "--target", "abc1", "0.5"], 2, "promote needs one of POOL and --target FINGERPRINT SHARE"),
        (["--target", "abc1", "1.5"], 2, "SHARE must be 0 to 1 or auto, got '1.5'"),
        (["--target", "abc1", "nan"], 2, "SHARE must be 0 to 1 or auto, got 'nan'"),
        (["--target", "ab", "1"], 1, "2 target models have a fingerprint that begins with 'ab'; there are abc1 (old)"),
        (["--target", "x", "1"], 1, "no target model has a fingerprint that begins with 'x'; there are abc1 (old)"),
    ],
)
def test_a_promotion_that_names_no_single_model_or_no_share_is_refused_in_one_line(
    args: list[str], code: int, message: str, coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    servicer.served.target_models.extend(TARGET_MODELS)
    assert run(["promote", *args], environ) == code
    assert message in capsys.readouterr().err.splitlines()[0]
    assert servicer.target_shares == []


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


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["up", "--model", "m"], "use --target PATH_OR_HUB_ID"),
        (["up", "-m", "m"], "use --target PATH_OR_HUB_ID"),
        (["up", "--port", "8000"], "use --http HOST:PORT"),
        (["serve", "m", "--host", "0.0.0.0"], "or --listen HOST:PORT for gRPC"),
        (["up", "--tensor-parallel-size", "2"], "use --tensor-parallel N"),
        (["serve", "m", "--max-model-len", "4096"], "use --max-context-tokens N"),
        (["up", "-ngl", "99"], "use --device cuda"),
        (["up", "--draft-model", "m"], "use --draft PATH_OR_HUB_ID"),
        (["up", "--speculative-model", "m"], "use --draft PATH_OR_HUB_ID"),
        (["up", "--num-speculative-tokens", "4"], "use --set target.max_gamma=N"),
        (["generate", "-n", "8", "hi"], "use --max-new-tokens N"),
        (["chat", "--temp", "0"], "use --temperature T"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_flag_of_another_program_gets_the_flag_to_use_here(
    args: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args, {}) == 2
    line = capsys.readouterr().err
    assert hint in line
    assert "did you mean" not in line


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "error: the following arguments are required: COMMAND; see specdec --help (INVALID_REQUEST)\n"),
        (["generat"], "error: 'generat' is not a command of specdec; did you mean generate? See specdec --help "),
        (["timeline", "FILE"], "error: specdec timeline was removed: traces have the times of each round (specdec up "),
        (["serve"], "error: the following arguments are required: MODEL; see specdec serve --help "),
    ],
    ids=["no command", "misspelt command", "removed command", "no model"],
)
def test_a_usage_error_begins_with_the_sentence(
    args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args, {}) == 2
    assert capsys.readouterr().err.startswith(sentence)


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
