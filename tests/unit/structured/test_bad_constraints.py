"""A constraint is kept or refused by name, never ignored: bad texts, bombs, and what llguidance passes over."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from specdec.contract.constraint import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from specdec.contract.errors import InvalidRequest
from specdec.structured.admission import check_constraint
from specdec.structured.grammar import MAX_CHOICES, check_text
from specdec.structured.matcher import Matcher, is_legal
from specdec.structured.token_table import TokenTable
from tests.support.byte_tokenizer import EOS, ids_of


def schema(value: Any, *, is_lenient: bool = False) -> Constraint:
    text = value if isinstance(value, str) else json.dumps(value)
    return Constraint(ConstraintKind.JSON_SCHEMA, text, is_lenient)


def choice(text: str) -> Constraint:
    return Constraint(ConstraintKind.CHOICE, text)


def admit(table: TokenTable, constraint: Constraint) -> None:
    """Check a constraint as coordinators do."""
    check_text(constraint)
    check_constraint(table, constraint, (EOS,))


def allows(table: TokenTable, constraint: Constraint, text: str) -> bool:
    """Return whether an output may be this text, in the longest tokens that spell it."""
    token_ids = ids_of(text)
    masks = Matcher(table, constraint).legal_along(token_ids, (EOS,)).masks
    return len(masks) == len(token_ids) + 1 and is_legal(masks[-1], EOS)


SELF = {"$ref": "#"}
ENDLESS = {"type": "object", "properties": {"a": SELF}, "required": ["a"]}
#: Constraints with the message that refuses each.
REFUSED = {
    "text that is no JSON": (schema("{"), "must be JSON: "),
    "a list for a schema": (schema("[]"), "must be a JSON schema, which is an object, got list"),
    "a number for a schema": (schema("1"), "must be a JSON schema, which is an object, got int"),
    "no text": (schema(""), "must not be empty"),
    "4 MB": (schema({"const": "a" * (4 << 20)}), f"must be at most {MAX_CONSTRAINT_BYTES} bytes, got "),
    "NUL": (schema('{"const":"\0"}'), "must not contain NUL characters"),
    "an escaped NUL": (schema({"enum": ["a", {"b": ["\0"]}]}), r"at #/enum: outputs cannot spell .* U\+0000"),
    "a half of a surrogate pair": (schema({"const": "\ud800"}), "cannot be read: "),
    "NaN": (schema({"minimum": float("nan")}), "cannot be read: "),
    "a number beyond float64": (schema({"maximum": 10**400}), "cannot be read: "),
    "a number of 5,000 digits": (schema('{"const":' + "1" * 5000 + "}"), "must be JSON: "),
    "100,000 brackets": (schema("[" * 100_000), "must be JSON: "),
    "3,000 levels": (schema('{"items":' * 3000 + "{}" + "}" * 3000), "must be JSON: "),
    "600 levels": (schema('{"items":' * 600 + "{}" + "}" * 600), "cannot be read: "),
    "a schema that is its own": (schema(SELF), "is recursive without end"),
    "two schemas that are each other": (
        schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        "is recursive without end",
    ),
    "a property that needs itself": (schema(ENDLESS), "is recursive without end"),
    "an item that needs itself": (schema({"type": "array", "items": SELF, "minItems": 1}), "is recursive without end"),
    "alternatives that all need themselves": (
        schema({"anyOf": [ENDLESS, {"type": "array", "prefixItems": [SELF], "minItems": 1}]}),
        "is recursive without end",
    ),
    "some property that needs itself": (
        schema({"type": "object", "additionalProperties": SELF, "minProperties": 1}),
        "is recursive without end",
    ),
    "a reference to another host": (schema({"$ref": "http://example.com/schema"}), "Resource 'http://example.com/"),
    "a reference to a file": (schema({"$ref": "file:///etc/passwd"}), "Resource 'file:///etc/passwd'"),
    "a reference to nothing": (schema({"$ref": "#/$defs/a"}), "cannot be followed"),
    "a schema that allows nothing": (schema("false"), "cannot be followed"),
    "an enumeration of nothing": (schema({"enum": []}), "cannot be followed: Unsatisfiable schema"),
    "a range that is empty": (schema({"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable schema"),
    "a regular expression that allows nothing": (Constraint.regex(r"a[^\s\S]"), "allow no next token"),
    "a regular expression that does not end": (Constraint.regex("(a"), "unclosed group"),
    "a reference to a group": (Constraint.regex(r"(a)\1"), "backreferences are not supported"),
    "a look ahead": (Constraint.regex("(?=a)a"), "look-around"),
    "5,000 groups": (Constraint.regex("(" * 5000 + "a" + ")" * 5000), "cannot be followed"),
    "a grammar with an unknown rule": (Constraint.grammar("start: foo"), 'unknown name: "foo"'),
    "a grammar without a beginning": (Constraint.grammar('foo: "a"'), "cannot be read"),
    "a grammar that loosens its schemas": (
        Constraint.grammar('start: %json {"x-guidance": {"lenient": true}, "not": {}}'),
        "must not set x-guidance",
    ),
    "a grammar that loosens its schemas by an escaped name": (
        Constraint.grammar('start: %json {"x-\\u0067uidance": {"lenient": true}, "not": {}}'),
        "must not set x-guidance",
    ),
    "a grammar with a schema whose keyword is passed over": (
        Constraint.grammar('start: "a" %json {"type": "string", "contentEncoding": "base64"}'), "#/contentEncoding",
    ),
    "a choice with NUL": (Constraint.choice(["a\0"]), "must not contain NUL characters"),
    "a choice of nothing": (Constraint.choice([]), f"must hold 1 to {MAX_CHOICES} texts, got 0"),
    "a choice of 10,000": (Constraint.choice(["a"] * 10_000), f"must hold 1 to {MAX_CHOICES} texts, got 10000"),
    "a choice of numbers": (choice("[1]"), "must be a list of texts that are not empty"),
    "a choice of an empty text": (Constraint.choice(["a", ""]), "must be a list of texts that are not empty"),
    "a choice that is no list": (choice('"a"'), "must be a list of texts that are not empty"),
    "a choice of a half of a surrogate pair": (choice('["\\ud800"]'), "must not contain halves of surrogate pairs"),
    "a choice that no token begins": (Constraint.choice(["xyz"]), "allow no next token"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_constraint_is_refused_with_field_and_reason(name: str, table: TokenTable) -> None:
    constraint, message = REFUSED[name]
    with pytest.raises(InvalidRequest, match=message) as at:
        admit(table, constraint)
    assert at.value.reason in ("CONSTRAINT_INVALID", "NO_LEGAL_TOKEN")
    assert at.value.field == f"constraint.{constraint.kind.name.lower()}"
    assert str(at.value).startswith(at.value.field)
    assert len(str(at.value)) < 700


#: Schemas with a restriction that is not enforced, where it is, and an output that would break it.
PASSED_OVER = {
    "not": ({"not": {"type": "string"}}, "not", '"a"'),
    "if": ({"if": {"type": "string"}, "then": {"const": "b"}}, "if", '"a"'),
    "then": ({"then": {"const": "b"}}, "then", '"a"'),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems", "[1,1]"),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, "contains", '["a"]'),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a$"}}, "propertyNames", '{"b":1}'),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", '{"a":1}'),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies", '{"a":1}'),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties", '{"b":1}'),
    "a format of texts": ({"type": "string", "format": "iri"}, "format: iri", '"b"'),
    "a format of numbers": ({"type": "integer", "format": "uint16"}, "#/format: the format 'uint16'", "2"),
    "contentEncoding": ({"type": "string", "contentEncoding": "base64"}, "#/contentEncoding", '"a"'),
    "contentMediaType": ({"type": "string", "contentMediaType": "application/json"}, "#/contentMediaType", '"a"'),
    "divisibleBy of draft 3": ({"type": "integer", "divisibleBy": 2}, "#/divisibleBy", "1"),
    "disallow of draft 3": ({"disallow": "string"}, "#/disallow", '"a"'),
    "extends of draft 3": ({"extends": {"type": "integer"}}, "#/extends", '"a"'),
    "required of draft 3": (
        {"type": "object", "properties": {"a": {"type": "integer", "required": True}}}, "#/properties/a/required", "{}",
    ),
    "nullable of OpenAPI": ({"anyOf": [{"type": "integer", "nullable": True}]}, "#/anyOf/0/nullable", None),
    "a keyword in lower case": ({"items": {"maxlength": 1}}, "#/items/maxlength: .*write maxLength", '["ab"]'),
    "a keyword in a definition": (
        {"$defs": {"a/b": {"extends": {}}}, "type": "integer"}, "#/\\$defs/a~1b/extends", None,
    ),
    "a nested class": ({"type": "string", "pattern": "^[[:alpha:]]$"}, r"#/pattern: \[ within brackets", None),
    "an operation on sets": ({"type": "string", "pattern": r"^\[[a-c--b]$"}, "#/pattern: -- within brackets", None),
    "an empty class": ({"type": "string", "pattern": "^[]a]$"}, r"#/pattern: the class \[\]", None),
    "a class in names": ({"patternProperties": {"[a&&b]": {}}}, "#/patternProperties: && within", None),
    "names that may repeat": ({"type": "object", "minProperties": 2}, "#/minProperties", '{"a":1,"a":2}'),
    "alternatives that overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", None),
}  # fmt: skip


def test_a_format_that_is_not_defined_restricts_nothing_and_is_told(table: TokenTable) -> None:
    constraint = Constraint.json_schema({"type": "object", "properties": {"a": {"type": "string", "format": "topic"}}})
    (warning,) = check_constraint(table, constraint, (EOS,))
    assert warning.startswith("#/properties/a/format: the format 'topic'")


@pytest.mark.parametrize("name", PASSED_OVER)
def test_a_restriction_that_is_not_enforced_is_refused_by_name(name: str, table: TokenTable) -> None:
    stated, message, _ = PASSED_OVER[name]
    with pytest.raises(InvalidRequest, match=message) as at:
        admit(table, schema(stated))
    assert (at.value.reason, at.value.field) == ("CONSTRAINT_INVALID", "constraint.json_schema")


@pytest.mark.parametrize("name", [name for name, (*_, broken) in PASSED_OVER.items() if broken is not None])
def test_a_lenient_schema_passes_over_what_is_not_enforced(name: str, table: TokenTable) -> None:
    stated, _, broken = PASSED_OVER[name]
    assert broken is not None
    constraint = schema(stated, is_lenient=True)
    admit(table, constraint)
    assert allows(table, constraint, broken)


@pytest.mark.parametrize("constraint", [schema(ENDLESS, is_lenient=True), schema({"const": "\1"}, is_lenient=True)])
def test_a_lenient_schema_that_no_output_satisfies_is_refused(constraint: Constraint, table: TokenTable) -> None:
    with pytest.raises(InvalidRequest, match=r"recursive without end|cannot spell"):
        admit(table, constraint)


#: Schemas with keywords that restrict nothing, or whose restriction is kept; an output that is valid, and one not.
KEPT: dict[str, tuple[Any, str, str]] = {
    "annotations": (
        {"title": "A", "description": "b", "default": "x", "examples": [1], "$comment": "c", "deprecated": True,
         "readOnly": True, "x-order": 1, "discriminator": {"propertyName": "a"}, "type": "integer"},
        "1", '"a"',
    ),
    "names of keywords as names of properties": (
        {"type": "object", "properties": {"contentEncoding": {"type": "integer"}, "a": {"const": {"extends": 1}}},
         "additionalProperties": False},
        "{}", '{"a":1}',
    ),
    "options of the library": ({"x-guidance": {"lenient": True, "whitespace_pattern": "a*"}, "type": "array"},
                               "[1]", "[a1]"),
    "an optional property that is the schema": (
        {"type": "object", "properties": {"a": SELF}, "additionalProperties": False}, '{"a":{"a":{}}}', '{"a":1}',
    ),
    "an alternative that ends": ({"anyOf": [{"type": "integer"}, {"type": "array", "items": SELF, "minItems": 1}]},
                                 "[[1],2]", "[]"),
    "int32": ({"type": "integer", "format": "int32", "maximum": 12}, "12", "21"),
    "int64 beyond its range": ({"type": "integer", "format": "int64"}, "1" * 18, "1" * 20),
    "double": ({"type": "number", "format": "double"}, "12", '"1"'),
    "a format of texts on a number": ({"type": "integer", "format": "date"}, "1", '"a"'),
    "both length and pattern": ({"type": "string", "minLength": 2, "pattern": "^a*$"}, '"aa"', '"a"'),
    "bounds of draft 4": ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "2", "1"),
    "items of draft 4": ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, "[1]", "[1,1]"),
    "siblings of a reference": (
        {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 1}, '"a"', '"ab"',
    ),
    "an escaped bracket in a class": ({"type": "string", "pattern": r"^[\[a]$"}, '"["', '"b"'),
    "a range up to a bracket": ({"type": "string", "pattern": r"^[a-c\-][^\]]$"}, '"ab"', '"a]"'),
    "a required name and one more": ({"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 2},
                                     '{"a":1,"b":2}', '{"a":1}'),
    "true": (True, "[1]", "]"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_restriction_that_is_enforced_is_kept_and_an_annotation_restricts_nothing(
    name: str, table: TokenTable
) -> None:
    stated, valid, invalid = KEPT[name]
    constraint = schema(json.dumps(stated))
    admit(table, constraint)
    assert allows(table, constraint, valid)
    assert not allows(table, constraint, invalid)


def test_a_choice_is_one_of_its_texts_whatever_characters_they_have(table: TokenTable) -> None:
    texts = ["a", "ab", 'a"', "[a]", "{1,2}", "é", "1 ", "a:b", "\x01", "\u2028", "a|b", ".", "\\"]
    constraint = Constraint.choice(texts)
    admit(table, constraint)
    for text in ("a", "ab", 'a"', "[a]", "{1,2}", "é", "1 ", "a:b"):
        assert allows(table, constraint, text)
    for text in ("b", "c", "aa", "[b]", "1", "abc"):
        assert not allows(table, constraint, text)


def followed(table: TokenTable, constraint: Constraint, text: str) -> str:
    """Return the name of what refuses the constraint or its masks along a text; "" if they go as far as the text."""
    matcher, output = Matcher(table, constraint), list[int]()
    for token_id in ids_of(text):
        try:
            if not is_legal(matcher.mask((EOS,)), token_id):
                return ""
            output.append(token_id)
            matcher.align(np.array(output, dtype=np.uint32))
        except InvalidRequest as error:
            return error.reason
    return ""


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a{0,1000}){0,1000}", "a" * 40),
        ("(.*a){30}b", "ab" * 20),
        ("(a|b)*a(a|b){25}", "ab" * 20),
        ("((a*)*)*b", "a" * 40 + "b"),
        ("(a|aa|ab)+b{0,9999}", "ab" * 20),
    ],
)
def test_a_regular_expression_that_would_be_a_bomb_elsewhere_is_followed(
    pattern: str, text: str, table: TokenTable
) -> None:
    """Here its states are computed as they are reached. What exceeds a limit of the library ends by name."""
    admit(table, Constraint.regex(pattern))
    assert followed(table, Constraint.regex(pattern), text) == ""


def test_a_grammar_that_exceeds_a_limit_of_the_library_ends_by_name(table: TokenTable) -> None:
    """Its rule calls itself for ever, after a token that a mask allows."""
    constraint = Constraint.grammar('start: "a" start')
    admit(table, constraint)
    assert followed(table, constraint, "aa") == "CONSTRAINT_INVALID"
