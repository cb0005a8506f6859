"""Grammars of outputs: they allow every message that a template writes, and nothing that cannot be read."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from specdec.checkpoints.token_bytes import byte_level_bytes
from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest
from specdec.contract.output_form import OutputForm
from specdec.contract.tools import ToolCallDelta, ToolChoice, ToolDefinition, Tools
from specdec.structured.matcher import Mask, Matcher, is_legal
from specdec.structured.output_grammar import ToolsRefused, output_constraint
from specdec.structured.output_parser import OutputParser
from specdec.structured.token_table import TokenTable
from specdec.structured.tool_formats import reasoning_formats
from tests.support.recorded_outputs import (
    SCHEMAS,
    TOOLS,
    form_of,
    layout_of,
    plain_tokens,
    recorded,
    tokens_of,
)
from tests.support.tool_models import FAMILIES, THINK_MARKERS, family_tokenizer

EOS = 2
CALL = '<tool_call>\n{"name": "note", "arguments": {"text": "x"}}\n</tool_call>'


class Grammars:
    """A tokenizer with markers, and the matchers of grammars over it."""

    def __init__(self, directory: Path, markers: Sequence[str]) -> None:
        self.markers = tuple(markers)
        self.tokenizer = family_tokenizer(directory, "", markers)
        self.table = TokenTable(self.tokenizer, (EOS,), len(self.tokenizer.get_vocab()))
        self.token_ids = {marker: self.tokenizer.convert_tokens_to_ids(marker) for marker in markers}
        self._spelled = {
            byte_level_bytes(token): token_id
            for token, token_id in self.tokenizer.get_vocab().items()
            if token not in markers and not token.startswith("<|")
        }

    def matcher(self, form: OutputForm, tools: Tools | None = TOOLS, answer: Constraint | None = None) -> Matcher:
        known = {marker: self.token_ids[marker] for marker in self.markers}
        constraint = output_constraint(form, tools, answer, known)
        assert constraint is not None
        return Matcher(self.table, constraint)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, its markers as single tokens."""
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def follows(self, matcher: Matcher, text: str) -> bool | None:
        """Return whether a text, markers as single tokens, may be the whole output; None if no output begins with it.

        Of the legal tokens that spell the text the longest is taken, because a forced text has one legal spelling.
        """
        token_ids: list[int] = []
        pieces = re.split(f"({'|'.join(map(re.escape, self.markers))})", text) if self.markers else [text]
        for piece in pieces:
            rest = piece.encode()
            while rest:
                mask = self._mask_after(matcher, token_ids)
                ends = range(len(rest), 0, -1)
                known = {piece.encode(): self.token_ids[piece]} if piece in self.markers else self._spelled
                fitting = ((end, known[rest[:end]]) for end in ends if rest[:end] in known)
                end, token_id = next((each for each in fitting if is_legal(mask, each[1])), (0, 0))
                if not end:
                    return None
                token_ids.append(token_id)
                rest = rest[end:]
        self._mask_after(matcher, token_ids)
        return matcher.is_complete

    def allows(self, matcher: Matcher, token_ids: list[int]) -> bool:
        """Return whether tokens may be a whole output."""
        if not self.begins(matcher, token_ids):
            return False
        self._mask_after(matcher, token_ids)
        return matcher.is_complete

    def begins(self, matcher: Matcher, token_ids: list[int]) -> bool:
        """Return whether an output may begin with some tokens."""
        masks = (self._mask_after(matcher, token_ids[:length]) for length in range(len(token_ids)))
        return all(is_legal(mask, token_id) for mask, token_id in zip(masks, token_ids, strict=True))

    @staticmethod
    def _mask_after(matcher: Matcher, token_ids: list[int]) -> Mask:
        matcher.align(np.array(token_ids, np.uint32))
        return matcher.mask([EOS])


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda markers: Grammars(tmp_path_factory.mktemp("tokenizer"), markers))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_message_that_the_template_writes_may_be_written(family: str, grammars: Any) -> None:
    own = grammars(FAMILIES[family][1])
    matcher = own.matcher(form_of(family))
    for seed in range(60):
        output = recorded(family, seed)
        token_ids = tokens_of(output, own.tokenizer, own.markers)
        assert own.allows(matcher, token_ids), output


