"""The grammar of an output with tools, with reasoning, or with both, in llguidance's variant of Lark.

An output is reasoning, then an answer or calls. The answer is free text, or follows the request's own constraint. Free
text ends where the opener of a call is complete, from where on the grammar leaves no choice but a call. With calls that
are required, or a constraint for the answer, the output cannot end before they are complete, also not in reasoning.

Texts are written as literals, and markers that are single tokens by their ids. A marker that is plain text ends a lazy
lexeme, because free text could be longer otherwise.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from specdec.contract.constraint import Constraint, ConstraintKind
from specdec.contract.output_form import Layout, OutputForm
from specdec.contract.tools import ToolChoice, ToolDefinition, Tools
from specdec.structured.grammar import answer_expression, answer_line, enforcing_options, lark_of
from specdec.structured.json_schema import prepare
from specdec.structured.tool_formats import tool_formats
from specdec.structured.tool_formats.declaration import ToolFormat

_ANY_TEXT = r"/(.|\n)*/"


#: Errors that styles of arguments raise unless the parameters are a JSON schema that they can enforce.
MALFORMED = (ValueError, TypeError, AttributeError, KeyError, RecursionError)


def problem_of(error: Exception) -> str:
    """Return the sentence for a tool whose parameters raised one of `MALFORMED`."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return str(error)
    return f"must be a JSON schema whose parts have their types: {type(error).__name__}: {str(error)[:200]}"


class ToolsRefused(ValueError):
    """A tool's parameters cannot be written or enforced in the format of the model."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index
        """Number of the tool among those of the request."""


def output_constraint(
    form: OutputForm, tools: Tools | None, answer: Constraint | None, token_ids: Mapping[str, int]
) -> Constraint | None:
    """Return the constraint of a whole output; `answer` itself if the output is nothing but the answer.

    Args:
        form: form of the output.
        tools: tools that the request offers.
        answer: constraint of the answer; None: any text.
        token_ids: ids of the form's markers that are single tokens.

    Raises:
        ToolsRefused: a tool cannot be used with this format.
        InvalidRequest: the answer's constraint is not of its kind (CONSTRAINT_INVALID).
    """
    if form.reasoning is None and (tools is None or (tools.choice is ToolChoice.NONE and answer is not None)):
        return answer
    if tools is None and answer is None:
        return None
    return Constraint(ConstraintKind.STRUCTURAL, _OutputGrammar(form, tools, answer, token_ids).text())


class Rules:
    """The rules of one grammar (`GrammarRules` of the formats)."""

    def __init__(self, token_ids: Mapping[str, int], layout: Layout) -> None:
        self._token_ids = token_ids
        self._markers = re.compile("|".join(map(re.escape, token_ids))) if token_ids else None
        self._layout = layout
        self._lines: list[str] = []
        self._shared: dict[str, str] = {}

    def literal(self, text: str) -> str:
        """Return an expression for a fixed text, in which markers are single tokens."""
        pieces: list[str] = []
        end = 0
        for match in self._markers.finditer(text) if self._markers is not None else ():
            pieces += [quoted(text[end : match.start()]), f"<[{self._token_ids[match[0]]}]>"]
            end = match.end()
        return " ".join(piece for piece in (*pieces, quoted(text[end:])) if piece != '""') or '""'

    def text_until(self, closer: str) -> str:
        """Return an expression for any text up to and including `closer`."""
        if closer in self._token_ids:
            return f"{_ANY_TEXT} {self.literal(closer)}"
        return self._lazy(f"TEXT {quoted(closer)}")

    def begins_lazily(self, text: str) -> str:
        """Return an expression for a fixed text that ends any free text which could begin with it."""
        return self.literal(text) if text in self._token_ids else self._lazy(quoted(text))

    def json(self, schema: Mapping[str, Any], *, is_lenient: bool) -> str:
        """Return an expression for JSON of a schema in the template's own separators."""
        options = {
            "whitespace_flexible": False,
            "item_separator": re.escape(self._layout.item_separator).replace("\\ ", " "),
            "key_separator": re.escape(self._layout.key_separator).replace("\\ ", " "),
            **enforcing_options(is_lenient=is_lenient),
        }
        enforced = copy.deepcopy(dict(schema))
        prepare(enforced)
        return f"%json {json.dumps({**enforced, 'x-guidance': options})}"

    def rule(self, expression: str) -> str:
        """Add a rule; return its name."""
        return self.named_rule(f"r{len(self._lines)}", expression)

    def shared_rule(self, key: str, make: Callable[[], str]) -> str:
        """Return the name of the rule of a key, which is made at the first call."""
        if key not in self._shared:
            name = self._shared[key] = f"s{len(self._shared)}"
            self.named_rule(name, make())
        return self._shared[key]

    def named_rule(self, name: str, expression: str) -> str:
        self._lines.append(f"{name}: {expression}")
        return name

    def text(self, start: str) -> str:
        """Return the grammar whose whole text is `start`."""
        return "\n".join([f"start: {start}", *self._lines, f"TEXT: {_ANY_TEXT}"])

    def _lazy(self, expression: str) -> str:
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}[lazy]: {expression}")
        return name


