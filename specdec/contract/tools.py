"""The tools that a request offers to the model, and the parts of an output that may call them.

`specdec.structured` turns tools into a constraint of the output, and reads the calls back from its tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any


class ToolChoice(IntEnum):
    """The demand for tool calls; values equal the proto's `ToolChoice`."""

    AUTO = 1
    """The model decides."""
    NONE = 2
    """No tool is called."""
    REQUIRED = 3
    """At least one tool is called."""
    NAMED = 4
    """The named tool is called."""


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """One tool that an output may call."""

    name: str
    description: str = ""
    parameters_json: str = ""
    """JSON schema of the arguments; "" for a tool without any."""
    is_strict: bool = False
    """True if keywords of the schema that cannot be enforced refuse the request, instead of being ignored."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Schema of the arguments, which are an object."""
        schema: dict[str, Any] = json.loads(self.parameters_json) if self.parameters_json else {"properties": {}}
        return {"type": "object"} | schema

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters_json:
            function["parameters"] = json.loads(self.parameters_json)
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request, and what it demands of the calls."""

    definitions: tuple[ToolDefinition, ...]
    choice: ToolChoice = ToolChoice.AUTO
    name: str = ""
    """Name of the tool that NAMED demands; "" for any other choice."""
    is_parallel: bool = True
    """True if an output may hold several calls."""

    @property
    def callable_definitions(self) -> tuple[ToolDefinition, ...]:
        """Tools that the output may call under this choice."""
        if self.choice is ToolChoice.NONE:
            return ()
        if self.choice is ToolChoice.NAMED:
            return tuple(tool for tool in self.definitions if tool.name == self.name)
        return self.definitions


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call. The first part of a call has its id and its name, and no other part has."""

    index: int
    """Number of the call in the output."""
    id: str
    name: str
    arguments: str
    """Next part of the arguments as JSON."""


OutputPart = AnswerText | ReasoningText | ToolCallDelta
"""One piece of an output, as its readers get it."""


def joined_parts(parts: list[OutputPart]) -> list[OutputPart]:
    """Return the parts with neighbours of the same text, reasoning or call joined."""
    joined: list[OutputPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, AnswerText) and isinstance(last, AnswerText):
            joined[-1] = AnswerText(last.text + part.text)
        elif isinstance(part, ReasoningText) and isinstance(last, ReasoningText):
            joined[-1] = ReasoningText(last.text + part.text)
        elif isinstance(part, ToolCallDelta) and isinstance(last, ToolCallDelta) and part.index == last.index:
            joined[-1] = replace(last, arguments=last.arguments + part.arguments)
        else:
            joined.append(part)
    return joined
