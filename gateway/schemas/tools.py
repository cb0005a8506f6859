"""Tools and the choice among them in OpenAI's APIs, and the options of `generate` that they become.

The coordinator checks names, schemas and the choice, and its errors name the fields as this API does
(`gateway.http_errors`). Types of tools and of choices that it does not know are refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.schemas.common import Flag, FreeObject, Items, Request, Text, refuse
from specdec.contract.errors import InvalidRequest

MAX_TOOLS = 128
#: Choices that are a word.
_WORDS = ("none", "auto", "required")

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Amount of reasoning. Chat templates read it as `reasoning_effort`, and as `enable_thinking` whether there is any."""
Definition = dict[str, Any]
"""A tool as the SDK takes it."""


class Function(Request):
    """A function that the model may call."""

    name: Text
    """Name: 1 to 64 letters, digits, dashes and underscores."""
    description: Text | None = None
    """Description for the model."""
    parameters: FreeObject | None = None
    """JSON schema of the arguments, which are an object; absent: there are none."""
    strict: Flag | None = None
    """true: every keyword of the schema is enforced, or the request refused. Else keywords that cannot be enforced are
    ignored, and the answer names them under `specdec.constraint_warnings`."""

    def definition(self) -> Definition:
        """Return the tool as the SDK takes it."""
        return definition(self.name, self.description, self.parameters, self.strict)


class ChatTool(Request):
    """A tool in OpenAI's chat API."""

    type: Text = "function"
    """Only "function" is supported."""
    function: Function | None = None
    """The function."""


class ResponseTool(Request):
    """A tool in OpenAI's Responses API, which has the function's fields beside the type."""

    type: Text = "function"
    """Only "function" is supported."""
    name: Text | None = None
    """Name: 1 to 64 letters, digits, dashes and underscores."""
    description: Text | None = None
    """Description for the model."""
    parameters: FreeObject | None = None
    """JSON schema of the arguments, which are an object; absent: there are none."""
    strict: Flag | None = None
    """true: every keyword of the schema is enforced, or the request refused. Else as in /v1/chat/completions."""

    def echo(self) -> Definition:
        """Return the tool as a response repeats it."""
        fields = {"description": self.description, "parameters": self.parameters, "strict": bool(self.strict)}
        return {"type": "function", "name": self.name, **fields}


ChatTools = Annotated[Items[ChatTool], Field(max_length=MAX_TOOLS)]
ResponseTools = Annotated[Items[ResponseTool], Field(max_length=MAX_TOOLS)]


def definition(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> Definition:
    """Return a tool as the SDK takes it."""
    fields = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def chat_definitions(tools: Sequence[ChatTool] | None) -> list[Definition]:
    """Return the tools of a chat. Raises InvalidRequest for a tool of another type."""
    return [_function_of(tool, f"tools[{index}]").definition() for index, tool in enumerate(tools or ())]


def response_definitions(tools: Sequence[ResponseTool] | None) -> list[Definition]:
    """Return the tools of a response. Raises InvalidRequest for a tool of another type, or without a name."""
    found = []
    for index, tool in enumerate(tools or ()):
        require_function(tool.type, f"tools[{index}].type")
        if tool.name is None:
            raise InvalidRequest(f"tools[{index}].name: is required", field=f"tools[{index}].name")
        found.append(definition(tool.name, tool.description, tool.parameters, tool.strict))
    return found


def require_function(kind: str, field: str) -> None:
    """Raise InvalidRequest for a type of tools or choices other than a function."""
    if kind != "function":
        raise refuse(field, f"it must be function, got {kind[:64]!r}")


def read_choice(choice: Any) -> str | Mapping[str, Any] | None:
    """Return a choice of tools as the SDK takes it. Raises InvalidRequest for any other."""
    if choice is None or choice in _WORDS:
        return choice  # type: ignore[no-any-return]
    if not isinstance(choice, Mapping) or not isinstance(choice.get("type"), str):
        words = ", ".join(_WORDS)
        raise InvalidRequest(
            f"tool_choice: must be {words} or an object that names a function, got {ascii(choice)[:80]}",
            field="tool_choice",
        )
    require_function(choice["type"], "tool_choice.type")
    nested = choice.get("function")
    name = nested.get("name") if isinstance(nested, Mapping) else choice.get("name")
    if not isinstance(name, str):
        field = "tool_choice.name" if nested is None else "tool_choice.function.name"
        raise InvalidRequest(f"{field}: must be the name of a tool", field=field)
    return named_choice(name)


def named_choice(name: str) -> Mapping[str, Any]:
    """Return the choice of one tool."""
    return {"type": "function", "function": {"name": name}}


def tool_options(
    definitions: Sequence[Definition], choice: str | Mapping[str, Any] | None, is_parallel: bool | None
) -> dict[str, Any]:
    """Return the options of `generate`. Raises InvalidRequest for a choice that demands a call without tools."""
    if not definitions:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: needs tools", field="tool_choice")
        return {}
    return {"tools": definitions, "tool_choice": choice, "parallel_tool_calls": is_parallel}


def template_arguments(given: FreeObject | None, effort: Effort | None) -> FreeObject | None:
    """Return the variables of the chat template; those that the request states itself come first."""
    if effort is None:
        return given
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} | (given or {})


def _function_of(tool: ChatTool, field: str) -> Function:
    require_function(tool.type, f"{field}.type")
    if tool.function is None:
        raise InvalidRequest(f"{field}.function: is required", field=f"{field}.function")
    return tool.function
