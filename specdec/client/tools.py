"""Tools as `generate` takes them, in OpenAI's form, and the calls that an output holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.client.fields import as_json, assign
from specdec.contract.errors import InvalidRequest
from specdec.contract.tools import AnswerText, OutputPart, ReasoningText, ToolCallDelta, ToolChoice
from specdec.v1 import coordinator_pb2 as pb

_CHOICES = {"auto": ToolChoice.AUTO, "none": ToolChoice.NONE, "required": ToolChoice.REQUIRED}
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an output."""

    id: str
    """Id that the answer to the call names as `tool_call_id`."""
    name: str
    arguments: str
    """JSON text of the arguments; of a call that the token limit cut, its beginning."""

    def for_message(self) -> dict[str, Any]:
        """Return the call as `tool_calls` of an assistant's message holds it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def fill_tools(target: pb.Tools, tools: Sequence[Mapping[str, Any]], choice: Any, parallel: Any) -> None:
    """Write tools into a message.

    Args:
        target: message to fill.
        tools: tools of the form `{"type": "function", "function": {...}}`, or the function objects alone.
        choice: "auto", "none", "required", or an object that names a tool; None: the server's default.
        parallel: whether an output may hold several calls; None: the server's default.

    Raises:
        InvalidRequest: a tool or the choice has another form, or a value does not fit its field.
    """
    target.SetInParent()
    for index, tool in enumerate(tools):
        _fill_definition(target.definitions.add(), tool, f"tools[{index}]")
    if isinstance(choice, str) and choice in _CHOICES:
        assign(target, "choice", int(_CHOICES[choice]), "tools.")
    elif choice is not None:
        assign(target, "choice", int(ToolChoice.NAMED), "tools.")
        assign(target, "name", _chosen_name(choice), "tools.")
    if parallel is not None:
        assign(target, "parallel", parallel, "tools.")


def read_parts(messages: Iterable[pb.OutputPart]) -> tuple[OutputPart, ...]:
    """Return the parts of a chunk; those of a kind that this version does not know are left out."""
    return tuple(part for message in messages if (part := _read_part(message)) is not None)


def calls_of(parts: Iterable[OutputPart]) -> tuple[ToolCall, ...]:
    """Return the calls whose parts an output holds."""
    calls: dict[int, ToolCall] = {}
    for part in parts:
        if isinstance(part, ToolCallDelta):
            call = calls.get(part.index, ToolCall("", "", ""))
            calls[part.index] = ToolCall(call.id + part.id, call.name + part.name, call.arguments + part.arguments)
    return tuple(calls[index] for index in sorted(calls))


def reasoning_of(parts: Iterable[OutputPart]) -> str:
    """Return the reasoning that the parts of an output hold."""
    return "".join(part.text for part in parts if isinstance(part, ReasoningText))


def _read_part(message: pb.OutputPart) -> OutputPart | None:
    kind = message.WhichOneof("part")
    if kind == "text":
        return AnswerText(message.text)
    if kind == "reasoning":
        return ReasoningText(message.reasoning)
    call = message.tool_call
    return ToolCallDelta(call.index, call.id, call.name, call.arguments) if kind == "tool_call" else None


def _fill_definition(entry: pb.ToolDefinition, tool: Any, field: str) -> None:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else tool
    if isinstance(tool, Mapping) and function is None:  # the Responses API's form has the fields beside the type
        function = {name: value for name, value in tool.items() if name != "type"}
    if not isinstance(function, Mapping) or not {"name"} <= function.keys() <= set(_FUNCTION_FIELDS):
        got = ", ".join(map(str, function)) if isinstance(function, Mapping) else type(function).__name__
        raise InvalidRequest(
            f"{field} must be a function with a name, and may have description, parameters and strict; got {got}",
            field=field,
        )
    assign(entry, "name", function["name"], f"{field}.")
    if function.get("description") is not None:
        assign(entry, "description", function["description"], f"{field}.")
    if function.get("parameters") is not None:
        entry.parameters_json = as_json(function["parameters"], f"{field}.parameters")
    if function.get("strict") is not None:
        assign(entry, "is_strict", function["strict"], f"{field}.")


def _chosen_name(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        function = choice.get("function", choice)
        if isinstance(function, Mapping) and "name" in function:
            return function["name"]
    raise InvalidRequest(
        'tool_choice must be "auto", "none", "required", or {"type": "function", "function": {"name": ...}}, got '
        f"{ascii(choice)[:80]}",
        field="tool_choice",
    )
