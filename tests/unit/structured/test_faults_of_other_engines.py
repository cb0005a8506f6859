"""Faults that engines had in which grammars meet speculation, each as a test of the matcher that would show it.

Those that need services are in `tests/integration/test_constrained_requests.py`, calls with drafts of heads in
`tests/e2e/test_tool_calls.py`, and an illegal draft token that is drawn again from p is the negative control of
`tests/statistical/test_constrained_rounds.py`.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest
from specdec.contract.output_form import OutputForm, ReasoningFormat
from specdec.structured.admission import check_constraint
from specdec.structured.grammar import check_text
from specdec.structured.matcher import Matcher, is_legal
from specdec.structured.output_grammar import output_constraint
from specdec.structured.token_table import TokenTable
from tests.support.byte_tokenizer import EOS, MARK, TOKENS, ids_of, legal_ids

CHOICE = Constraint.choice(["abcabc", "abcbca", "aéa"])


def matcher_after(table: TokenTable, constraint: Constraint, text: str) -> Matcher:
    matcher = Matcher(table, constraint)
    matcher.align(np.array(ids_of(text), dtype=np.uint32))
    return matcher


def test_the_matcher_is_not_one_token_behind_after_a_draft_was_accepted_in_part(table: TokenTable) -> None:
    matcher = matcher_after(table, CHOICE, "")
    accepted = ids_of("abc")
    matcher.legal_along([*accepted, *ids_of("{")], (EOS,))  # the second draft token is illegal
    matcher.align(np.array([*accepted, *ids_of("b")], dtype=np.uint32))  # another token came instead
    assert legal_ids(matcher.mask((EOS,))) == legal_ids(matcher_after(table, CHOICE, "abcb").mask((EOS,)))


def test_white_space_has_a_limit(table: TokenTable) -> None:
    space = TOKENS.index(b" ")
    matcher = Matcher(table, Constraint.json_object())
    output = ids_of("{")
    while space in legal_ids(matcher_with(matcher, output)):
        output.append(space)
        assert len(output) <= 10
    assert len(output) == 9


def matcher_with(matcher: Matcher, output: list[int]) -> np.ndarray:
    matcher.align(np.array(output, dtype=np.uint32))
    return matcher.mask((EOS,))


def test_an_instance_that_takes_over_does_not_accept_a_token_twice(table: TokenTable) -> None:
    constraint = Constraint.regex("(ab){2}")
    once, twice = matcher_after(table, constraint, "ab"), matcher_after(table, constraint, "ab")
    twice.align(np.array(ids_of("ab"), dtype=np.uint32))
    assert not twice.is_complete
    np.testing.assert_array_equal(once.mask((EOS,)), twice.mask((EOS,)))


def test_a_grammar_that_ends_inside_an_accepted_draft_allows_the_end_alone(table: TokenTable) -> None:
    matcher = Matcher(table, Constraint.choice(["ab"]))
    masks = matcher.legal_along([*ids_of("ab"), *ids_of("ab")], (EOS,)).masks
    assert len(masks) == 2
    assert legal_ids(masks[-1]) == {EOS}


def test_a_draft_that_goes_on_after_the_end_of_the_grammar_does_not_end_the_matcher(table: TokenTable) -> None:
    """An empty stack of rules raises nothing, whatever a draft says afterwards."""
    matcher = matcher_after(table, Constraint.json_object(), "{}")
    for draft in ([EOS, EOS], ids_of("}}"), [EOS, *ids_of("{}")]):
        masks = matcher.legal_along(draft, (EOS,)).masks
        assert EOS in legal_ids(masks[-1])
    assert matcher.is_complete


def test_each_token_of_a_draft_has_a_mask_of_its_own(table: TokenTable) -> None:
    masks = (
        Matcher(table, CHOICE)
        .legal_along([TOKENS.index(b"a"), TOKENS.index(b"\xc3"), TOKENS.index(b"\xa9")], (EOS,))
        .masks
    )
    assert len({mask.tobytes() for mask in masks}) == len(masks) == 4


def admit(table: TokenTable, constraint: Constraint) -> None:
    """Check a constraint as coordinators do."""
    check_text(constraint)
    check_constraint(table, constraint, (EOS,))


@pytest.mark.parametrize("text", ["start: (", "start: foo", "root ::= [", "start: /(/"])
def test_a_grammar_that_does_not_parse_is_refused_and_never_answered_without_it(text: str, table: TokenTable) -> None:
    constraint = Constraint.grammar(text)
    with pytest.raises(InvalidRequest) as caught:
        admit(table, constraint)
    assert (caught.value.reason, caught.value.field) == ("CONSTRAINT_INVALID", "constraint.grammar")


def test_a_parameters_description_changes_nothing(table: TokenTable) -> None:
    """Whatever it says: quotes, braces, a grammar's syntax, escapes, other scripts."""
    plain = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    described = json.loads(json.dumps(plain))
    described["properties"]["a"]["description"] = 'say "{}" %json start: /x/ | <|mark|> \\u0000 \n é 🌲 $ref'
    for text in ("", "{", '{"a":', '{"a":1', '{"a":1}'):
        masks = [
            matcher_after(table, Constraint.json_schema(schema), text).mask((EOS,)) for schema in (plain, described)
        ]
        np.testing.assert_array_equal(*masks)


