"""Command lines that cannot run are refused in one line with exit code 2, which says what to write instead."""

from __future__ import annotations

import pytest

from specdec.cli.__main__ import run
from specdec.client.endpoints import check_endpoint


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


@pytest.mark.parametrize("args", [["status"], ["generate", "hi"], ["doctor"]], ids=lambda args: args[0])
def test_a_key_for_another_machine_needs_tls_or_the_flag_that_allows_plaintext(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*args, "--endpoint", "192.0.2.1:1"], {"SPECDEC_API_KEY": "secret"}) == 2
    err = capsys.readouterr().err
    assert "the way to 192.0.2.1:1 is not encrypted" in err
    assert "--insecure" in err
    assert "secret" not in err


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
        (["serve", "m", "--lora-modules", "sql=PATH"], "use --backend vllm --backend-url URL in front of a server"),
        (["generate", "-n", "8", "hi"], "use --max-new-tokens N"),
        (["generate", "--model", "sql", "hi"], "use --adapter NAME"),
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