def quoted(text: str) -> str:
    """Return a text as a literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


class _OutputGrammar:
    def __init__(
        self, form: OutputForm, tools: Tools | None, answer: Constraint | None, token_ids: Mapping[str, int]
    ) -> None:
        self._form = form
        self._tools = tools
        self._answer = answer
        self._token_ids = token_ids
        self._rules = Rules(token_ids, form.layout)
        self._user_grammar = ""

    def text(self) -> str:
        """Return the grammar: Lark, or JSON with two grammars if the answer's is one of Lark."""
        body = self._rules.named_rule("body", self._body())
        main = self._rules.text(self._with_reasoning(body))
        if self._tools is None and self._answer is not None:
            main = f"{answer_line(self._answer)}\n{main}"
        if not self._user_grammar:
            return main
        grammars = [{"lark_grammar": main}, {"name": "answer", "lark_grammar": self._user_grammar}]
        return json.dumps({"grammars": grammars}, ensure_ascii=False)

    def _with_reasoning(self, body: str) -> str:
        reasoning = self._form.reasoning
        if reasoning is None:
            return body
        has_fixed_body = self._answer is not None or (self._tools is not None and self._is_required(self._tools))
        after = f" {self._rules.literal(reasoning.after_closer)}" if has_fixed_body and reasoning.after_closer else ""
        thoughts = f"{self._rules.text_until(reasoning.closer)}{after} {body}"
        if self._form.begins_in_reasoning:
            return thoughts
        return f"{self._rules.begins_lazily(reasoning.opener)} {thoughts} | {body}"

    def _body(self) -> str:
        tools = self._tools
        if tools is None or not self._form.tool_format_name:
            return self._answer_expression() if self._answer is not None else "TEXT"
        format_ = tool_formats()[self._form.tool_format_name]
        if tools.choice is ToolChoice.NONE:
            return self._answer_expression() if self._answer is not None else self._text_without_calls(format_)
        calls = self._rules.named_rule("calls", self._calls(tools, format_))
        if self._is_required(tools):
            return f"{self._rules.literal(format_.opener)} {calls}"
        if self._answer is not None:
            return f"{self._rules.begins_lazily(format_.opener)} {calls} | {self._answer_expression()}"
        if format_.is_first_only:
            return f"{self._rules.literal(format_.opener)} {calls} | {self._text_without_calls(format_)}"
        return f"{self._rules.text_until(format_.opener)} {calls} | TEXT"

    @staticmethod
    def _is_required(tools: Tools) -> bool:
        return tools.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    def _text_without_calls(self, format_: ToolFormat) -> str:
        """Return an expression for text without an opener."""
        if format_.opener in self._token_ids:
            return "TEXT"
        before = "" if format_.is_first_only else "(?s:.*)"
        opener = re.sub(r"([^\w\s<>\"])", r"\\\1", format_.opener)
        self._rules.named_rule("FREE", rf"/(?s:.*)/ & ~/{before}{opener}(?s:.*)/")
        return "FREE"

    def _calls(self, tools: Tools, format_: ToolFormat) -> str:
        """Return an expression for all calls after the opener of the first."""
        call = self._rules.named_rule("call", self._call(tools, format_))
        rest = self._rules.literal(format_.first_head[len(format_.opener) :])
        more, between = "", self._form.layout.between
        if tools.is_parallel and tools.choice is not ToolChoice.NAMED and not format_.has_one_call:
            more = f"({self._rules.literal(between + format_.head)} {call})*"
            if between.isspace():  # models write it after the last call as well, which must not commit them to another
                more += f" ({self._rules.literal(between)})?"
        return f"{rest} {call} {more} {self._rules.literal(format_.list_close) if format_.list_close else ''}"

    def _call(self, tools: Tools, format_: ToolFormat) -> str:
        """Return an expression for a call from its name on."""
        callable_names = {tool.name for tool in tools.callable_definitions}
        return " | ".join(
            self._call_of(index, tool, format_)
            for index, tool in enumerate(tools.definitions)
            if tool.name in callable_names
        )

    def _call_of(self, index: int, tool: ToolDefinition, format_: ToolFormat) -> str:
        try:
            arguments = format_.arguments.grammar(
                self._rules, tool.parameters, self._form.layout, is_lenient=not tool.is_strict
            )
        except MALFORMED as error:
            raise ToolsRefused(index, problem_of(error)) from error
        head = self._rules.literal(tool.name + format_.middle)
        return f"{head} ({arguments}) {self._rules.literal(format_.tail)}"

    def _answer_expression(self) -> str:
        assert self._answer is not None  # the callers have checked it
        if self._answer.kind in (ConstraintKind.GRAMMAR, ConstraintKind.STRUCTURAL_TAG):
            self._user_grammar = lark_of(self._answer)
            return "@answer"
        return answer_expression(self._answer)
