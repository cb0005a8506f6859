"""Qwen 3.5 and Qwen 3 Coder: each parameter stands between two tags, strings as bare text and other values as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.contract.output_form import Layout
from specdec.structured.tool_formats.declaration import Cursor, GrammarRules, ToolFormat
from specdec.structured.tool_formats.schema_types import (
    fixed_texts,
    may_be_text,
    types_of,
    unenforced_text_keywords,
)

_OPEN, _OPEN_END = "<parameter=", ">\n"
_CLOSE = "\n</parameter>\n"
_END = "</function>"


class XmlArguments:
    """Arguments as tagged parameters, ended by the tag that closes the function."""

    def grammar(self, rules: GrammarRules, schema: Mapping[str, Any], layout: Layout, *, is_lenient: bool) -> str:
        """Return an expression for the parameters in the order of the schema."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        expressions = []
        for name, value_schema in properties.items():
            if _OPEN_END[0] in name or "\n" in name:
                raise ValueError(f"the parameter {name[:64]!r} has a name that this model's format cannot write")
            value = _value(rules, value_schema, schema, layout, name, is_lenient=is_lenient)
            parameter = f"{rules.literal(_OPEN + name + _OPEN_END)} {value}"
            expressions.append(parameter if name in required else f"({parameter})?")
        missing = [name for name in required if name not in properties]
        if missing and not is_lenient:
            raise ValueError(f"the parameter {missing[0][:64]!r} is required and has no schema")
        return " ".join([*expressions, rules.literal(_END)])

    def read_layout(self, written: str, layout: Layout) -> tuple[Layout, int] | None:
        """Return how the template writes values that are true, false or null."""
        end = written.find(_END)
        values = dict(re.findall(r"<parameter=(\w+)>\n(.*?)\n</parameter>\n", written[: max(end, 0)], re.DOTALL))
        if "zqb" not in values:
            return None
        true, null = values.get("zqa", layout.true), values.get("zqc", layout.null)
        false = "False" if true == "True" else "false"
        return replace(layout, true=true, false=false, null=null), end + len(_END)

    def text_parameters(self, schema: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the parameters that may be strings."""
        properties = schema.get("properties") or {}
        return tuple(name for name, value_schema in properties.items() if may_be_text(value_schema, schema))

    def cursor(self, layout: Layout, text_parameters: tuple[str, ...]) -> Cursor:
        """Return a cursor before the first parameter."""
        return _XmlCursor(layout, text_parameters)


def _value(
    rules: GrammarRules,
    schema: Any,
    root: Mapping[str, Any],
    layout: Layout,
    name: str,
    *,
    is_lenient: bool,
) -> str:
    """Return an expression for a value and the tag after it."""
    close = rules.literal(_CLOSE)
    if may_be_text(schema, root):
        if (texts := fixed_texts(schema, root)) is not None:
            return f"({' | '.join(rules.literal(text) for text in texts)}) {close}"
        keywords = unenforced_text_keywords(schema, root)
        if keywords and not is_lenient:
            raise ValueError(f"the parameter {name[:64]!r} is a string, for which {keywords[0]} is not enforced")
        return rules.text_until(_CLOSE)
    types = types_of(schema, root)
    words = {"true": layout.true, "false": layout.false} if types == {"boolean"} else {}
    if "null" in types and layout.null != "null":
        words |= {"null": layout.null}
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    expression = rules.json({**definitions, **(schema if isinstance(schema, Mapping) else {})}, is_lenient=is_lenient)
    if types == {"boolean"}:
        expression = " | ".join(rules.literal(word) for word in words.values())
    elif words:
        expression = f"{expression} | {rules.literal(words['null'])}"
    return f"({expression}) {close}"


class _XmlCursor:
    """Turns tagged parameters into a JSON object. Text that may be the beginning of a tag is held back."""

    def __init__(self, layout: Layout, text_parameters: tuple[str, ...]) -> None:
        self.is_done = False
        self._words = {layout.true: "true", layout.false: "false", layout.null: "null"}
        self._text_parameters = text_parameters
        self._held = ""
        """Text that is not given yet."""
        self._take = self._take_tag
        self._is_empty = True
        self._is_begun = False
        """True after a part of a JSON value was given, so that the value cannot be a word of the template."""

    def feed(self, symbol: str) -> str:
        self._held += symbol
        return self._take()

    def _take_tag(self) -> str:
        """Wait for a whole tag that opens a parameter, or for the end."""
        if self._held == _END:
            self.is_done = True
            return "{}" if self._is_empty else "}"
        if not (self._held.startswith(_OPEN) and self._held.endswith(_OPEN_END)):
            return ""
        name = self._held[len(_OPEN) : -len(_OPEN_END)]
        begin = "{" if self._is_empty else ", "
        self._held, self._is_empty, self._is_begun = "", False, False
        is_text = name in self._text_parameters
        self._take = self._take_text if is_text else self._take_json
        return f"{begin}{json.dumps(name, ensure_ascii=False)}: " + ('"' if is_text else "")

    def _take_text(self) -> str:
        if self._held.endswith(_CLOSE):
            text = self._held[: -len(_CLOSE)]
            self._held, self._take = "", self._take_tag
            return json.dumps(text, ensure_ascii=False)[1:-1] + '"'
        text = self._final()
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def _take_json(self) -> str:
        if self._held.endswith(_CLOSE):
            text = self._held[: -len(_CLOSE)]
            self._held, self._take = "", self._take_tag
            return text if self._is_begun else self._words.get(text, text)
        value = self._held[: self._num_final()]
        if not self._is_begun and any(word.startswith(value) for word in self._words):
            return ""
        self._is_begun = True
        return self._final()

    def _final(self) -> str:
        """Take the held text that cannot be the beginning of the closing tag."""
        num_final = self._num_final()
        text, self._held = self._held[:num_final], self._held[num_final:]
        return text

    def _num_final(self) -> int:
        held = self._held
        lengths = range(min(len(held), len(_CLOSE) - 1), -1, -1)
        return len(held) - next(length for length in lengths if held.endswith(_CLOSE[:length]))


FORMATS = (
    ToolFormat(
        name="qwen_xml",
        opener="<tool_call>",
        head="<tool_call>\n<function=",
        middle=">\n",
        tail="\n</tool_call>",
        arguments=XmlArguments(),
        layout=Layout(before="\n\n", between="\n"),
        markers=("<tool_call>", "</tool_call>"),
    ),
)
