"""Parts of outputs in each family's form: the message that they mean, whatever tokens the text came in."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from specdec.contract.output_form import OutputForm, ReasoningFormat
from specdec.contract.tools import AnswerText, OutputPart, ReasoningText, ToolCallDelta, joined_parts
from specdec.structured.output_parser import OutputParser
from specdec.structured.tool_formats import reasoning_formats
from tests.support.recorded_outputs import Recorded, form_of, num_symbols, parts_read, read, recorded
from tests.support.tool_models import FAMILIES

NUM_OUTPUTS = 200


def message_of(parts: list[OutputPart]) -> tuple[str, tuple[tuple[str, Any], ...]]:
    answer = "".join(part.text for part in parts if isinstance(part, AnswerText))
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for part in parts:
        if isinstance(part, ToolCallDelta):
            names[part.index] = names.get(part.index, "") + part.name
            arguments[part.index] = arguments.get(part.index, "") + part.arguments
    return answer, tuple((names[index], json.loads(arguments[index])) for index in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_gives_the_message_that_the_template_wrote(family: str) -> None:
    for seed in range(NUM_OUTPUTS):
        output = recorded(family, seed)
        parser, parts = read(output, family)
        assert message_of(parts) == (output.answer, output.calls), output
        assert parser.num_complete_calls == len(output.calls)


@pytest.mark.parametrize("num_outputs", [40, pytest.param(NUM_OUTPUTS, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_gives_the_same_parts_for_every_split_and_for_single_characters(
    family: str, num_outputs: int
) -> None:
    for seed in range(num_outputs):
        output = recorded(family, seed)
        whole = parts_read(output, family)
        size = num_symbols(output)
        assert parts_read(output, family, range(size)) == whole
        for cut in range(1, size):
            assert parts_read(output, family, [cut]) == whole, (output, cut)


@pytest.mark.parametrize("family", ["hermes", "qwen_xml", "gemma4"])
def test_markers_that_are_plain_text_give_the_same_message(family: str) -> None:
    num_compared = 0
    for seed in range(NUM_OUTPUTS):
        output = recorded(family, seed, markers=())
        if any(opener in text for opener in ("<tool_call>", "<|tool_call>") for text in [output.answer]):
            continue
        if family == "gemma4" and '<|"|>' in json.dumps(output.calls):
            continue
        num_compared += 1
        assert message_of(read(output, family)[1]) == (output.answer, output.calls), output
    assert num_compared > NUM_OUTPUTS / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_cut_is_given_as_far_as_it_came(family: str) -> None:
    """The parts of each beginning of an output are a beginning of its parts."""
    for seed in range(0, NUM_OUTPUTS, 10):
        output = recorded(family, seed)
        _, whole = _texts_by_part(read(output, family)[1])
        for length in range(num_symbols(output)):
            answer, calls = _texts_by_part(read(_cut(output, length), family)[1])
            assert len(calls) <= len(whole)
            for (name, arguments), (whole_name, whole_arguments) in zip(calls, whole, strict=False):
                assert name == whole_name
                assert whole_arguments.startswith(arguments)
            assert answer[: len(output.answer)] == output.answer[: len(answer)]


def test_the_id_and_the_name_come_once_and_before_any_argument() -> None:
    for family in FAMILIES:
        for seed in range(50):
            output = recorded(family, seed)
            _, parts = read(output, family, range(num_symbols(output)))
            calls = [part for part in parts if isinstance(part, ToolCallDelta)]
            for index in range(len(output.calls)):
                own = [call for call in calls if call.index == index]
                assert (own[0].id, own[0].name) == (f"id{index}", output.calls[index][0])
                assert own[0].arguments in ("", "{", "{}")
                assert not any(call.id or call.name for call in own[1:])


def test_an_opener_that_is_spelled_by_ordinary_tokens_stays_text() -> None:
    parser = OutputParser(form_of("hermes"), ["<tool_call>", "</tool_call>"], str)
    parts = [*parser.feed_text('Write <tool_call>\n{"name": "x"} yourself'), *parser.finish()]
    assert parts == [AnswerText('Write <tool_call>\n{"name": "x"} yourself')]


def test_the_beginning_of_an_opener_is_held_back_and_is_text_after_all() -> None:
    parser = OutputParser(form_of("hermes"), [], str)
    assert parser.feed_text("a <tool_") == [AnswerText("a ")]
    assert parser.feed_text("box") == [AnswerText("<tool_box")]
    assert parser.feed_text("\n<tool_call") == []
    assert parser.finish() == [AnswerText("\n<tool_call")]


THINK = reasoning_formats()["think"]


@pytest.mark.parametrize("tokens", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("begins_in_reasoning", [False, True])
def test_reasoning_is_separated_from_the_answer(tokens: tuple[str, ...], begins_in_reasoning: bool) -> None:
    form = OutputForm(reasoning=THINK, begins_in_reasoning=begins_in_reasoning)
    text = "First a < b.\n</thin\n</think>\n\nIt is <think> 4."
    pieces = [text] if begins_in_reasoning else ["<think>", "\n" + text]
    assert _read_reasoning(form, tokens, pieces) == [
        ReasoningText("First a < b.\n</thin"),
        AnswerText("It is <think> 4."),
    ]


@pytest.mark.parametrize("begins_in_reasoning", [False, True])
def test_reasoning_that_is_cut_is_reasoning(begins_in_reasoning: bool) -> None:
    form = OutputForm(reasoning=THINK, begins_in_reasoning=begins_in_reasoning)
    pieces = ["a\n</thi"] if begins_in_reasoning else ["<think>", "\na\n</thi"]
    assert _read_reasoning(form, (), pieces) == [ReasoningText("a\n</thi")]


def test_an_output_without_reasoning_is_an_answer() -> None:
    for text in ("Hello", "<thin", "<b>", ""):
        parts = _read_reasoning(OutputForm(reasoning=THINK), (), [text])
        assert "".join(part.text for part in parts if isinstance(part, AnswerText)) == text


def test_a_call_in_reasoning_is_reasoning_and_the_one_after_it_is_a_call() -> None:
    form = OutputForm("hermes", form_of("hermes").layout, THINK)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"<think>\nMaybe {call}?\n</think>\n\n{call}"
    for cut in range(1, len(text)):
        assert _read_reasoning(form, (), [text[:cut], text[cut:]]) == [
            ReasoningText(f"Maybe {call}?"),
            ToolCallDelta(0, "0", "now", "{}"),
        ]


@pytest.mark.parametrize("format_", reasoning_formats().values(), ids=lambda format_: format_.name)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_each_format_of_reasoning_is_read(format_: ReasoningFormat, has_tokens: bool) -> None:
    inner = f"why{format_.before_closer}"
    for begun in (False, True):
        parser = OutputParser(
            OutputForm(reasoning=format_, begins_in_reasoning=begun), format_.markers if has_tokens else (), str
        )
        feed = parser.feed_marker if has_tokens else parser.feed_text
        parts = [] if begun else feed(format_.opener)
        parts += parser.feed_text(format_.after_opener + inner)
        parts += [*feed(format_.closer), *parser.feed_text(format_.after_closer + "yes"), *parser.finish()]
        assert joined_parts(parts) == [ReasoningText("why"), AnswerText("yes")]


def test_a_declared_mark_without_line_breaks_is_read() -> None:
    form = OutputForm(reasoning=ReasoningFormat("declared", "[R]", "[/R]"), begins_in_reasoning=True)
    assert _read_reasoning(form, (), ["why\n[/R]yes"]) == [ReasoningText("why\n"), AnswerText("yes")]


def _read_reasoning(form: OutputForm, tokens: tuple[str, ...], pieces: list[str]) -> list[OutputPart]:
    parser = OutputParser(form, tokens, str)
    parts: list[OutputPart] = []
    for piece in pieces:
        is_first_marker = piece in tokens
        head, found, tail = piece.partition("</think>") if tokens and not is_first_marker else (piece, "", "")
        parts += parser.feed_marker(piece) if is_first_marker else parser.feed_text(head)
        if found:
            parts += [*parser.feed_marker(found), *parser.feed_text(tail)]
    return joined_parts([*parts, *parser.finish()])


def _texts_by_part(parts: list[OutputPart]) -> tuple[str, list[tuple[str, str]]]:
    answer = "".join(part.text for part in parts if isinstance(part, AnswerText))
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        if isinstance(part, ToolCallDelta):
            name, arguments = calls.get(part.index, ("", ""))
            calls[part.index] = (name + part.name, arguments + part.arguments)
    return answer, list(calls.values())


def _cut(output: Recorded, length: int) -> Recorded:
    pieces: list[tuple[str, bool]] = []
    for piece, is_marker in output.pieces:
        if length <= 0:
            break
        pieces.append((piece, True) if is_marker else (piece[:length], False))
        length -= 1 if is_marker else len(piece)
    return replace(output, pieces=tuple(pieces))