#: Reasoning that the prompt has begun, up to a special token.
REASONING = OutputForm(reasoning=ReasoningFormat("marked", "<|start|>", "<|mark|>"), begins_in_reasoning=True)


def test_a_constraint_holds_from_where_reasoning_ends_inside_a_draft(table: TokenTable) -> None:
    constraint = output_constraint(REASONING, None, Constraint.choice(["abc"]), {"<|mark|>": MARK})
    assert constraint is not None
    draft = [*ids_of("ab{1"), MARK, *ids_of("abc")]
    masks = Matcher(table, constraint).legal_along(draft, (EOS,)).masks
    end = draft.index(MARK) + 1
    assert len(masks) == len(draft) + 1
    for mask in masks[:end]:
        assert {MARK, *ids_of("abc{12")} <= legal_ids(mask)
    assert legal_ids(masks[end]) <= set(ids_of("abc") + ids_of("ab") + ids_of("a"))
    assert legal_ids(masks[-1]) == {EOS}
    one_by_one = matcher_after(table, constraint, "")
    for length in range(len(draft) + 1):
        one_by_one.align(np.array(draft[:length], dtype=np.uint32))
        np.testing.assert_array_equal(one_by_one.mask((EOS,)), masks[length])


def test_an_output_without_the_marker_cannot_end(table: TokenTable) -> None:
    """Prose without a marker is never a whole output: it goes on until its limit, and its finish reason tells so."""
    constraint = output_constraint(REASONING, None, Constraint.choice(["abc"]), {"<|mark|>": MARK})
    assert constraint is not None
    matcher, prose = Matcher(table, constraint), ids_of("abc1{2}" * 8)
    masks = matcher.legal_along(prose, (EOS,)).masks
    assert len(masks) == len(prose) + 1
    assert not any(is_legal(mask, EOS) for mask in masks)
    assert not matcher.is_complete


def test_no_special_token_follows_a_marker(table: TokenTable) -> None:
    constraint = output_constraint(REASONING, None, Constraint.choice(["abc"]), {"<|mark|>": MARK})
    assert constraint is not None
    answer = ids_of("abc")
    masks = Matcher(table, constraint).legal_along([MARK, *answer], (EOS,)).masks
    assert len(masks) == len(answer) + 2
    for mask in masks[1:-1]:
        assert not {MARK, EOS} & legal_ids(mask)
    assert len(Matcher(table, constraint).legal_along([MARK, MARK, *answer], (EOS,)).masks) == 2
