"""Reads reasoning, answer and tool calls from an output, symbol by symbol.

A symbol is one character of text, or a marker that is a single token. Whatever tokens the symbols came in, the parts
are the same, so a replay of an output gives the parts again. Outputs follow the grammar of their form
(`output_grammar`), so a call ends where its arguments do, whatever its strings contain. A call that is cut is given as
far as it came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence

from specdec.contract.output_form import OutputForm
from specdec.contract.tools import AnswerText, OutputPart, ReasoningText, ToolCallDelta, joined_parts
from specdec.structured.tool_formats import tool_formats
from specdec.structured.tool_formats.declaration import ToolFormat

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")

Symbols = tuple[str, ...]
TextKind = type[AnswerText] | type[ReasoningText]


class OutputParser:
    """The parts of one output. One object reads one output."""

    def __init__(self, form: OutputForm, tokens: Collection[str], id_of: Callable[[int], str]) -> None:
        """
        Args:
            form: form of the output.
            tokens: the form's markers that are single tokens; the others are read as characters.
            id_of: returns the id of the call with an index.
        """
        self._form = form
        self._markers = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._id_of = id_of
        self._parts: list[OutputPart] = []
        self._held: list[str] = []
        """Symbols that may be the beginning of a marker, and are text otherwise."""
        self._held_kind: TextKind | None = None
        """Kind of the text that is searched for markers; None while no text is."""
        self._starts: frozenset[str] | None = None
        """First symbols of these markers, which may stand anywhere in the text; None if a marker has one place."""
        self._unread: list[str] = []
        self.num_complete_calls = 0
        self.is_reasoning = False
        """True from the opener of the reasoning, or its beginning in the prompt, to its closer."""
        self._reader = self._read()
        next(self._reader)

    def feed_text(self, text: str) -> list[OutputPart]:
        """Take text; return the parts that are final now."""
        if self._starts is not None and not self._held and self._starts.isdisjoint(text):
            return [self._held_kind(text)] if text and self._held_kind else []
        for character in text:
            self._reader.send(character)
        return self._taken()

    def feed_marker(self, marker: str) -> list[OutputPart]:
        """Take a token that is a marker; return the parts that are final now."""
        self._reader.send(marker)
        return self._taken()

    def finish(self) -> list[OutputPart]:
        """End the output; return the text that was held back."""
        held, self._held = "".join(self._held), []
        return [self._held_kind(held)] if held and self._held_kind is not None else []

    def _taken(self) -> list[OutputPart]:
        parts, self._parts = self._parts, []
        return joined_parts(parts)

    # ---- the output as a whole -----------------------------------------------------------------------------------

    def _read(self) -> Generator[None, str]:
        """Read an output; each `yield` waits for a symbol."""
        if self._form.reasoning is not None:
            yield from self._read_reasoning()
        if not self._form.tool_format_name:
            yield from self._find((), AnswerText)
            return
        format_ = tool_formats()[self._form.tool_format_name]
        opener = self._symbols(format_.opener)
        if not format_.is_first_only:
            yield from self._find((self._symbols(self._form.layout.before) + opener, opener), AnswerText)
        elif not (yield from self._begins_with(opener, AnswerText)):
            yield from self._find((), AnswerText)
        yield from self._read_calls(format_, self._symbols(format_.first_head)[len(opener) :])

    def _read_reasoning(self) -> Generator[None, str]:
        format_ = self._form.reasoning
        assert format_ is not None  # the caller has checked it
        is_begun = self._form.begins_in_reasoning
        if not is_begun and not (yield from self._begins_with(self._symbols(format_.opener), AnswerText)):
            return
        self.is_reasoning = True
        yield from self._skip(format_.after_opener)
        closer = self._symbols(format_.closer)
        yield from self._find((self._symbols(format_.before_closer) + closer, closer), ReasoningText)
        self.is_reasoning = False
        yield from self._skip(format_.after_closer)

    def _read_calls(self, format_: ToolFormat, head: Symbols) -> Generator[None, str]:
        """Read calls from `head`, the rest of what precedes the first name. Nothing that follows them is a part."""
        index = 0
        next_head = self._symbols(self._form.layout.between + format_.head)
        yield from self._pass(head)
        while True:
            yield from self._read_call(format_, index)
            index += 1
            if not (yield from self._begins_with(next_head, None)):
                break
        while True:
            yield from self._next()

    def _read_call(self, format_: ToolFormat, index: int) -> Generator[None, str]:
        name = ""
        while (symbol := (yield from self._next())) in _NAME_CHARACTERS:
            name += symbol
        self._unread.append(symbol)
        self._parts.append(ToolCallDelta(index, self._id_of(index), name, ""))
        yield from self._pass(self._symbols(format_.middle))
        cursor = format_.arguments.cursor(self._form.layout, (self._form.text_parameters or {}).get(name, ()))
        while not cursor.is_done:
            if arguments := cursor.feed((yield from self._next())):
                self._parts.append(ToolCallDelta(index, "", "", arguments))
        yield from self._pass(self._symbols(format_.tail))
        self.num_complete_calls += 1

    # ---- symbols -------------------------------------------------------------------------------------------------

    def _symbols(self, text: str) -> Symbols:
        """Return the symbols of a text of the format."""
        symbols: list[str] = []
        end = 0
        for match in self._markers.finditer(text) if self._markers is not None else ():
            symbols += [*text[end : match.start()], match[0]]
            end = match.end()
        return (*symbols, *text[end:])

    def _next(self) -> Generator[None, str, str]:
        if self._unread:
            return self._unread.pop(0)
        return (yield)

    def _find(self, patterns: Sequence[Symbols], kind: TextKind) -> Generator[None, str]:
        """Give text of a kind up to the first pattern, which is taken too. Without a pattern, all that follows."""
        self._held_kind, self._starts = kind, frozenset(pattern[0] for pattern in patterns)
        held = self._held
        while True:
            held.append((yield from self._next()))
            while held and not any(pattern[: len(held)] == tuple(held) for pattern in patterns):
                self._parts.append(kind(held.pop(0)))
            if tuple(held) in patterns:
                held.clear()
                self._held_kind = self._starts = None
                return

    def _begins_with(self, pattern: Symbols, kind: TextKind | None) -> Generator[None, str, bool]:
        """Take a pattern if it is what follows, and return whether it is. Until then it may be text of a kind."""
        self._held_kind = kind
        held = self._held
        while len(held) < len(pattern):
            held.append((yield from self._next()))
            if held[-1] != pattern[len(held) - 1]:
                self._unread = [*held, *self._unread]
                held.clear()
                self._held_kind = None
                return False
        held.clear()
        self._held_kind = None
        return True

    def _skip(self, text: str) -> Generator[None, str]:
        """Take the symbols of a text as far as they are what follows."""
        for expected in self._symbols(text):
            if (symbol := (yield from self._next())) != expected:
                self._unread.insert(0, symbol)
                return

    def _pass(self, symbols: Symbols) -> Generator[None, str]:
        """Take symbols that the grammar demands."""
        for _ in symbols:
            yield from self._next()
