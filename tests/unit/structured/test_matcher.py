"""The masks of constraints equal those of brute force, and a matcher's state is a function of the tokens alone.

For a constraint with finitely many texts, a token is legal exactly if the output and its bytes begin one of them, and
the end is legal exactly if the output is one of them. There is one exception: if all of these texts continue with the
same bytes, llguidance may allow the tokenizer's own token for them alone.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest
from specdec.structured.matcher import Matcher, is_legal
from specdec.structured.token_table import TokenTable
from tests.support.byte_tokenizer import EOS, MARK, TOKENS, VOCABULARY, byte_table, bytes_of, ids_of, legal_ids

CHOICES = (
    ("a",),
    ("a", "ab", "abc", "abcab"),
    ("ab", "abé", "aéb", "éé"),
    ("{", "[12]", '{"a":1}', '{"a":12}'),
    ("1", "12", "121", "1212 "),
)
#: Regular expressions that match no text of more than `LONGEST` characters, on these characters alone.
CHARACTERS, LONGEST = "abcé", 4
EXPRESSIONS = (
    "a",
    "(ab|a)?c?",
    "a{0,2}(bc){1,1}",
    "[abé]{1,3}",
    "(é|c)(a|bc|é)?",
    "(a|ab)(c|bc)",
    ".{0,2}",
    "[^a]b?|",
    "(a(b(c)?)?)?",
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    *(Constraint.choice(texts) for texts in CHOICES),
    *(Constraint.regex(pattern) for pattern in EXPRESSIONS if pattern != "[^a]b?|"),
    Constraint.regex("(ab)*é+"),
    Constraint.json_schema(SCHEMA),
    Constraint.json_object(),
    Constraint.grammar('start: "[" (start | /[12]/)* "]"'),
)


def tokens(token_ids: list[int]) -> np.ndarray:
    return np.array(token_ids, dtype=np.uint32)


def mask_after(table: TokenTable, constraint: Constraint, token_ids: list[int], ends: tuple[int, ...]) -> np.ndarray:
    """Return the mask of a fresh matcher."""
    matcher = Matcher(table, constraint)
    matcher.align(tokens(token_ids))
    return matcher.mask(ends)


def expected_legal(members: set[bytes], output: bytes, ends: tuple[int, ...] = (EOS,)) -> set[int]:
    """Return what brute force allows after an output."""
    begun = {token_id for token_id, token in enumerate(TOKENS) if token and begins(members, output + token)}
    return begun - set(ends) | (set(ends) if output in members else set())


def begins(members: set[bytes], text: bytes) -> bool:
    return any(member.startswith(text) for member in members)


def is_only_choice(legal: set[int], expected: set[int], members: set[bytes], output: bytes) -> bool:
    """Return whether one token is legal, and all members that the output begins go on with its bytes."""
    if len(legal) != 1 or not legal <= expected:
        return False
    return begins_all({member for member in members if member.startswith(output)}, output + bytes_of(legal))


def begins_all(members: set[bytes], text: bytes) -> bool:
    return all(member.startswith(text) for member in members)


def check_every_output(table: TokenTable, constraint: Constraint, members: set[bytes], ends: tuple[int, ...]) -> int:
    """Compare the masks after every sequence of tokens that spells the beginning of a member; return how many."""
    matcher = Matcher(table, constraint)
    waiting, num_compared, spelled = [list[int]()], 0, set[bytes]()
    while waiting:
        output = waiting.pop()
        expected = expected_legal(members, bytes_of(output), ends)
        if not expected:
            continue  # a stop id is the only token that could go on
        matcher.align(tokens(output))
        legal = legal_ids(matcher.mask(ends))
        assert legal == expected or is_only_choice(legal, expected, members, bytes_of(output)), (output, legal)
        assert matcher.is_complete == (bytes_of(output) in members)
        num_compared += 1
        waiting += [[*output, token_id] for token_id in legal - set(ends)]
        spelled.add(bytes_of(output))
    assert members <= spelled
    return num_compared


@pytest.mark.parametrize("ends", [(EOS,), (EOS, MARK), (EOS, TOKENS.index(b"c"))], ids=["end", "special stop", "stop"])
@pytest.mark.parametrize("texts", CHOICES, ids=str)
def test_the_masks_of_a_choice_equal_brute_force(
    texts: tuple[str, ...], ends: tuple[int, ...], table: TokenTable
) -> None:
    members = {text.encode() for text in texts}
    assert check_every_output(table, Constraint.choice(texts), members, ends) > len(texts)


@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_the_masks_of_a_regular_expression_with_finitely_many_texts_equal_brute_force(
    pattern: str, table: TokenTable
) -> None:
    is_of_class = "." in pattern or "^" in pattern
    characters = (*CHARACTERS, *'{}[]":,12 ') if is_of_class else CHARACTERS
    longest = 2 if is_of_class else LONGEST
    texts = ("".join(text) for length in range(longest + 1) for text in itertools.product(characters, repeat=length))
    members = {text.encode() for text in texts if re.fullmatch(pattern, text)}
    assert members
    assert check_every_output(table, Constraint.regex(pattern), members, (EOS,)) > 1


def test_brute_force_notices_a_mask_of_another_constraint(table: TokenTable) -> None:
    """Negative control."""
    with pytest.raises(AssertionError):
        check_every_output(table, Constraint.choice(["a", "ab"]), {b"a", b"abc"}, (EOS,))


def test_a_special_token_is_never_legal_within_an_output(table: TokenTable) -> None:
    """A special token has a text in the vocabulary, `<|mark|>`, that patterns must not match."""
    for constraint in (Constraint.regex("(?s:.)*"), Constraint.regex("[^x]*"), Constraint.json_object()):
        assert MARK not in legal_ids(mask_after(table, constraint, [], (EOS,)))
    inside = ids_of('{"a')
    assert MARK not in legal_ids(mask_after(table, Constraint.json_object(), inside, (EOS,)))


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: f"{constraint.kind.name} {constraint.text}")
def test_end_tokens_and_stop_ids_are_legal_exactly_if_the_output_may_end(
    constraint: Constraint, table: TokenTable
) -> None:
    ends = (EOS, MARK, TOKENS.index(b"c"))
    output: list[int] = []
    matcher = Matcher(table, constraint)
    rng = np.random.default_rng(3)
    for _ in range(12):
        matcher.align(tokens(output))
        legal = legal_ids(matcher.mask(ends))
        assert set(ends) & legal == (set(ends) if matcher.is_complete else set())
        going = sorted(legal - set(ends))
        if not going:
            break
        output.append(int(rng.choice(going)))


@st.composite
def outputs(draw: st.DrawFn) -> tuple[int, list[int], list[tuple[int, int]]]:
    """A constraint, random choices that make an output, and places to go back to with other choices from there."""
    number = draw(st.integers(0, len(CONSTRAINTS) - 1))
    choices = draw(st.lists(st.integers(0, 1 << 20), max_size=12))
    turns = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 1 << 20)), max_size=6))
    return number, choices, turns


def grown(table: TokenTable, constraint: Constraint, output: list[int], choices: list[int]) -> list[int]:
    """Return the output after as many tokens as there are choices, or fewer if it must end."""
    output = list(output)
    for choice in choices:
        going = sorted(legal_ids(mask_after(table, constraint, output, (EOS,))) - {EOS})
        if not going:
            break
        output.append(going[choice % len(going)])
    return output


@given(outputs())
def test_a_matcher_that_went_on_or_back_is_equal_to_a_fresh_one(
    table: TokenTable, case: tuple[int, list[int], list[tuple[int, int]]]
) -> None:
    number, choices, turns = case
    constraint = CONSTRAINTS[number]
    output = grown(table, constraint, [], choices)
    matcher = Matcher(table, constraint)

    def check(prefix: list[int]) -> None:
        matcher.align(tokens(prefix))
        np.testing.assert_array_equal(matcher.mask((EOS,)), mask_after(table, constraint, prefix, (EOS,)))

    for length in range(len(output) + 1):  # by replay
        check(output[:length])
    for length, choice in turns:  # by rollback, and on from there
        check(output[:length])
        check(grown(table, constraint, output[:length], [choice, choice // 7]))


@given(
    st.integers(0, len(CONSTRAINTS) - 1),
    st.lists(st.integers(0, 1 << 20), max_size=6),
    st.lists(st.integers(0, 1 << 20), max_size=5),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=4),
)
def test_masks_along_a_draft_end_with_it_or_its_first_illegal_token_and_leave_the_state(
    table: TokenTable, number: int, choices: list[int], legal_part: list[int], any_part: list[int]
) -> None:
    constraint, ends = CONSTRAINTS[number], (EOS,)
    output = grown(table, constraint, [], choices)
    draft = [*grown(table, constraint, output, legal_part)[len(output) :], *any_part]
    matcher = Matcher(table, constraint)
    matcher.align(tokens(output))
    before = matcher.mask(ends)
    masks = matcher.legal_along(draft, ends).masks
    np.testing.assert_array_equal(matcher.mask(ends), before)
    assert 1 <= len(masks) <= len(draft) + 1
    for index, mask in enumerate(masks):
        np.testing.assert_array_equal(mask, mask_after(table, constraint, output + draft[:index], ends))
    if len(masks) <= len(draft):
        last = draft[len(masks) - 1]
        assert last in ends or not is_legal(masks[-1], last)
    matcher.align(tokens(output + draft[: len(masks) - 1]))  # the accepted part of the draft
    np.testing.assert_array_equal(matcher.mask(ends), masks[-1])


def test_no_mask_follows_a_stop_id_within_a_draft(table: TokenTable) -> None:
    """The bytes of a stop id would go on with the text, but the output ends before them."""
    stop = TOKENS.index(b"bc")
    matcher = Matcher(table, Constraint.choice(["a", "abcab"]))
    a = TOKENS.index(b"a")
    masks = matcher.legal_along([a, stop, a], (EOS, stop)).masks
    assert [legal_ids(mask) for mask in masks] == [
        {a, TOKENS.index(b"ab"), TOKENS.index(b"abc")},
        {TOKENS.index(b"b"), EOS, stop},
    ]


def test_tokens_that_the_constraint_does_not_allow_are_refused_by_name(table: TokenTable) -> None:
    with pytest.raises(InvalidRequest, match=r"constraint.choice does not allow the tokens that the output has") as at:
        mask_after(table, Constraint.choice(["ab"]), ids_of("b"), (EOS,))
    assert at.value.reason == "CONSTRAINT_INVALID"


def test_an_output_that_no_token_can_continue_is_refused_by_name(table: TokenTable) -> None:
    """The tokenizer cannot spell x, which llguidance does not notice before the output is there."""
    with pytest.raises(InvalidRequest, match=r"allow no next token") as at:
        mask_after(table, Constraint.choice(["ax"]), ids_of("a"), (EOS,))
    assert (at.value.reason, at.value.field) == ("NO_LEGAL_TOKEN", "constraint.choice")


def test_forced_tokens_are_those_without_a_choice(table: TokenTable) -> None:
    matcher = Matcher(table, Constraint.choice(['{"a":1}', '{"a":2}']))
    assert bytes_of(matcher.forced_tokens()) in (b'{"a', b'{"a":')
    matcher.align(tokens(ids_of('{"a":')))
    assert matcher.forced_tokens() == []


def test_a_table_with_two_end_tokens_ends_with_either(tokenizer_directory: Path) -> None:
    table = byte_table(tokenizer_directory, (EOS, MARK))
    assert legal_ids(mask_after(table, Constraint.choice(["a"]), ids_of("a"), (EOS, MARK))) == {EOS, MARK}
    assert not {EOS, MARK} & legal_ids(mask_after(table, Constraint.choice(["a"]), [], (EOS, MARK)))
