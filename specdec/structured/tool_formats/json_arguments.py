"""Arguments that are written as a JSON object, as most formats write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.contract.output_form import Layout
from specdec.structured.tool_formats.declaration import Cursor, GrammarRules


class JsonArguments:
    """Arguments as JSON. Their text is given as it was generated."""

    def grammar(self, rules: GrammarRules, schema: Mapping[str, Any], layout: Layout, *, is_lenient: bool) -> str:
        """Return an expression for JSON of the schema; `rules` knows the separators."""
        return rules.json(schema, is_lenient=is_lenient)

    def read_layout(self, written: str, layout: Layout) -> tuple[Layout, int] | None:
        """Return the separators that the template writes, if it writes the same ones everywhere."""
        try:
            arguments, length = json.JSONDecoder().raw_decode(written)
        except ValueError:
            return None
        if not isinstance(arguments, dict):
            return None
        match = re.match(r'\{"\w+"(\W+)"\w+"(\W+)"', written)
        if match is not None:
            separators = match[2], match[1]
            if json.dumps(arguments, separators=separators, ensure_ascii=False) == written[:length]:
                layout = replace(layout, item_separator=separators[0], key_separator=separators[1])
        return layout, length

    def text_parameters(self, schema: Mapping[str, Any]) -> tuple[str, ...]:
        """Return no names: all values are JSON."""
        return ()

    def cursor(self, layout: Layout, text_parameters: tuple[str, ...]) -> Cursor:
        """Return a cursor before the opening brace."""
        return JsonCursor()


class JsonCursor:
    """Finds the end of a JSON object: the brace that closes the first one, outside strings."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, symbol: str) -> str:
        """Return the symbol, which is a part of the object as it is."""
        if self._is_in_string:
            self._take_in_string(symbol)
        elif symbol == '"':
            self._is_in_string = True
        elif symbol in "{[":
            self._depth += 1
        elif symbol in "}]":
            self._depth -= 1
            self.is_done = self._depth <= 0
        return symbol

    def _take_in_string(self, symbol: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif symbol == "\\":
            self._is_escaped = True
        elif symbol == '"':
            self._is_in_string = False
