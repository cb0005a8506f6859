"""Structural tags: which texts they allow, and how what cannot be used is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest
from specdec.structured.admission import check_constraint
from specdec.structured.grammar import check_text
from specdec.structured.matcher import Matcher, is_legal
from specdec.structured.token_table import TokenTable
from tests.support.byte_tokenizer import EOS, byte_table, ids_of, write_byte_tokenizer

ONE = {"begin": "[ab", "schema": {"enum": [1, 12]}, "end": "]"}
OTHER = {"begin": "[ac:", "schema": {"const": "é"}, "end": "}"}
TAGS: dict[str, Any] = {"type": "structural_tag", "structures": [ONE, OTHER], "triggers": ["[a"]}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> TokenTable:
    directory: Path = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(directory)
    return byte_table(directory)


def allows(table: TokenTable, tags: dict[str, Any], text: str) -> bool:
    """Return whether a text, by its longest tokens, is a whole output."""
    token_ids = [*ids_of(text), EOS]
    masks = Matcher(table, Constraint.structural_tag(tags)).legal_along(token_ids, (EOS,)).masks
    return len(masks) >= len(token_ids) and all(
        is_legal(mask, token_id) for mask, token_id in zip(masks, token_ids, strict=False)
    )


@pytest.mark.parametrize(
    "text", ["", "abc", "[b]", "c[ab12]c", "[ab1][ab12]", '[ac:"é"}', 'a[ab1]c[ac:"é"}12', "[ab1][", "[[ab1]"]
)
def test_free_text_and_whole_structures_are_allowed(table: TokenTable, text: str) -> None:
    assert allows(table, TAGS, text)


@pytest.mark.parametrize("text", ["[a", "[aa", "[ab", "[ab2]", "[ab1", "[ab1}", "[ac12]", '[ab"é"}', "[ab1][ab"])
def test_what_a_trigger_begins_must_be_a_whole_structure(table: TokenTable, text: str) -> None:
    assert not allows(table, TAGS, text)


def test_several_triggers_have_their_own_structures(table: TokenTable) -> None:
    tags = TAGS | {"triggers": ["[ab", "[ac"]}
    assert allows(table, tags, '[aa[ab12]b[ac:"é"}')
    assert not allows(table, tags, "[ac12]")


def test_after_a_trigger_the_rest_of_the_beginning_is_forced(table: TokenTable) -> None:
    matcher = Matcher(table, Constraint.structural_tag(TAGS | {"structures": [OTHER]}))
    assert matcher.forced_tokens() == []
    matcher.align(np.array(ids_of("b[a"), dtype=np.uint32))
    assert matcher.forced_tokens()


def admit(table: TokenTable, constraint: Constraint) -> None:
    check_text(constraint)
    check_constraint(table, constraint, (EOS,))


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ("{", "must be JSON"),
        ([], "must be an object"),
        ({"format": {}}, "format, which is not supported"),
        (TAGS | {"at_least_one": True}, "unknown members: at_least_one"),
        (TAGS | {"triggers": []}, "1 to 128 triggers"),
        (TAGS | {"triggers": ["[a", "{"]}, "no structure begins"),
        (TAGS | {"triggers": ["[", "[a"]}, "exactly one trigger"),
        (TAGS | {"triggers": [""]}, "not empty"),
        (TAGS | {"structures": [ONE] * 129}, "1 to 128 structures"),
        (TAGS | {"structures": [{"begin": "[a"}]}, "begin, schema and end"),
        (TAGS | {"structures": [ONE | {"schema": "x"}]}, "an object as the schema"),
        (TAGS | {"structures": [ONE | {"end": 1}]}, "a text as the end"),
        (TAGS | {"structures": [ONE | {"schema": {"not": {}}}]}, "not"),
        (TAGS | {"structures": [ONE | {"schema": {"type": "objekt"}}]}, "objekt"),
    ],
)
def test_tags_that_cannot_be_used_are_refused_by_name(table: TokenTable, tags: Any, said: str) -> None:
    constraint = Constraint.structural_tag(tags if isinstance(tags, str) else json.dumps(tags))
    with pytest.raises(InvalidRequest, match=said) as refused:
        admit(table, constraint)
    assert (refused.value.reason, refused.value.field) == ("CONSTRAINT_INVALID", "constraint.structural_tag")
    assert refused.value.message.startswith("constraint.structural_tag ")
