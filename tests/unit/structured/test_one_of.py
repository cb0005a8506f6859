"""Alternatives that exclude each other: `anyOf` allows the same values as `oneOf`, as jsonschema-rs judges them."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import jsonschema_rs
import pytest

from specdec.structured.json_schema import prepare

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
BIRD = {"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"]}
OPTIONAL_KIND = {"type": "object", "properties": {"kind": {"const": "cat"}}}

EXCLUSIVE: list[dict[str, Any]] = [
    {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    {"oneOf": [{"const": 1}, {"const": 2}, {"enum": ["1", None]}]},
    {"oneOf": [CAT, DOG]},
    {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "oneOf": [{"const": "a"}, {"type": "null"}]},
    {"type": "object", "properties": {"pet": {"oneOf": [CAT, DOG]}}},
]
NOT_EXCLUSIVE: list[dict[str, Any]] = [
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
    {"oneOf": [{"type": "string"}, {"maxLength": 3}]},
    {"oneOf": [CAT, BIRD]},
    {"oneOf": [DOG, OPTIONAL_KIND]},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "string"}], "$defs": {"a": {"$ref": "#/$defs/a"}}},
]
_SCALARS: list[Any] = [None, True, 1, 1.0, 2, 2.5, "", "a", "1", "long text", [], {}]
_PETS: list[Any] = [
    {name: value for name, value in zip(("kind", "lives"), values, strict=True) if value is not ...}
    for values in product(("cat", "dog", "wolf", "newt", 1, ...), (9, "nine", ...))
]
VALUES = [*_SCALARS, *_PETS, *({"pet": pet} for pet in _PETS)]


@pytest.mark.parametrize("schema", EXCLUSIVE)
def test_exclusive_alternatives_allow_the_same_values_as_before(schema: dict[str, Any]) -> None:
    prepared = copy.deepcopy(schema)
    prepare(prepared)
    assert "oneOf" not in str(prepared)
    judged = [jsonschema_rs.is_valid(schema, value) for value in VALUES]
    assert [jsonschema_rs.is_valid(prepared, value) for value in VALUES] == judged
    assert any(judged), "no value is valid, so the test shows nothing"


@pytest.mark.parametrize("schema", NOT_EXCLUSIVE)
def test_alternatives_that_may_overlap_stay_as_they_are(schema: dict[str, Any]) -> None:
    prepared = copy.deepcopy(schema)
    prepare(prepared)
    assert prepared == schema


def test_alternatives_with_hours_of_comparisons_stay_as_they_are() -> None:
    names = [f"a{number}" for number in range(60)]
    nested = {"type": "object", "properties": {name: {"$ref": "#/$defs/nested"} for name in names}, "required": names}
    schema = {"$defs": {"nested": nested}, "oneOf": [{"$ref": "#/$defs/nested"}] * 30}
    prepared = copy.deepcopy(schema)
    prepare(prepared)
    assert prepared == schema


def test_thousands_of_values_are_exclusive() -> None:
    schema: dict[str, Any] = {"oneOf": [{"const": number} for number in range(5000)]}
    prepare(schema)
    assert len(schema["anyOf"]) == 5000
