"""The constraints of the SDK: what becomes of schemas, patterns and texts, and which values are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import pydantic
import pytest

from specdec import Constraint
from specdec.client.request import GenerateOptions, build_request
from specdec.contract.constraint import MAX_CONSTRAINT_BYTES, ConstraintKind
from specdec.contract.errors import InvalidRequest


class Weather(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    unit: Literal["C", "F"]


def test_a_pydantic_model_is_its_schema_as_a_class_and_as_an_instance() -> None:
    for model in (Weather, Weather(city="Rome", unit="C")):
        constraint = Constraint.json_schema(model)
        assert constraint.kind is ConstraintKind.JSON_SCHEMA
        assert json.loads(constraint.text) == Weather.model_json_schema()


def test_a_schema_is_an_object_its_text_or_a_truth_value() -> None:
    schema: dict[str, Any] = {"enum": ["é", None]}
    assert Constraint.json_schema(schema).text == '{"enum": ["é", null]}'
    assert Constraint.json_schema('{ "type":"string" }').text == '{ "type":"string" }'
    assert Constraint.json_schema(True).text == "true"
    assert Constraint.json_schema(schema, is_lenient=True).is_lenient


def test_a_constraint_reaches_the_request() -> None:
    for constraint in (Constraint.json_schema(Weather, is_lenient=True), Constraint.choice(["yes", "no"])):
        sent = build_request("p", GenerateOptions(constraint=constraint)).constraint
        assert Constraint(ConstraintKind(sent.kind), sent.text, sent.is_lenient) == constraint


@pytest.mark.parametrize(
    ("make", "field", "words"),
    [
        (lambda: Constraint.json_schema(5), "constraint.json_schema", "a pydantic model, got int"),  # type: ignore[arg-type]
        (lambda: Constraint.json_schema(str), "constraint.json_schema", "a pydantic model, got type"),  # type: ignore[arg-type]
        (lambda: Constraint.json_schema({"const": {1}}), "constraint.json_schema", "set is not JSON serializable"),
        (lambda: Constraint.json_schema({"const": float("nan")}), "constraint.json_schema", "not JSON compliant"),
        (lambda: Constraint.choice("yes"), "constraint.choice", "must be a list of texts, got str"),
        (lambda: Constraint.choice([1]), "constraint.choice", "must be text, got int"),  # type: ignore[list-item]
        (lambda: Constraint.regex(b"a"), "constraint.regex", "must be text, got bytes"),  # type: ignore[arg-type]
        (lambda: Constraint.grammar(None), "constraint.grammar", "must be text, got NoneType"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_another_value_is_refused_by_name(make: Callable[[], Constraint], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert refused.value.field == field
    assert words in refused.value.message


def test_an_option_that_is_no_constraint_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"constraint must be a specdec\.Constraint, got dict"):
        build_request("p", GenerateOptions(constraint={"type": "object"}))  # type: ignore[typeddict-item]


def test_a_constraint_that_is_too_large_is_refused_before_it_is_sent() -> None:
    for size, fits in ((MAX_CONSTRAINT_BYTES, True), (MAX_CONSTRAINT_BYTES + 2, False)):
        constraint = Constraint.regex("é" * (size // 2))
        if fits:
            assert build_request("p", GenerateOptions(constraint=constraint)).constraint.text == constraint.text
            continue
        with pytest.raises(InvalidRequest, match=rf"at most {MAX_CONSTRAINT_BYTES} bytes, got {size}") as refused:
            build_request("p", GenerateOptions(constraint=constraint))
        assert (refused.value.field, refused.value.reason) == ("constraint.regex", "CONSTRAINT_INVALID")
