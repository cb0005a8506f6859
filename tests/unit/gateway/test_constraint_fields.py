"""The fields that demand a form of the output become one constraint, or are refused by the name of the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.http_errors import read_validation_error
from gateway.sampling import SamplingFields
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.constraints import StatedConstraint, in_their_words
from gateway.schemas.messages import MessagesRequest
from gateway.schemas.responses import ResponseRequest
from specdec.contract.constraint import ConstraintKind
from specdec.contract.errors import InvalidRequest
from tools.reference.http_api import api_document

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["é", None]}, "b": {"const": None}}}
FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
NULLS = {"type": None, "json_schema": None}
GRAMMAR = 'start: "a"'


def requests(fields: dict[str, Any]) -> list[SamplingFields]:
    """Requests of the routes whose own fields these are."""
    hello = [{"role": "user", "content": "hi"}]
    if "text" in fields:
        return [ResponseRequest(input="hi", **fields)]
    if "output_config" in fields:
        return [MessagesRequest(messages=hello, max_tokens=5, **fields)]  # type: ignore[arg-type]
    return [ChatRequest(messages=hello, **fields), CompletionRequest(prompt="hi", **fields)]  # type: ignore[arg-type]


def openai(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **schema}}}


def is_lenient(fields: dict[str, Any]) -> bool:
    (found,) = {request.constraint() for request in requests(fields)}
    assert found is not None
    assert json.loads(found.text) == SCHEMA
    return found.is_lenient


def test_only_strict_schemas_of_openai_are_enforced_as_a_whole() -> None:
    assert not is_lenient(openai(strict=True))
    assert not is_lenient({"text": {"format": FORM | {"strict": True}}})
    for strict in (False, None):
        assert is_lenient(openai(strict=strict))
        assert is_lenient({"text": {"format": FORM | {"strict": strict}}})


def test_schemas_of_vllm_and_anthropic_are_enforced_as_a_whole() -> None:
    assert not is_lenient({"structured_outputs": {"json": SCHEMA}})
    assert not is_lenient({"guided_json": json.dumps(SCHEMA)})
    assert not is_lenient({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}})


@pytest.mark.parametrize(
    ("fields", "kind", "text", "field"),
    [
        ({"response_format": {"type": "json_object"}}, ConstraintKind.JSON_OBJECT, "", "response_format"),
        ({"text": {"format": {"type": "json_object"}}}, ConstraintKind.JSON_OBJECT, "", "text.format"),
        ({"structured_outputs": {"regex": "a+"}}, ConstraintKind.REGEX, "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["é"]}}, ConstraintKind.CHOICE, '["é"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": GRAMMAR}}, ConstraintKind.GRAMMAR, GRAMMAR, "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, ConstraintKind.JSON_OBJECT, "",
         "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, ConstraintKind.STRUCTURAL_TAG, '{"a": 1}',
         "structured_outputs.structural_tag"),
        ({"guided_regex": "a+"}, ConstraintKind.REGEX, "a+", "guided_regex"),
        ({"guided_choice": ["é"]}, ConstraintKind.CHOICE, '["é"]', "guided_choice"),
        ({"guided_grammar": GRAMMAR}, ConstraintKind.GRAMMAR, GRAMMAR, "guided_grammar"),
    ],
)  # fmt: skip
def test_each_form_is_a_constraint_that_knows_its_field(
    fields: dict[str, Any], kind: ConstraintKind, text: str, field: str
) -> None:
    for request in requests(fields):
        assert request.constraint() == StatedConstraint(kind, text, False, field)
        assert request.options({})["constraint"] == request.constraint()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}, "guided_json": None},
        {"response_format": NULLS, "structured_outputs": {"json": None, "json_object": False}},
        {"response_format": {}, "structured_outputs": {"disable_any_whitespace": False, "structural_tag": None}},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"text": {"format": {"type": None, "schema": None}}},
        {"output_config": {"format": {"type": None}}},
    ],
)
def test_text_and_nulls_demand_nothing(fields: dict[str, Any]) -> None:
    for request in requests(fields):
        assert request.constraint() is None
        assert "constraint" not in request.options({})


@pytest.mark.parametrize(
    "names",
    [
        ("structured_outputs.json", "structured_outputs.regex"),
        ("guided_regex", "guided_choice"),
        ("guided_choice", "structured_outputs.regex"),
        ("structured_outputs.json", "response_format"),
    ],
)
def test_two_constraints_are_refused_with_both_names(names: tuple[str, str]) -> None:
    values = {"json": SCHEMA, "regex": "a", "choice": ["a"], "response_format": {"type": "json_object"}}
    fields: dict[str, Any] = {}
    for name in names:
        outer, _, inner = name.rpartition(".")
        place = fields.setdefault(outer, {}) if outer else fields
        place[inner] = values[inner.removeprefix("guided_")]
    for request in requests(fields):
        with pytest.raises(InvalidRequest) as refused:
            request.options({})
        assert refused.value.field in names
        assert all(name in refused.value.message for name in names)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"response_format": {"type": "grammar"}}, "response_format.type", "must be 'text', 'json_object' or"),
        ({"response_format": {"json_schema": {"schema": {}}}}, "response_format.type", "is required"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "the type json_schema needs json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format",
         "json_schema needs the type json_schema, got text"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "is not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "is required"),
        (openai(schema=None), "response_format.json_schema.schema", "is required"),
        (openai(schema=[]), "response_format.json_schema.schema", "must be a valid dictionary"),
        (openai(strict="yes"), "response_format.json_schema.strict", "must be a valid boolean"),
        (openai(lenient=True), "response_format.json_schema.lenient", "is not supported"),
        ({"structured_outputs": {"structural_tag": 5}}, "structured_outputs.structural_tag", "must be"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern",
         "is not supported"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice", "must be a valid list"),
        ({"structured_outputs": {str(number): 1 for number in range(10_000)}}, "structured_outputs",
         "is not supported"),
        ({"guided_json": 5}, "guided_json", "must be"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "needs schema"),
        ({"text": {"format": FORM | {"json_schema": {}}}}, "text.format.json_schema", "is not supported"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type", "must be 'json_schema'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "is required"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_read_is_refused_by_its_field(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        requests(fields)
    assert refused.value.error_count() <= 2
    errors = [{**error, "loc": ("body", *error["loc"])} for error in refused.value.errors()]
    told = read_validation_error(errors, "application/json")
    assert told.field == field
    assert told.message.startswith(field)
    assert words in told.message


def test_a_schema_that_json_cannot_spell_is_refused_by_its_field() -> None:
    for request in requests(openai(schema={"const": float("nan")})):
        with pytest.raises(InvalidRequest, match=r"response_format\.json_schema\.schema cannot be written") as refused:
            request.options({})
        assert refused.value.field == "response_format.json_schema.schema"


def test_only_errors_of_the_constraint_get_the_name_of_its_field() -> None:
    for field, problem, told in (
        ("constraint.regex", " cannot be followed", "guided_regex cannot be followed"),
        ("constraint", ": the model has no end token", "guided_regex: the model has no end token"),
        ("constraints", " x", "constraints x"),
        ("prompt", " is empty", "prompt is empty"),
        ("", "too late", "too late"),
    ):
        error = in_their_words(InvalidRequest(field + problem, field=field), "guided_regex")
        assert error.message == told
        assert error.field == ("guided_regex" if told.startswith("guided_regex") else field)


def test_the_openapi_document_describes_every_field_of_a_form() -> None:
    schemas = api_document()["components"]["schemas"]
    for route in ("ChatRequest", "CompletionRequest"):
        assert {"response_format", "structured_outputs", "guided_json"} <= schemas[route]["properties"].keys()
    assert "text" in schemas["ResponseRequest"]["properties"]
    assert "output_config" in schemas["MessagesRequest"]["properties"]
    for name in ("ResponseFormat", "JsonSchema", "StructuredOutputs", "TextFormat", "JsonOutputFormat", "ResponseText"):
        assert schemas[name]["description"]
        assert all(field["description"] for field in schemas[name]["properties"].values())
