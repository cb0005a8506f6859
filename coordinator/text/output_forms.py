"""Decides the form of a request's output, and makes one constraint of its tools, its reasoning and its own constraint.

Which formats a model uses is read from its checkpoint: from its own description of its outputs, else from what its chat
template writes for known calls, else from the settings. `constraints` calls this before it compiles the constraint.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from coordinator.requests import GenerationRequest
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.errors import InvalidRequest
from specdec.contract.output_form import Layout, OutputForm, ReasoningFormat
from specdec.contract.tools import ToolChoice, Tools
from specdec.structured.grammar import check_text
from specdec.structured.output_grammar import MALFORMED, ToolsRefused, output_constraint, problem_of
from specdec.structured.tool_formats import markers_of, reasoning_formats, tool_formats
from specdec.structured.tool_formats.declaration import ToolFormat
from specdec.structured.tool_formats.json_arguments import JsonArguments
from specdec.structured.tool_formats.probe import PROBED_TOOLS, first_fitting, layout_in, probed_messages, single_call

#: Value of a setting that lets the checkpoint decide.
AUTO = "auto"
#: Value of a setting that turns the reading of calls or of reasoning off.
NONE = "none"

#: Number of combinations of template arguments whose prompts' ends are remembered.
_MAX_REMEMBERED = 256
#: Length of the end of a prompt that tells whether reasoning has begun.
_MAX_END_CHARACTERS = 256
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class ParserNames:
    """Names of the formats of a coordinator's model, as its settings give them."""

    tools: str = AUTO
    reasoning: str = AUTO

    def check(self) -> None:
        """Raise InvalidRequest for a name without a format."""
        for field, name, known in (
            ("tool_parser", self.tools, tool_formats()),
            ("reasoning_parser", self.reasoning, reasoning_formats()),
        ):
            if name not in (AUTO, NONE, *known):
                names = ", ".join((AUTO, NONE, *known))
                raise InvalidRequest(f"{field} must be one of {names}, got {name!r}", field=field)


DEFAULT_PARSERS = ParserNames()


