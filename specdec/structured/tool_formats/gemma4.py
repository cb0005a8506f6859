"""Gemma 4: `call:NAME{key:value}` between two markers, with bare keys, and strings between two more markers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec.contract.output_form import Layout
from specdec.structured.tool_formats.declaration import Cursor, GrammarRules, ToolFormat
from specdec.structured.tool_formats.schema_types import resolved, types_of

_QUOTE = '<|"|>'
_BARE_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]*/"
#: Keywords of numbers, which are written as in JSON.
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: Keywords of a schema that this format follows, and those that constrain nothing.
_FOLLOWED = frozenset(
    {"type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "definitions"}
    | {"title", "description", "default", "examples", "nullable", "deprecated", "additionalProperties", "$schema"}
    | {"minItems", "maxItems", *_OF_NUMBERS}
)


class GemmaArguments:
    """Arguments as an object whose keys have no quotes."""

    def grammar(self, rules: GrammarRules, schema: Mapping[str, Any], layout: Layout, *, is_lenient: bool) -> str:
        """Return an expression for an object of the schema."""
        return _Schemas(rules, schema, layout, is_lenient=is_lenient).object(schema)

    def read_layout(self, written: str, layout: Layout) -> tuple[Layout, int] | None:
        """Return in which order the template writes keys, and how values that are true, false or null."""
        end = written.find("}")
        values = dict(re.findall(r"(\w+):([^,}]*)", written[: max(end, 0)]))
        if values.get("zqb") != f"{_QUOTE}zqvalue{_QUOTE}":
            return None
        true, null = values.get("zqa", layout.true), values.get("zqc", layout.null)
        false = "False" if true == "True" else "false"
        is_sorted = list(values) == sorted(values)
        return replace(layout, true=true, false=false, null=null, sorts_keys=is_sorted), end + 1

    def text_parameters(self, schema: Mapping[str, Any]) -> tuple[str, ...]:
        """Return no names: strings stand between markers."""
        return ()

    def cursor(self, layout: Layout, text_parameters: tuple[str, ...]) -> Cursor:
        """Return a cursor before the opening brace."""
        return _GemmaCursor()


class _Schemas:
    """Makes expressions for the values of a schema."""

    def __init__(self, rules: GrammarRules, root: Mapping[str, Any], layout: Layout, *, is_lenient: bool) -> None:
        self._rules = rules
        self._root = root
        self._layout = layout
        self._is_lenient = is_lenient

    def value(self, schema: Any) -> str:
        """Return an expression for a value. Raises ValueError for a keyword that cannot be enforced."""
        if isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
            key = f"{id(self._root)} {reference}"
            return self._rules.shared_rule(key, lambda: self.value(resolved(schema, self._root)))
        plain = resolved(schema, self._root)
        self._check(plain)
        if (values := plain.get("enum", [plain["const"]] if "const" in plain else None)) is not None:
            return f"({' | '.join(self._written(value) for value in values)})"
        choices = plain.get("anyOf") or plain.get("oneOf")
        if choices:
            return f"({' | '.join(self.value(choice) for choice in choices)})"
        types = types_of(plain, self._root)
        if not types:
            return self._any()
        return f"({' | '.join(self._of_type(name, plain) for name in sorted(types))})"

    def object(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for an object."""
        self._check(schema)
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or (not properties and schema.get("additionalProperties", True)):
            if schema.get("type") == "object" and properties is not None:
                return '"{" "}"'
            return self._any_object()
        names = sorted(properties, key=str.lower) if self._layout.sorts_keys else list(properties)
        required = schema.get("required") or ()
        pairs = [(f"{json.dumps(f'{name}:', ensure_ascii=False)} {self.value(properties[name])}", name in required)
                 for name in names]  # fmt: skip
        return f'"{{" {self._chain(pairs)} "}}"'

    def _chain(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Return an expression for pairs in their order with commas between them; some may be missing."""
        following, first = '""', '""'
        for pair, is_required in reversed(pairs):
            rest = self._rules.rule(following)
            next_first = self._rules.rule(first)
            following = f'"," {pair} {rest}' + ("" if is_required else f" | {rest}")
            first = f"{pair} {rest}" + ("" if is_required else f" | {next_first}")
        return self._rules.rule(first)

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> str:
        if name == "string":
            return f"{self._rules.literal(_QUOTE)} {self._rules.text_until(_QUOTE)}"
        if name == "boolean":
            return f'"{self._layout.true}" | "{self._layout.false}"'
        if name == "null":
            return f'"{self._layout.null}"'
        if name == "array":
            return self._array(schema)
        if name == "object":
            return self.object(schema)
        if name == "any object":
            return self._any_object()
        limits = {keyword: schema[keyword] for keyword in _OF_NUMBERS if keyword in schema}
        return self._rules.json({"type": name, **limits}, is_lenient=self._is_lenient)

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._rules.rule(self.value(schema["items"]) if "items" in schema else self._any())
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(fewest - 1, 0)},{"" if most is None else most - 1}}}'
        items = f"{item} {more}" if fewest else f"({item} {more})?"
        return f'"[" {items} "]"'

    def _written(self, value: Any) -> str:
        """Return an expression for one value. Raises ValueError for an object or a list."""
        if isinstance(value, str):
            return self._rules.literal(_QUOTE + value + _QUOTE)
        if isinstance(value, Mapping | list):
            raise ValueError("a value of enum or const is an object or a list, which this model's format cannot fix")
        words = {True: self._layout.true, False: self._layout.false, None: self._layout.null}
        is_word = value is None or isinstance(value, bool)
        return self._rules.literal(words[value] if is_word else json.dumps(value))

    def _any(self) -> str:
        names = ("string", "boolean", "null", "number", "array", "any object")
        return self._rules.shared_rule("gemma value", lambda: " | ".join(self._of_type(name, {}) for name in names))

    def _any_object(self) -> str:
        return self._rules.shared_rule(
            "gemma object", lambda: f'"{{" ({_BARE_KEY} ":" {self._any()} ("," {_BARE_KEY} ":" {self._any()})*)? "}}"'
        )

    def _check(self, schema: Mapping[str, Any]) -> None:
        others = sorted(schema.keys() - _FOLLOWED)
        if others and not self._is_lenient:
            raise ValueError(f"{others[0]} is not enforced for this model's format")


class _GemmaCursor:
    """Turns the arguments into JSON: quotes keys, and escapes strings."""

    def __init__(self) -> None:
        self.is_done = False
        self._opens: list[str] = []
        """Braces and brackets that are not closed."""
        self._is_in_string = False
        self._expects_key = False
        self._is_in_key = False
        self._held = ""
        """Beginning of a quote, perhaps."""

    def feed(self, symbol: str) -> str:
        """Take a character, or the quote that is one token."""
        self._held += symbol
        if self._held.endswith(_QUOTE):
            text = self._take_all(self._held[: -len(_QUOTE)])
            self._held, self._is_in_string = "", not self._is_in_string
            return text + '"'
        num_held = len(self._held)
        while not _QUOTE.startswith(self._held[len(self._held) - num_held :]):
            num_held -= 1
        cut = len(self._held) - num_held
        text, self._held = self._held[:cut], self._held[cut:]
        return self._take_all(text)

    def _take_all(self, text: str) -> str:
        return "".join(map(self._take, text))

    def _take(self, character: str) -> str:
        if self._is_in_string:
            return json.dumps(character, ensure_ascii=False)[1:-1]
        if self._is_in_key:
            self._is_in_key = character != ":"
            return character if self._is_in_key else '": '
        if self._expects_key and character != "}":
            self._expects_key, self._is_in_key = False, True
            return f'"{character}'
        self._expects_key = False
        if character in "{[":
            self._opens.append(character)
            self._expects_key = character == "{"
        elif character in "}]":
            self._opens.pop()
            self.is_done = not self._opens
        elif character == ",":
            self._expects_key = self._opens[-1] == "{"
            return ", "
        return character


FORMATS = (
    ToolFormat(
        name="gemma4",
        opener="<|tool_call>",
        head="<|tool_call>call:",
        middle="",
        tail="<tool_call|>",
        arguments=GemmaArguments(),
        layout=Layout(sorts_keys=True),
        markers=("<|tool_call>", "<tool_call|>", _QUOTE),
    ),
)
