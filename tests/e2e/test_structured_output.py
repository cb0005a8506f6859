"""Constraints of the Python SDK and `specdec generate` on the demo pair: forms, warnings, resumption and refusals."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.systems.models import DEMO
from specdec import AsyncClient, Client, Constraint
from specdec.contract.errors import InvalidRequest, NotFound, Unsupported
from tests.support.gateway_system import System, start_system
from tests.support.output_forms import ENOUGH_TOKENS, LENIENT_SCHEMA, WARNINGS, Ticket
from tests.support.up_rig import specdec

PROMPT = "import os"
OPTIONS: dict[str, Any] = {"max_new_tokens": ENOUGH_TOKENS, "seed": 3}


@pytest.fixture(scope="module")
def client(demo: System) -> Iterator[Client]:
    with Client(demo.grpc) as client:
        yield client


def test_both_clients_give_json_of_a_pydantic_model(demo: System, client: Client) -> None:
    constraint = Constraint.json_schema(Ticket)
    answer = client.generate(PROMPT, constraint=constraint, **OPTIONS)
    assert Ticket.model_validate_json(answer.text)
    assert (answer.finish_reason, answer.constraint_warnings) == ("stop", ())
    assert "constraint_warnings" not in answer.to_dict()

    async def text() -> str:
        async with AsyncClient(demo.grpc) as other:
            return (await other.generate(PROMPT, constraint=constraint, **OPTIONS)).text

    assert asyncio.run(text()) == answer.text


@pytest.mark.parametrize("mode", ["off", "rejection", "block", "coupled"])
def test_every_mode_keeps_to_the_form(client: Client, mode: str) -> None:
    for constraint, pattern in (
        (Constraint.regex("[0-9]{3}-[ab]{2}"), "[0-9]{3}-[ab]{2}"),
        (Constraint.choice(["draft", "target", "é"]), "draft|target|é"),
    ):
        answer = client.generate(PROMPT, constraint=constraint, mode=mode, **OPTIONS)
        assert re.fullmatch(pattern, answer.text)
        assert answer.finish_reason == "stop"


def test_a_lenient_schema_tells_what_it_ignores_again_after_a_resumption(client: Client) -> None:
    lenient = Constraint.json_schema(LENIENT_SCHEMA, is_lenient=True)
    with client.generate(PROMPT, constraint=lenient, stream=True, **OPTIONS) as stream:
        next(stream)
        assert stream.constraint_warnings == tuple(WARNINGS)
        whole = stream.result()
    assert json.loads(whole.text)["answer"] in ("yes", "no", None)
    assert (whole.constraint_warnings, whole.to_dict()["constraint_warnings"]) == (tuple(WARNINGS), WARNINGS)
    with client.resume(whole.session_id, 0) as resumed:
        again = resumed.result()
    assert (again.text, again.constraint_warnings) == (whole.text, whole.constraint_warnings)


def test_a_refused_constraint_begins_no_session(client: Client) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.generate(PROMPT, constraint=Constraint.json_schema(LENIENT_SCHEMA), session_id="refused")
    assert (refused.value.reason, refused.value.field) == ("CONSTRAINT_INVALID", "constraint.json_schema")
    with pytest.raises(NotFound):
        client.get_session("refused")


def test_grammars_are_accepted_only_by_a_coordinator_that_allows_them(client: Client) -> None:
    grammar = Constraint.grammar('start: "a" | "b" start')
    with pytest.raises(Unsupported, match=r"constraint\.grammar is not accepted.*--allow-grammars"):
        client.generate(PROMPT, constraint=grammar)
    open_system = start_system("--target", str(DEMO / "target"), "--draft", "ngram", "--allow-grammars")
    try:
        with Client(open_system.grpc) as other:
            assert re.fullmatch("b*a", other.generate(PROMPT, constraint=grammar, seed=1, temperature=0.5).text)
    finally:
        open_system.process.send_signal(signal.SIGTERM)
        open_system.process.communicate()


def generated(demo: System, *flags: str) -> Any:
    result = specdec("generate", PROMPT, "--seed", "3", "--json", *flags, SPECDEC_ENDPOINT=demo.grpc)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_command_line_generates_json_of_a_schema_in_a_file_text_of_a_pattern_and_choices(
    demo: System, tmp_path: Path
) -> None:
    schema = tmp_path / "ticket.json"
    schema.write_text(json.dumps(Ticket.model_json_schema()))
    flags = ("--json-schema", str(schema), "--max-new-tokens", str(ENOUGH_TOKENS))
    assert Ticket.model_validate_json(generated(demo, *flags)["text"])
    assert re.fullmatch("[ab]{4}", generated(demo, "--regex", "[ab]{4}")["text"])
    assert generated(demo, "--choice", "draft", "--choice", "target")["text"] in ("draft", "target")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read {path}: No such file or directory"),
        (b"{", "{path} is not JSON in UTF-8: "),
        (b'"\xff"', "{path} is not JSON in UTF-8: "),
        (b"[1]", "{path} must hold a JSON schema, which is an object, got list"),
    ],
)
def test_a_schema_file_that_cannot_be_used_is_one_line_and_exit_code_2(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "schema.json"
    if content is not None:
        path.write_bytes(content)
    result = specdec("generate", PROMPT, "--json-schema", str(path))
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"error: .+ \(INVALID_REQUEST\)\n", result.stderr)
    assert words.format(path=path) in result.stderr


def test_two_constraints_on_the_command_line_are_refused_with_both_names() -> None:
    result = specdec("generate", PROMPT, "--regex", "a", "--choice", "a")
    assert result.returncode == 2
    assert "--choice: not allowed with argument --regex" in result.stderr


def test_a_refused_schema_is_one_line_with_its_reason(demo: System, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(LENIENT_SCHEMA))
    result = specdec("generate", PROMPT, "--json-schema", str(path), SPECDEC_ENDPOINT=demo.grpc)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(
        r'error: constraint\.json_schema cannot be followed: Unimplemented keys: \["not"\] \(CONSTRAINT_INVALID\)\n',
        result.stderr,
    )
