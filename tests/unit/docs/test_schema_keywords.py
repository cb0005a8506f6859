"""The guide says what a JSON schema may hold; each keyword does so, whether it is enforced, refused or ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.systems.models import DEMO
from specdec.checkpoints.vocabulary import load_tokenizer, vocabulary_size
from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest
from specdec.structured.matcher import Matcher
from specdec.structured.token_table import TokenTable

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "structured-output.md"
OBJECT, ARRAY, TEXT, NUMBER = ({"type": name} for name in ("object", "array", "string", "number"))

#: Of each enforced keyword: a schema, a text that it allows and one that it forbids.
ENFORCED: dict[str, tuple[dict[str, Any], str, str]] = {
    "type": ({"type": ["string", "null"]}, "null", "5"),
    "enum": ({"enum": ["a", None]}, "null", '"b"'),
    "const": ({"const": {"a": 1}}, '{"a":1}', '{"a":2}'),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, '"a"', "5"),
    "$defs": ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": TEXT}, **ARRAY}, '["a"]', "[5]"),
    "anyOf": ({"anyOf": [TEXT, ARRAY]}, "[]", "{}"),
    "allOf": ({"allOf": [TEXT, {"maxLength": 1}]}, '"a"', '"ab"'),
    "oneOf": ({"oneOf": [TEXT, ARRAY]}, "[]", "{}"),
    "properties": ({"properties": {"a": TEXT}, **OBJECT}, '{"a":"b"}', '{"a":5}'),
    "required": ({"required": ["a"], **OBJECT}, '{"a":5}', "{}"),
    "additionalProperties": ({"additionalProperties": False, **OBJECT}, "{}", '{"a":5}'),
    "patternProperties": ({"patternProperties": {"^a": TEXT}, **OBJECT}, '{"ab":"b"}', '{"ab":5}'),
    "minProperties": ({"minProperties": 1, **OBJECT}, '{"a":5}', "{}"),
    "maxProperties": ({"maxProperties": 1, **OBJECT}, '{"a":5}', '{"a":5,"b":5}'),
    "items": ({"items": TEXT, **ARRAY}, '["a"]', "[5]"),
    "prefixItems": ({"prefixItems": [TEXT], **ARRAY}, '["a",5]', "[5]"),
    "minItems": ({"minItems": 1, **ARRAY}, "[5]", "[]"),
    "maxItems": ({"maxItems": 1, **ARRAY}, "[5]", "[5,5]"),
    "minLength": ({"minLength": 1, **TEXT}, '"é"', '""'),
    "maxLength": ({"maxLength": 1, **TEXT}, '"é"', '"ab"'),
    "pattern": ({"pattern": "^a.?$", **TEXT}, '"ab"', '"b"'),
    "date-time": ({"format": "date-time", **TEXT}, '"2026-01-02T03:04:05Z"', '"2026"'),
    "date": ({"format": "date", **TEXT}, '"2026-01-02"', '"2026"'),
    "time": ({"format": "time", **TEXT}, '"03:04:05Z"', '"3"'),
    "duration": ({"format": "duration", **TEXT}, '"P3D"', '"3"'),
    "uuid": ({"format": "uuid", **TEXT}, '"00000000-0000-4000-8000-000000000000"', '"0"'),
    "email": ({"format": "email", **TEXT}, '"a@example.com"', '"a"'),
    "hostname": ({"format": "hostname", **TEXT}, '"a.b"', '"a b"'),
    "ipv4": ({"format": "ipv4", **TEXT}, '"127.0.0.1"', '"127.0.0"'),
    "ipv6": ({"format": "ipv6", **TEXT}, '"::1"', '"1"'),
    "uri": ({"format": "uri", **TEXT}, '"https://a.b/c"', '"a b"'),
    "minimum": ({"minimum": 3, "type": "integer"}, "3", "2"),
    "maximum": ({"maximum": 3, "type": "integer"}, "3", "4"),
    "exclusiveMinimum": ({"exclusiveMinimum": 3, "type": "integer"}, "4", "3"),
    "exclusiveMaximum": ({"exclusiveMaximum": 3, "type": "integer"}, "2", "3"),
    "multipleOf": ({"multipleOf": 3, "type": "integer"}, "6", "5"),
}
#: A schema with each keyword that is refused, or ignored with a warning.
REFUSED: dict[str, dict[str, Any]] = {
    "$dynamicRef": {"$dynamicRef": "#a"},
    "not": {"not": TEXT},
    "if": {"if": TEXT},
    "oneOf": {"oneOf": [TEXT, {"maxLength": 3, **TEXT}]},
    "propertyNames": {"propertyNames": TEXT, **OBJECT},
    "unevaluatedProperties": {"unevaluatedProperties": False, **OBJECT},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}, **OBJECT},
    "dependentSchemas": {"dependentSchemas": {"a": OBJECT}, **OBJECT},
    "uniqueItems": {"uniqueItems": True, **ARRAY},
    "contains": {"contains": TEXT, **ARRAY},
    "unevaluatedItems": {"unevaluatedItems": False, **ARRAY},
    "other formats": {"format": "json-pointer", **TEXT},
}


@pytest.fixture(scope="module")
def table() -> TokenTable:
    tokenizer = load_tokenizer(str(DEMO / "target"))
    return TokenTable(tokenizer, (int(tokenizer.eos_token_id),), vocabulary_size(tokenizer.get_vocab()))  # type: ignore[arg-type]


def matches(table: TokenTable, schema: dict[str, Any], text: str) -> bool:
    """Return whether a whole text is one that the schema allows."""
    matcher = Matcher(table, Constraint.json_schema(schema))
    token_ids = table.library_table().tokenize_str(text)
    try:
        matcher.align(np.asarray(token_ids, dtype=np.uint32))
    except InvalidRequest:
        return False
    return matcher.is_complete


def test_the_guide_lists_the_keywords_of_these_tables() -> None:
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|([^|]*)\|$", PAGE.read_text().partition("## What a schema")[2], re.MULTILINE)
    enforced, refused = ({word for row in rows for word in re.findall(r"`([^`]+)`", row[side])} for side in (0, 1))
    assert enforced - {"format"} == {*ENFORCED}
    assert refused - {"anyOf"} == {*REFUSED} - {"other formats"}


@pytest.mark.parametrize("keyword", ENFORCED)
def test_an_enforced_keyword_decides_which_texts_are_allowed(table: TokenTable, keyword: str) -> None:
    schema, allowed, forbidden = ENFORCED[keyword]
    assert matches(table, schema, allowed), json.dumps(schema)
    assert not matches(table, schema, forbidden), json.dumps(schema)


@pytest.mark.parametrize("keyword", REFUSED)
def test_another_keyword_is_refused_by_name_or_ignored_with_a_warning(table: TokenTable, keyword: str) -> None:
    name = "json-pointer" if keyword == "other formats" else keyword
    with pytest.raises(InvalidRequest, match=re.escape(name)):
        Matcher(table, Constraint.json_schema(REFUSED[keyword]))
    (warning,) = Matcher(table, Constraint.json_schema(REFUSED[keyword], is_lenient=True)).warnings
    assert name in warning