@pytest.mark.parametrize("family", ["hermes", "qwen_xml", "gemma4"])
def test_every_message_may_be_written_if_the_markers_are_plain_text(family: str, grammars: Any) -> None:
    own = grammars(())
    matcher = own.matcher(form_of(family))
    for seed in range(60):
        output = recorded(family, seed, markers=())
        if not any("tool_call>" in text or '<|"|>' in text for text in (output.answer, json.dumps(output.calls))):
            assert own.allows(matcher, tokens_of(output, own.tokenizer, ())), output


@pytest.mark.parametrize("choice", [ToolChoice.REQUIRED, ToolChoice.NAMED, ToolChoice.AUTO])
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_follows_the_grammar_is_read_as_calls_of_the_tools(
    family: str, choice: ToolChoice, grammars: Any
) -> None:
    """Random walks through the masks: legal tokens in unusual divisions."""
    own = grammars(FAMILIES[family][1])
    tools = replace(TOOLS, choice=choice, name="note" if choice is ToolChoice.NAMED else "")
    matcher = own.matcher(form_of(family), tools)
    num_calls = 0
    for seed in range(8):
        token_ids, has_ended = _walk(own, matcher, random.Random(f"{family} {choice} {seed}"))
        parser = _read(own, form_of(family), token_ids)
        calls = _calls(parser[1])
        if has_ended:
            num_calls += len(calls)
            assert parser[0].num_complete_calls == len(calls)
            assert bool(calls) or choice is ToolChoice.AUTO
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
                assert name == "note" or choice is not ToolChoice.NAMED
            assert len(calls) == 1 or choice is not ToolChoice.NAMED
    assert num_calls or choice is ToolChoice.AUTO


def test_free_text_may_end_anywhere_and_hold_the_beginning_of_an_opener(grammars: Any) -> None:
    for markers in ((), FAMILIES["hermes"][1]):
        own = grammars(markers)
        for text in ("", "Hello", "a < b and <tool", "<tool_cal", 'As {"name": "x"}', "é 🗼"):
            assert own.follows(own.matcher(form_of("hermes")), text), text


def test_after_an_opener_there_is_only_a_call_and_after_a_call_only_another_one_or_the_end(grammars: Any) -> None:
    for markers in ((), FAMILIES["hermes"][1]):
        own = grammars(markers)
        matcher = own.matcher(form_of("hermes"))
        assert own.follows(matcher, CALL) is True
        assert own.follows(matcher, f"Look:\n{CALL}\n{CALL}") is True
        assert own.follows(matcher, f"{CALL}\n") is True, "models write the line break after the last call as well"
        for text in ("<tool_call>", "<tool_call>\n", f"{CALL}\n<tool_call>", CALL[:-3]):
            assert not own.follows(matcher, text)
        for text in ("<tool_call>{", '<tool_call>\n{"name": "other"', CALL + " bye", CALL + "\n\n"):
            assert own.follows(matcher, text) is None, text


def test_arguments_have_the_separators_of_the_template_and_no_other_white_space(grammars: Any) -> None:
    own = grammars(())
    weather = '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
    spaced, compact = weather % '{"city": "x", "days": 1}', weather % '{"city":"x","days":1}'
    layout = layout_of("hermes")
    forms = {
        spaced: form_of("hermes"),
        compact: replace(form_of("hermes"), layout=replace(layout, item_separator=",", key_separator=":")),
    }
    for written, form in forms.items():
        for text in (spaced, compact):
            assert own.follows(own.matcher(form), text) is (True if text == written else None)


def test_a_closer_inside_a_string_does_not_end_a_call(grammars: Any) -> None:
    own = grammars(FAMILIES["hermes"][1])
    head, tail = '<tool_call>\n{"name": "note", "arguments": {"text": "', '"}}\n</tool_call>'
    inside = plain_tokens(own.tokenizer, '}}</tool_call> \\"{', own.markers)
    token_ids = [*own.encode(head), *inside, *own.encode(tail)]
    assert own.allows(own.matcher(form_of("hermes")), token_ids)
    (call,) = _calls(_read(own, form_of("hermes"), token_ids)[1])
    assert json.loads(call[1]) == {"text": '}}</tool_call> "{'}


@pytest.mark.parametrize("markers", [(), FAMILIES["hermes"][1]])
def test_no_call_can_be_written_under_the_choice_none(markers: tuple[str, ...], grammars: Any) -> None:
    own = grammars(markers)
    matcher = own.matcher(form_of("hermes"), replace(TOOLS, choice=ToolChoice.NONE))
    assert own.follows(matcher, "Hello <tool") is True
    assert own.follows(matcher, CALL) is None
    assert own.follows(matcher, "Hello\n" + CALL) is None