class OutputForms:
    """The forms of one model's outputs. Safe to share between threads."""

    def __init__(self, tokenizer: ServedTokenizer, names: ParserNames) -> None:
        self._tokenizer = tokenizer
        self._names = names
        self._ends: dict[tuple[str, bool], str] = {}
        """End of the prompt, by the arguments of the template and whether there are tools."""
        self._known_format: tuple[ToolFormat, Layout] | None = None
        self._is_format_sought = False

    def has_form(self, request: GenerationRequest) -> bool:
        """Return whether the output of a request may hold more than an answer."""
        return request.messages is not None and (request.tools is not None or self.reasoning_format is not None)

    def with_form(self, request: GenerationRequest, *, given_up: threading.Event) -> GenerationRequest:
        """Return a request that has a form, with it and with one constraint for all of the output.

        Blocks while the chat template runs, so call it in a thread.

        Raises:
            InvalidRequest: the model has no format of calls, or no chat template (NO_CHAT_TEMPLATE); a tool or the
                constraint cannot be used.
            GivenUp: `given_up` was set.
        """
        tools, answer = request.tools, request.sampling.constraint
        if answer is not None:
            check_text(answer)
        form = self._form(request, given_up)
        if form == OutputForm():
            return request
        try:
            constraint = output_constraint(form, tools, answer, self._tokenizer.marker_ids(markers_of(form)))
        except ToolsRefused as refusal:
            raise _refused(refusal) from refusal
        if tools is not None and tools.choice is ToolChoice.NONE:
            form = replace(form, tool_format_name="")
        has_parts = form.reasoning is not None or bool(form.tool_format_name)
        return replace(
            request,
            sampling=replace(request.sampling, constraint=constraint),
            output_form=form if has_parts else None,
        )

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Marks of the model's reasoning; None if it has none."""
        if self._names.reasoning != AUTO:
            return reasoning_formats().get(self._names.reasoning)
        fields = _fields(self._tokenizer.response_template)
        for name in _REASONING_FIELDS:
            opener, closer = fields.get(name, {}).get("open"), fields.get(name, {}).get("close")
            if isinstance(opener, str) and isinstance(closer, str):
                return _declared_reasoning(opener, closer)
        template = self._tokenizer.chat_template
        return next((format_ for format_ in reasoning_formats().values() if format_.closer in template), None)

    def _form(self, request: GenerationRequest, given_up: threading.Event) -> OutputForm:
        tools = request.tools
        form = OutputForm()
        if self.reasoning_format is not None:
            prompt = self._end_of_prompt(request.template_arguments_json, tools, given_up)
            form = _reasoning_form(self.reasoning_format, prompt)
        if tools is None:
            return form
        format_, layout = self._tool_format(given_up)
        names = {}
        for index, tool in enumerate(tools.definitions):
            try:
                names[tool.name] = format_.arguments.text_parameters(tool.parameters)
            except MALFORMED as error:
                raise _refused(ToolsRefused(index, problem_of(error))) from error
        return replace(
            form,
            tool_format_name=format_.name,
            layout=layout,
            text_parameters=names if any(names.values()) else None,
            names_tool=tools.choice is ToolChoice.NAMED,
        )

    def _end_of_prompt(self, arguments_json: str, tools: Tools | None, given_up: threading.Event) -> str:
        """Return the end of all prompts with these arguments of the template."""
        key = arguments_json, tools is not None
        if (end := self._ends.get(key)) is None:
            shown = None if tools is None else PROBED_TOOLS
            prompt = self._tokenizer.render_chat([{"role": "user", "content": "zq"}], arguments_json, shown, given_up)
            if len(self._ends) >= _MAX_REMEMBERED:
                self._ends.clear()
            end = self._ends[key] = prompt[-_MAX_END_CHARACTERS:].rstrip()
        return end

    def _tool_format(self, given_up: threading.Event) -> tuple[ToolFormat, Layout]:
        """Return the model's format of calls, with its layout. Raises InvalidRequest if there is none."""
        if not self._is_format_sought:
            self._known_format = self._find_tool_format(given_up)
            self._is_format_sought = True
        if self._known_format is None:
            raise InvalidRequest(
                f"tools cannot be used: the model {self._tokenizer.model!r} has no known format of tool calls; if it "
                "has been trained to call tools, name its format with --tool-parser of the coordinator",
                field="tools",
            )
        return self._known_format

    def _find_tool_format(self, given_up: threading.Event) -> tuple[ToolFormat, Layout] | None:
        formats = tool_formats()
        if self._names.tools == NONE:
            return None
        if self._names.tools != AUTO:
            named = formats[self._names.tools]
            prompts = self._probe(given_up)
            layouts = [layout for prompt in prompts if (layout := layout_in(prompt, named)) is not None]
            return named, layouts[0] if layouts else named.layout
        field = _fields(self._tokenizer.response_template).get("tool_calls", {})
        declared = [format_ for format_ in formats.values() if field.get("open") == format_.opener]
        is_json = field.get("content") == "json"
        declared.sort(key=lambda format_: isinstance(format_.arguments, JsonArguments) is not is_json)
        candidates = [*declared, *(format_ for format_ in formats.values() if format_ not in declared)]
        for prompt in self._probe(given_up):
            if (found := first_fitting(prompt, candidates)) is not None:
                return found
        return (declared[0], declared[0].layout) if declared else None

    def _probe(self, given_up: threading.Event) -> list[str]:
        """Return the prompts of a conversation with known calls, as far as the template renders them."""
        prompts, messages = [], probed_messages()
        without_text = [messages[0], messages[1] | {"content": None}]
        for probed in (messages, without_text, single_call(messages), single_call(without_text)):
            try:
                prompts.append(self._tokenizer.render_chat(probed, "", PROBED_TOOLS, given_up))
            except InvalidRequest as error:
                if error.reason == "NO_CHAT_TEMPLATE":
                    raise
        return prompts


def _refused(refusal: ToolsRefused) -> InvalidRequest:
    field = f"tools.definitions[{refusal.index}].parameters_json"
    return InvalidRequest(f"{field}: {refusal}", reason="CONSTRAINT_INVALID", field=field)


def _fields(response_template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a checkpoint's response template that are objects."""
    fields = response_template.get("fields")
    return {name: field for name, field in fields.items() if isinstance(field, Mapping)} if fields else {}


def _reasoning_form(reasoning: ReasoningFormat, prompt: str) -> OutputForm:
    """Return the form of an output after a prompt: reasoning may have begun there, or have ended already."""
    if prompt.endswith(reasoning.closer):
        return OutputForm()
    is_begun = prompt.endswith((reasoning.opener, (reasoning.opener + reasoning.after_opener).rstrip()))
    return OutputForm(reasoning=reasoning, begins_in_reasoning=is_begun)


def _declared_reasoning(opener: str, closer: str) -> ReasoningFormat:
    """Return the known format with these marks, or one with nothing but them."""
    for format_ in reasoning_formats().values():
        if (format_.opener, format_.closer) == (opener.strip(), closer.strip()):
            return format_
    return ReasoningFormat("declared", opener, closer)
