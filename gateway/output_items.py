"""Divides an output into the items of Anthropic's and OpenAI's newer APIs: its reasoning, its text and its calls.

`message_objects` calls them content blocks, and `response_objects` output items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from specdec.client import Chunk, Completion
from specdec.contract.tools import AnswerText, OutputPart, ReasoningText, ToolCallDelta

REASONING: Final = "reasoning"
TEXT: Final = "text"
CALL: Final = "call"
Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class OutputItem:
    """One item of an output, as far as it has come."""

    index: int
    """Place in the output."""
    kind: Kind
    content: str = ""
    """The text, or the JSON text of a call's arguments."""
    call_id: str = ""
    name: str = ""
    """Name of the called tool; "" for other items."""


class Piece(NamedTuple):
    """The next part of an item."""

    item: OutputItem
    text: str
    chunk: Chunk | None
    """Tokens whose origin is told with this piece; None for those that another piece of their chunk tells."""


def items_of(completion: Completion) -> list[OutputItem]:
    """Return the items of a whole output, at least one: an output without reasoning and calls is an item of text."""
    found: list[OutputItem] = []
    if completion.reasoning:
        found.append(OutputItem(0, REASONING, completion.reasoning))
    if completion.text or not (completion.reasoning or completion.tool_calls):
        found.append(OutputItem(len(found), TEXT, completion.text))
    for call in completion.tool_calls:
        found.append(OutputItem(len(found), CALL, call.arguments, call.id, call.name))
    return found


class StreamedItems:
    """The items of one output that comes in chunks. They are those that `items_of` gives in the end."""

    def __init__(self) -> None:
        self._items: list[OutputItem] = []
        self._held: Chunk | None = None
        """Tokens before the first item, which have no text."""

    def pieces(self, chunk: Chunk) -> list[Piece]:
        """Return what a chunk adds. A chunk that adds nothing gives the last item an empty piece, if there is one."""
        chunk, self._held = chunk if self._held is None else _joined(self._held, chunk), None
        parts = chunk.parts or ((AnswerText(chunk.text),) if chunk.text else ())
        pieces = [Piece(*self._taken(part), None) for part in parts]
        if pieces:
            pieces[-1] = pieces[-1]._replace(chunk=chunk)
        elif self._items:
            pieces.append(Piece(self._items[-1], "", chunk))
        else:
            self._held = chunk
        return pieces

    def finish(self) -> Iterator[Piece]:
        """Yield the piece of an output that ends without any item."""
        if not self._items:
            yield Piece(self._begun(TEXT), "", self._held)

    def _taken(self, part: OutputPart) -> tuple[OutputItem, str]:
        """Return the item of a part, and its text."""
        if isinstance(part, ToolCallDelta):
            item = self._begun(CALL, part.id, part.name) if part.name else self._items[-1]
            text = part.arguments
        else:
            kind: Kind = REASONING if isinstance(part, ReasoningText) else TEXT
            is_open = bool(self._items) and self._items[-1].kind == kind
            item = self._items[-1] if is_open else self._begun(kind)
            text = part.text
        item.content += text
        return item, text

    def _begun(self, kind: Kind, call_id: str = "", name: str = "") -> OutputItem:
        self._items.append(OutputItem(len(self._items), kind, call_id=call_id, name=name))
        return self._items[-1]


def _joined(first: Chunk, second: Chunk) -> Chunk:
    """Return two chunks, the first of which has no text, as one."""
    return replace(
        second,
        index=first.index,
        token_ids=first.token_ids + second.token_ids,
        details=first.details + second.details,
    )