def test_one_call_is_the_most_without_parallel_calls(grammars: Any) -> None:
    own = grammars(())
    matcher = own.matcher(form_of("hermes"), replace(TOOLS, is_parallel=False))
    assert own.follows(matcher, CALL) is True
    assert own.follows(matcher, f"{CALL}\n") is None


THINK = reasoning_formats()["think"]


@pytest.mark.parametrize("begins_in_reasoning", [False, True])
@pytest.mark.parametrize("markers", [(), (*FAMILIES["hermes"][1], *THINK_MARKERS)])
def test_an_output_that_must_call_cannot_end_in_reasoning(
    markers: tuple[str, ...], begins_in_reasoning: bool, grammars: Any
) -> None:
    own = grammars(markers)
    form = replace(form_of("hermes"), reasoning=THINK, begins_in_reasoning=begins_in_reasoning)
    matcher = own.matcher(form, replace(TOOLS, choice=ToolChoice.REQUIRED))
    begin = "" if begins_in_reasoning else "<think>\n"
    assert own.follows(matcher, f"{begin}Hm, < or >?\n</think>\n\n{CALL}") is True
    for text in ("", "Hm", "Hm\n</think>", "Hm\n</think>\n\n", f"Hm\n</think>\n\n{CALL[:-12]}"):
        assert own.follows(matcher, begin + text) is False, text
    assert own.follows(matcher, f"{begin}Hm\n</think>\n\nNo") is None


@pytest.mark.parametrize("markers", [(), THINK_MARKERS])
def test_the_constraint_of_an_answer_holds_after_the_reasoning(markers: tuple[str, ...], grammars: Any) -> None:
    own = grammars(markers)
    answers = {
        Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}): (
            '{"a": 1}',
            "{}",
        ),
        Constraint.json_object(): ("{}", "[]"),
        Constraint.regex("[a-c]+/x"): ("abc/x", "d"),
        Constraint.choice(["yes", "no"]): ("no", "maybe"),
        Constraint.grammar('start: "a" b\nb: "b"+'): ("abb", "b"),
    }
    for answer, (good, bad) in answers.items():
        for begun in (False, True):
            form = OutputForm(reasoning=THINK, begins_in_reasoning=begun)
            matcher = own.matcher(form, None, answer)
            begin = "" if begun else "<think>\n"
            assert own.follows(matcher, f"{begin}I see\n</think>\n\n{good}") is True, answer
            assert own.follows(matcher, f"{begin}I see\n</think>\n\n{bad}") in (None, False)
            assert own.follows(matcher, f"{begin}I see") is False
            if not begun:
                assert own.follows(matcher, good) is True
                assert own.follows(matcher, bad) in (None, False)


def test_an_answer_with_a_constraint_or_a_call_may_follow(grammars: Any) -> None:
    own = grammars(FAMILIES["hermes"][1])
    matcher = own.matcher(form_of("hermes"), TOOLS, Constraint.choice(["yes", "no"]))
    assert own.follows(matcher, "yes") is True
    assert own.follows(matcher, CALL) is True
    assert own.follows(matcher, "Hello") is None


@pytest.mark.parametrize("family", ["qwen_xml", "gemma4"])
def test_a_strict_tool_with_a_keyword_that_the_format_cannot_enforce_is_refused(family: str, grammars: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 3}}}
    own = grammars(())
    for is_strict in (False, True):
        tools = Tools((TOOLS.definitions[0], ToolDefinition("f", "", json.dumps(schema), is_strict)))
        if not is_strict:
            own.matcher(form_of(family), tools)
            continue
        with pytest.raises(ToolsRefused, match="minLength") as refusal:
            own.matcher(form_of(family), tools)
        assert refusal.value.index == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recursive_schema_and_one_without_properties_can_be_followed(family: str, grammars: Any) -> None:
    own = grammars(FAMILIES[family][1])
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/tree"}, "value": {"type": ["integer", "null"]}, "any": {}},
        "required": ["value"],
        "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}},
    }
    definitions = (ToolDefinition("tree", "", json.dumps(tree)), ToolDefinition("any", "", '{"type": "object"}'))
    matcher = own.matcher(form_of(family), Tools(definitions, ToolChoice.REQUIRED))
    matcher.mask([EOS])


