"""Forms of outputs that the official `openai` client demands of `specdec up --http`, and forms that are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.gateway_system import MODEL, System
from tests.support.output_forms import ENOUGH_TOKENS, LENIENT_SCHEMA, WARNINGS, Ticket, Verdict, closing_bias


@pytest.fixture(scope="module")
def demo_client(demo: System) -> Iterator[openai.OpenAI]:
    """A client of the demo pair, whose tokenizer is of bytes."""
    with openai.OpenAI(base_url=demo.base_url, api_key="unused", timeout=240, max_retries=0) as client:
        yield client


def demanded(**options: Any) -> dict[str, Any]:
    """Options of a sampled chat about a module."""
    hello = [{"role": "user", "content": "import os"}]
    return {"model": MODEL, "messages": hello, "max_tokens": ENOUGH_TOKENS, "temperature": 1.0, **options}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_client_parses_a_chat_as_the_pydantic_model_that_it_demands(demo_client: openai.OpenAI, seed: int) -> None:
    whole = demo_client.chat.completions.parse(**demanded(response_format=Ticket, seed=seed))
    choice = whole.choices[0]
    assert isinstance(choice.message.parsed, Ticket)
    assert (choice.finish_reason, choice.message.refusal) == ("stop", None)
    with demo_client.chat.completions.stream(**demanded(response_format=Ticket, seed=seed)) as stream:
        (done,) = [event for event in stream if event.type == "content.done"]
        assert (done.content, done.parsed) == (choice.message.content, choice.message.parsed)
        assert stream.get_final_completion().choices[0].message.parsed == done.parsed


def test_each_of_several_outputs_has_the_form(demo_client: openai.OpenAI) -> None:
    answer = demo_client.chat.completions.parse(**demanded(response_format=Ticket, seed=20, n=3))
    assert len({choice.message.parsed.model_dump_json() for choice in answer.choices if choice.message.parsed}) == 3


def test_a_json_object_is_demanded_without_a_word_about_json(demo: System, demo_client: openai.OpenAI) -> None:
    options = demanded(response_format={"type": "json_object"}, logit_bias=closing_bias(demo.http), seed=1)
    choice = demo_client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content), dict)


def test_a_completion_has_the_form_that_vllm_s_fields_demand(demo_client: openai.OpenAI) -> None:
    for number, fields in enumerate(
        (
            {"structured_outputs": {"regex": "[0-9]{2}-[ab]{3}"}},
            {"guided_regex": "[0-9]{2}-[ab]{3}"},
        )
    ):
        options = {"model": MODEL, "max_tokens": 40, "temperature": 1.0, "seed": number, "extra_body": fields}
        choice = demo_client.completions.create(prompt="import os", **options).choices[0]
        assert re.fullmatch("[0-9]{2}-[ab]{3}", choice.text)
        assert choice.finish_reason == "stop"
        choice = demo_client.chat.completions.create(**demanded(seed=number, extra_body=fields)).choices[0]
        assert re.fullmatch("[0-9]{2}-[ab]{3}", choice.message.content)
    for fields in ({"structured_outputs": {"choice": ["ja", "nein"]}}, {"guided_choice": ["ja", "nein"]}):
        answer = demo_client.chat.completions.create(**demanded(extra_body=fields, n=4))
        assert {choice.message.content for choice in answer.choices} <= {"ja", "nein"}
    for fields in ({"structured_outputs": {"json": LENIENT_SCHEMA["properties"]["answer"]}},
                   {"guided_json": json.dumps(LENIENT_SCHEMA["properties"]["answer"])}):  # fmt: skip
        choice = demo_client.chat.completions.create(**demanded(extra_body=fields)).choices[0]
        assert json.loads(choice.message.content) in ("yes", "no", None)


def test_a_schema_that_is_not_strict_is_followed_as_far_as_possible_and_the_answer_says_what_is_ignored(
    demo_client: openai.OpenAI,
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": LENIENT_SCHEMA}}
    answer = demo_client.chat.completions.create(**demanded(response_format=form))
    assert json.loads(answer.choices[0].message.content)["answer"] in ("yes", "no", None)
    assert answer.specdec == {"constraint_warnings": WARNINGS}
    chunks = list(demo_client.chat.completions.create(**demanded(response_format=form, stream=True, n=2)))
    assert [getattr(chunk, "specdec", None) for chunk in chunks[-2:]] == [None, {"constraint_warnings": WARNINGS}]
    form["json_schema"]["schema"] = Verdict.model_json_schema()  # type: ignore[index]
    assert not hasattr(demo_client.chat.completions.create(**demanded(response_format=form)), "specdec")


def test_a_strict_schema_is_enforced_as_a_whole_or_refused_by_its_field(demo_client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": LENIENT_SCHEMA, "strict": True}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            demo_client.chat.completions.create(**demanded(response_format=form, stream=stream))
        assert (refused.value.param, refused.value.code) == ("response_format.json_schema.schema", "constraint_invalid")
        assert 'Unimplemented keys: ["not"]' in refused.value.message


def test_grammars_are_off_unless_the_coordinator_allows_them(demo_client: openai.OpenAI) -> None:
    for fields, param in (
        ({"guided_grammar": 'start: "a"'}, "guided_grammar"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            demo_client.chat.completions.create(**demanded(extra_body=fields))
        assert (refused.value.param, refused.value.code) == (param, "unsupported")
        assert "--allow-grammars" in refused.value.message


HUGE = {"enum": ["x" * (600 << 10)]}
#: Schemas that cannot be used, with a word of the refusal.
DEEP = json.loads('{"properties": {"a": ' * 100 + "{}" + "}}" * 100)
HOSTILE_SCHEMAS: dict[str, tuple[Any, str]] = {
    "no schema": ({"type": 5}, "type"),
    "an unknown type": ({"type": "word"}, "word"),
    "too deep": (DEEP, "recursion limit exceeded"),
    "too large": (HUGE, "at most 524288 bytes, got"),
    "too large for a message": ({"enum": ["x" * (5 << 20)]}, "at most 524288 bytes, got"),
    "a reference to a URL": ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
    "a reference to nothing": ({"$ref": "#/$defs/nothing"}, "nothing"),
    "endless recursion": ({"$ref": "#"}, ""),
    "a pattern that looks around": ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    "nothing allowed": ({"type": "object", "minProperties": 2, "maxProperties": 1}, "Unsatisfiable"),
    "two that exclude each other": ({"allOf": [{"type": "string"}, {"type": "number"}]}, "incompatible types"),
}


@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_that_cannot_be_used_is_a_400_that_names_the_field(demo_client: openai.OpenAI, strict: bool) -> None:
    for name, (schema, words) in HOSTILE_SCHEMAS.items():
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
        with pytest.raises(openai.BadRequestError) as refused:
            demo_client.chat.completions.create(**demanded(response_format=form))
        told = (name, refused.value.message[:500])
        assert refused.value.param == "response_format.json_schema.schema", told
        assert words in refused.value.message, told
        assert len(refused.value.message) < 1000, told


HOSTILE_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "(("}, "guided_regex"),
    ({"guided_regex": "(" * 2000 + "a" + ")" * 2000}, "guided_regex"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "[^\\s\\S]"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"guided_choice": [str(number) for number in range(10_000)]}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs.regex"),
]


def test_a_form_that_cannot_be_used_is_a_400_that_names_the_field(demo_client: openai.OpenAI) -> None:
    for fields, param in HOSTILE_FORMS:
        with pytest.raises(openai.BadRequestError) as refused:
            demo_client.completions.create(model=MODEL, prompt="import os", extra_body=fields)
        told = (str(fields)[:80], refused.value.message)
        assert (refused.value.param, refused.value.code) == (param, "constraint_invalid"), told
        assert f"{param} " in refused.value.message, told
        assert len(refused.value.message) < 1000, told
