"""Tools in requests of the SDK, and calls in its results."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.client import AnswerText, ReasoningText, ToolCall, ToolCallDelta
from specdec.client.request import GenerateOptions, build_request
from specdec.client.tools import calls_of, read_parts, reasoning_of
from specdec.contract.errors import InvalidRequest
from specdec.v1 import coordinator_pb2 as pb

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}


def tools_of(tools: Any, **options: Any) -> pb.Tools:
    settings = GenerateOptions(tools=tools, **options)
    return build_request([{"role": "user", "content": "Q"}], settings).tools


@pytest.mark.parametrize(
    "tool", [FUNCTION, {"type": "function", "function": FUNCTION}, {"type": "function"} | FUNCTION]
)
def test_a_tool_is_accepted_in_each_form(tool: Any) -> None:
    (definition,) = tools_of([tool]).definitions
    assert definition == pb.ToolDefinition(
        name="f", description="d", parameters_json='{"type": "object"}', is_strict=True
    )


@pytest.mark.parametrize(
    ("choice", "expected", "name"),
    [
        (None, pb.TOOL_CHOICE_UNSPECIFIED, ""),
        ("auto", pb.TOOL_CHOICE_AUTO, ""),
        ("none", pb.TOOL_CHOICE_NONE, ""),
        ("required", pb.TOOL_CHOICE_REQUIRED, ""),
        ({"type": "function", "function": {"name": "f"}}, pb.TOOL_CHOICE_NAMED, "f"),
        ({"type": "function", "name": "f"}, pb.TOOL_CHOICE_NAMED, "f"),
    ],
)
def test_the_choice_is_accepted_in_each_form(choice: Any, expected: int, name: str) -> None:
    tools = tools_of([FUNCTION], tool_choice=choice)
    assert (tools.choice, tools.name) == (expected, name)


def test_parallel_calls_are_the_servers_default_unless_given() -> None:
    assert not tools_of([FUNCTION]).HasField("parallel")
    assert tools_of([FUNCTION], parallel_tool_calls=False).parallel is False


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"name": "f", "returns": {}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ({"tools": [{"name": 3}]}, "tools[0].name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": "f"}, "tool_choice"),
        ({"tools": [FUNCTION], "parallel_tool_calls": "yes"}, "tools.parallel"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "parallel_tool_calls": True}, "parallel_tool_calls"),
    ],
)
def test_tools_of_another_form_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        tools_of(options.pop("tools"), **options)
    assert error.value.field == field


def test_the_parts_of_a_stream_join_to_its_calls() -> None:
    messages = [
        pb.OutputPart(reasoning="Hm"),
        pb.OutputPart(text="Yes"),
        pb.OutputPart(tool_call=pb.ToolCallDelta(index=0, id="a", name="f")),
        pb.OutputPart(tool_call=pb.ToolCallDelta(index=0, arguments='{"x"')),
        pb.OutputPart(),
        pb.OutputPart(tool_call=pb.ToolCallDelta(index=1, id="b", name="g", arguments="{}")),
        pb.OutputPart(tool_call=pb.ToolCallDelta(index=0, arguments=": 1}")),
    ]
    parts = read_parts(messages)
    assert parts[:3] == (ReasoningText("Hm"), AnswerText("Yes"), ToolCallDelta(0, "a", "f", ""))
    assert calls_of(parts) == (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", "{}"))
    assert reasoning_of(parts) == "Hm"
    assert calls_of(parts)[1].for_message() == {
        "id": "b",
        "type": "function",
        "function": {"name": "g", "arguments": "{}"},
    }