def test_descriptions_of_tools_and_parameters_can_hold_any_text(grammars: Any) -> None:
    own = grammars(FAMILIES["hermes"][1])
    text = '"q" {{ x }} %json // <tool_call> </tools> \\ \n # /(.|\\n)*/ start: é \u2028'
    schema = {
        "type": "object",
        "properties": {'a "b" <c>': {"type": "string", "description": text, "maxLength": 1}},
        "description": text,
        "x-guidance": {"lenient": True, "whitespace_flexible": True},
    }
    for family in ("hermes", "gemma4", "mistral_named"):
        tools = Tools((ToolDefinition("f", text, json.dumps(schema)),), ToolChoice.REQUIRED)
        own.matcher(form_of(family), tools).mask([EOS])
    matcher = own.matcher(form_of("hermes"), tools)
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert own.follows(matcher, call % '{"a \\"b\\" <c>": "x"}') is True
    assert own.follows(matcher, call % '{"a \\"b\\" <c>":  "x"}') is None


def _walk(own: Grammars, matcher: Matcher, draw: random.Random) -> tuple[list[int], bool]:
    """Return tokens drawn among the legal ones, short ones more often, and whether the output ended."""
    token_ids: list[int] = []
    ends = [own.encode(text)[0] for text in ('"', "}", "]", "\n", "1", '"}', "<")] + list(own.token_ids.values())
    while len(token_ids) < 400:
        matcher.align(np.array(token_ids, np.uint32))
        mask = matcher.mask([EOS])
        if is_legal(mask, EOS) and draw.random() < 0.3:
            return token_ids, True
        forced = matcher.forced_tokens()
        if forced and draw.random() < 0.8:
            token_ids += forced
            continue
        closer = own.encode("\n</parameter>\n")
        if draw.random() < 0.2 and own.begins(matcher, [*token_ids, *closer]):
            token_ids += closer
            continue
        likely = [token_id for token_id in ends if is_legal(mask, token_id)]
        if likely and draw.random() < 0.4:
            token_ids.append(draw.choice(likely))
            continue
        legal = [token_id for token_id in range(len(own.tokenizer.get_vocab())) if is_legal(mask, token_id)]
        legal = [token_id for token_id in legal if token_id != EOS]
        if not legal:
            return token_ids, is_legal(mask, EOS)
        token_ids.append(draw.choice(legal))
    return token_ids, False


def _read(own: Grammars, form: OutputForm, token_ids: Sequence[int]) -> tuple[OutputParser, list[Any]]:
    markers = {token_id: marker for marker, token_id in own.token_ids.items()}
    parser = OutputParser(form, own.markers, str)
    parts: list[Any] = []
    held: list[int] = []
    for token_id in [*token_ids, None]:
        if token_id is None or token_id in markers:
            parts += parser.feed_text(own.tokenizer.decode(held))
            held = []
        if token_id is None:
            continue
        if token_id in markers:
            parts += parser.feed_marker(markers[token_id])
        else:
            held.append(token_id)
    return parser, [*parts, *parser.finish()]


def _calls(parts: Sequence[Any]) -> list[tuple[str, str]]:
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        if isinstance(part, ToolCallDelta):
            name, arguments = calls.get(part.index, ("", ""))
            calls[part.index] = (name + part.name, arguments + part.arguments)
    return list(calls.values())


def test_gemma_arguments_keep_limits_of_numbers_and_lists_and_fixed_values(grammars: Any) -> None:
    own = grammars(())
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 1, "maximum": 9},
            "b": {"type": "array", "items": {"enum": [1, "x", True, None]}, "minItems": 1, "maxItems": 2},
            "c": {"type": "array", "items": {"type": "number"}, "maxItems": 0},
        },
        "required": ["a"],
    }
    tools = Tools((ToolDefinition("f", "", json.dumps(schema), is_strict=True),))
    matcher = own.matcher(form_of("gemma4"), tools)
    call = "<|tool_call>call:f{%s}<tool_call|>"
    for good in ("a:9", "a:1,b:[1],c:[]", 'a:1,b:[<|"|>x<|"|>,true]', "a:1,b:[null]"):
        assert own.follows(matcher, call % good) is True, good
    for bad in ("a:10", "a:0", "b:[1]", "a:1,b:[]", "a:1,b:[1,1,1]", "a:1,b:[2]", "a:1,c:[1]", "a:1,d:1"):
        assert own.follows(matcher, call % bad) is None, bad


def test_an_error_of_a_grammar_without_tools_names_the_field_of_the_answer(grammars: Any) -> None:
    form, answer = OutputForm(reasoning=reasoning_formats()["think"]), Constraint.json_schema({"not": {}})
    with pytest.raises(InvalidRequest, match=r"constraint\.json_schema "):
        grammars(()).matcher(form, None, answer)
