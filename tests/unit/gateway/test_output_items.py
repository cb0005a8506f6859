"""The items of a streamed output are those of the whole one, however its parts are divided into chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from gateway.output_items import CALL, REASONING, TEXT, OutputItem, StreamedItems, items_of
from specdec.client import Chunk, Completion, GenerationStats, ToolCall, Usage
from specdec.contract.tools import AnswerText, OutputPart, ReasoningText, ToolCallDelta

PARTS: list[OutputPart] = [
    ReasoningText("one "),
    ReasoningText("two"),
    AnswerText("hello"),
    AnswerText(" there"),
    ToolCallDelta(0, "call_a", "f", ""),
    ToolCallDelta(0, "", "", '{"x": '),
    ToolCallDelta(0, "", "", "1}"),
    ToolCallDelta(1, "call_b", "g", "{}"),
]
ITEMS = [
    OutputItem(0, REASONING, "one two"),
    OutputItem(1, TEXT, "hello there"),
    OutputItem(2, CALL, '{"x": 1}', "call_a", "f"),
    OutputItem(3, CALL, "{}", "call_b", "g"),
]


def chunk(index: int, parts: Sequence[OutputPart] = (), text: str = "") -> Chunk:
    said = "".join(part.text for part in parts if isinstance(part, AnswerText))
    return Chunk(index, (index,), said or text, (), None, tuple(parts))


def completion(text: str = "", reasoning: str = "", calls: Sequence[ToolCall] = ()) -> Completion:
    return Completion(
        "s", "r", text, (1,), "stop", Usage(1, 1, 0), GenerationStats.nothing(), tool_calls=tuple(calls),
        reasoning=reasoning,
    )  # fmt: skip


@pytest.mark.parametrize("cuts", [cuts for n in range(3) for cuts in itertools.combinations(range(1, len(PARTS)), n)])
def test_a_stream_has_the_items_of_the_whole_output(cuts: tuple[int, ...]) -> None:
    items = StreamedItems()
    bounds = itertools.pairwise((0, *cuts, len(PARTS)))
    pieces = [piece for begin, end in bounds for piece in items.pieces(chunk(begin, PARTS[begin:end]))]
    assert [*items.finish()] == []
    found = {piece.item.index: piece.item for piece in pieces}
    calls = [ToolCall("call_a", "f", '{"x": 1}'), ToolCall("call_b", "g", "{}")]
    assert [*found.values()] == ITEMS == items_of(completion("hello there", "one two", calls))
    for item in ITEMS:
        assert "".join(piece.text for piece in pieces if piece.item.index == item.index) == item.content
    assert sum(piece.chunk is not None for piece in pieces) == len(cuts) + 1


def test_an_output_without_parts_is_one_item_of_text() -> None:
    items = StreamedItems()
    pieces = [*items.pieces(chunk(0, text="a")), *items.pieces(chunk(1)), *items.pieces(chunk(2, text="b"))]
    assert [piece.text for piece in pieces] == ["a", "", "b"]
    assert pieces[0].item == OutputItem(0, TEXT, "ab")
    assert items_of(completion("ab")) == [OutputItem(0, TEXT, "ab")]


def test_tokens_before_the_first_item_are_told_with_it() -> None:
    items = StreamedItems()
    assert items.pieces(chunk(0)) == []
    (piece,) = items.pieces(chunk(1, [ToolCallDelta(0, "call_a", "f", "")]))
    assert piece.chunk is not None
    assert piece.chunk.token_ids == (0, 1)


def test_an_empty_output_is_an_empty_text() -> None:
    items = StreamedItems()
    assert items.pieces(chunk(0)) == []
    (piece,) = items.finish()
    assert (piece.item, piece.text) == (OutputItem(0, TEXT), "")
    assert piece.chunk == chunk(0)
    assert items_of(completion()) == [OutputItem(0, TEXT)]
