"""Whatever a schema's masks allow is valid: random outputs of many schemas, judged by another library.

An output is written token by token, each drawn from the mask, so it also goes where no model would: escapes, names that
occur twice, white space, numbers of any form. The schemas have the parts that decide about such texts. The seeds are
fixed, so a pass stays a pass.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from specdec.checkpoints.token_bytes import byte_level_spelling
from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.contract.constraint import Constraint
from specdec.structured.admission import check_constraint
from specdec.structured.grammar import check_text
from specdec.structured.matcher import Matcher
from specdec.structured.token_table import TokenTable
from tests.support.other_tokenizers import save_byte_level_vocabulary

#: One token a character, and some of two: letters, digits, what JSON consists of, and escapes in parts.
SPELLED = [*'abcu0123456789.eE+-{}[]:,"\\ \nntrlsfé', '{"', '":', "\\u", "00", "61", '"a"', '"b"', '\\"', "true"]
EOS = 0
NUM_OUTPUTS = 12
MAX_TOKENS = 120

INTEGER: dict[str, Any] = {"type": "integer"}
OBJECT: dict[str, Any] = {"type": "object"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": OBJECT,
    "a property beside free ones": {**OBJECT, "properties": {"a": INTEGER}},
    "a required property beside free ones": {**OBJECT, "properties": {"a": INTEGER, "b": INTEGER}, "required": ["b"]},
    "names of a pattern": {**OBJECT, "patternProperties": {"^a": INTEGER}, "minProperties": 1},
    "names of two patterns": {
        **OBJECT, "patternProperties": {"^a": INTEGER, "^b": {"type": "string"}}, "additionalProperties": False,
        "minProperties": 1,
    },
    "free properties of a type": {**OBJECT, "additionalProperties": INTEGER, "minProperties": 1},
    "at most one property": {**OBJECT, "maxProperties": 1},
    "lengths": {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 2}, "minItems": 1},
    "a pattern in a text": {"type": "array", "items": {"type": "string", "pattern": "a[^b]"}, "minItems": 2},
    "integers in a range": {"type": "array", "items": {**INTEGER, "minimum": -12, "maximum": 21}, "minItems": 2},
    "numbers in a range": {
        "type": "array", "items": {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25}, "minItems": 2,
    },
    "multiples": {"type": "array", "items": {**INTEGER, "multipleOf": 3}, "minItems": 2},
    "enumerations": {"type": "array", "items": {"enum": ["a", 1, {"b": [None]}, True, "\n\""]}, "minItems": 1},
    "alternatives": {"anyOf": [{**OBJECT, "required": ["a"]}, {"type": "array", "items": {"const": "a"}}]},
    "both of two": {
        **OBJECT, "properties": {"a": INTEGER}, "allOf": [{"required": ["a"], "properties": {"a": {"minimum": 3}}}],
    },
    "items one by one": {"type": "array", "prefixItems": [INTEGER, {"type": "string"}], "items": False, "minItems": 1},
    "a tree": {
        **OBJECT, "properties": {"a": {"type": "array", "items": {"$ref": "#"}}, "b": INTEGER}, "required": ["b"],
        "additionalProperties": False,
    },
    "types": {"type": ["integer", "string", "null", "boolean", "number"], "maxLength": 3, "minimum": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> TokenTable:
    folder = tmp_path_factory.mktemp("characters")
    spelled = dict.fromkeys(byte_level_spelling(part) for text in SPELLED for part in _parts(text))
    save_byte_level_vocabulary(folder, ["<|end|>", *spelled], [])
    return TokenTable(load_tokenizer(folder), (EOS,), len(spelled) + 1)


def _parts(text: str) -> list[bytes]:
    """Return the bytes of a token; a character of two bytes is two tokens."""
    return [text.encode()] if text.isascii() else [bytes([byte]) for byte in text.encode()]


def ids_of(table: TokenTable, text: str) -> list[int]:
    """Return one token a byte."""
    vocabulary = [table.library_table().decode_bytes([token_id]) for token_id in range(1, table.vocabulary_size)]
    return [vocabulary.index(bytes([byte])) + 1 for byte in text.encode()]


def written(table: TokenTable, constraint: Constraint, seed: int) -> str | None:
    """Return a random output; None if it has not ended after `MAX_TOKENS` tokens."""
    rng, matcher, output = np.random.default_rng(seed), Matcher(table, constraint), list[int]()
    while len(output) < MAX_TOKENS:
        matcher.align(np.array(output, dtype=np.uint32))
        mask = np.unpackbits(matcher.mask((EOS,)), count=table.vocabulary_size, bitorder="little")
        legal = np.flatnonzero(mask)
        if EOS in legal and rng.random() < 0.5:
            return table.library_table().decode_bytes(output).decode()
        going = legal[legal != EOS]
        if not len(going):
            return table.library_table().decode_bytes(output).decode()
        output.append(int(rng.choice(going)))
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_output_that_the_masks_allow_is_valid(name: str, characters: TokenTable) -> None:
    schema = SCHEMAS[name]
    constraint = Constraint.json_schema(schema)
    check_text(constraint)
    check_constraint(characters, constraint, (EOS,))
    texts = [written(characters, constraint, seed) for seed in range(NUM_OUTPUTS)]
    ended = [text for text in texts if text is not None]
    assert len(ended) > NUM_OUTPUTS / 4
    for text in ended:
        assert Draft202012Validator(schema).is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**OBJECT, "properties": {"a": INTEGER}}, '{"\\u0061":"a"}'),
        ({**OBJECT, "patternProperties": {"^a": INTEGER}}, '{"\\u0061":"a"}'),
        ({**OBJECT, "properties": {"a": INTEGER}}, '{"a":1,"\\u0061":"a"}'),
        ({**OBJECT, "properties": {"a": INTEGER}}, '{"a":1,"a":"a"}'),
        ({"type": "string", "maxLength": 1}, '"\\u0061\\u0061"'),
    ],
)
def test_no_text_escapes_its_schema_by_another_spelling(
    schema: dict[str, Any], text: str, characters: TokenTable
) -> None:
    """A reader of JSON sees the same name or text, whichever way it is spelled."""
    assert not Draft202012Validator(schema).is_valid(json.loads(text))
    token_ids = ids_of(characters, text)
    masks = Matcher(characters, Constraint.json_schema(schema)).legal_along(token_ids, (EOS,)).masks
    assert len(masks) <= len(token_ids)
