"""Tools of each API become the SDK's, and messages with calls and reasoning become the chat template's."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.http_errors import anthropic_error_object, error_object
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.messages import MessagesRequest
from gateway.schemas.responses import ResponseRequest
from specdec.contract.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, None], "default": None}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest(**{"messages": HELLO, "tools": [TOOL], **fields})


def response(**fields: Any) -> ResponseRequest:
    return ResponseRequest(**{"input": "hi", "tools": [{"type": "function", **FUNCTION}], **fields})


def message(**fields: Any) -> MessagesRequest:
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True, "cache_control": {"type": "x"}}
    return MessagesRequest(**{"messages": HELLO, "max_tokens": 5, "tools": [tool], **fields})


@pytest.mark.parametrize(
    ("request_", "choice", "is_parallel"),
    [
        (chat(), None, None),
        (chat(tool_choice="required", parallel_tool_calls=False), "required", False),
        (chat(tool_choice=NAMED), NAMED, None),
        (response(tool_choice="none", parallel_tool_calls=True), "none", True),
        (response(tool_choice={"type": "function", "name": "f"}), NAMED, None),
        (message(), None, None),
        (message(tool_choice={"type": "auto"}), "auto", None),
        (message(tool_choice={"type": "any", "disable_parallel_tool_use": True}), "required", False),
        (message(tool_choice={"type": "tool", "name": "f"}), NAMED, None),
        (message(tool_choice={"type": "none"}), "none", None),
    ],
)
def test_tools_and_choice_become_options(request_: Any, choice: Any, is_parallel: bool | None) -> None:
    request_.require_supported()
    options = request_.options({})
    assert options["tools"] == [TOOL]
    assert (options["tool_choice"], options["parallel_tool_calls"]) == (choice, is_parallel)


def read(request: Any) -> None:
    """Read all of a request, as its route does."""
    request.require_supported()
    request.options({})
    if isinstance(request, ResponseRequest):
        request.new_messages()


def test_a_request_without_tools_has_no_options_of_tools() -> None:
    for request in (
        chat(tools=[], tool_choice="auto", parallel_tool_calls=False),
        response(tools=None),
        message(tools=None),
    ):
        assert not {"tools", "tool_choice", "parallel_tool_calls"} & request.options({}).keys()


@pytest.mark.parametrize(
    ("make", "fields", "field"),
    [
        (chat, {"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        (chat, {"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
        (chat, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        (chat, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        (chat, {"tool_choice": "any"}, "tool_choice"),
        (chat, {"tools": None, "tool_choice": NAMED}, "tool_choice"),
        (chat, {"functions": [FUNCTION]}, "functions"),
        (chat, {"function_call": "auto"}, "function_call"),
        (response, {"tools": [{"type": "file_search"}]}, "tools[0].type"),
        (response, {"tool_choice": {"type": "function"}}, "tool_choice.name"),
        (response, {"input": [{"type": "computer_call"}]}, "input[0].type"),
        (response, {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        (message, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        (message, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (message, {"tools": None, "tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(make: Any, fields: dict[str, Any], field: str) -> None:
    request = make(**fields)
    with pytest.raises(InvalidRequest) as error:
        read(request)
    assert error.value.field == field


def test_completions_have_no_tools() -> None:
    for name, value in (("tools", [TOOL]), ("tool_choice", "required")):
        with pytest.raises(InvalidRequest, match=f"{name} is not supported"):
            CompletionRequest(prompt="hi", **{name: value}).require_supported()  # type: ignore[arg-type]
    CompletionRequest(prompt="hi", tool_choice="none").require_supported()


def test_more_than_128_tools_are_refused() -> None:
    for make, tool in ((chat, TOOL), (response, {"name": "f"}), (message, {"name": "f"})):
        with pytest.raises(ValidationError, match="at most 128"):
            make(tools=[tool] * 129)


@pytest.mark.parametrize(
    ("field", "of_chat", "of_responses", "of_messages"),
    [
        ("tools.definitions[3].name", "tools[3].function.name", "tools[3].name", "tools[3].name"),
        ("tools.definitions[0].parameters_json", "tools[0].function.parameters", "tools[0].parameters",
         "tools[0].input_schema"),
        ("tools[2].parameters", "tools[2].function.parameters", "tools[2].parameters", "tools[2].input_schema"),
        ("tools.definitions", "tools", "tools", "tools"),
        ("tools.name", "tool_choice.function.name", "tool_choice.name", "tool_choice.name"),
        ("tools", "tools", "tools", "tools"),
    ],
)  # fmt: skip
def test_an_error_of_the_coordinator_has_the_name_of_the_api(
    field: str, of_chat: str, of_responses: str, of_messages: str
) -> None:
    error = InvalidRequest(f"{field} must be better", field=field)
    for path, name in (("/v1/chat/completions", of_chat), ("/v1/responses", of_responses), ("/tokenize", of_chat)):
        told = error_object(error, path=path)["error"]
        assert (told["param"], told["message"]) == (name, f"{name} must be better")
    assert anthropic_error_object(error, 400)["error"]["message"] == f"{of_messages} must be better"


def test_effort_and_thinking_become_variables_of_the_template() -> None:
    none = {"reasoning_effort": "none", "enable_thinking": False}
    high = {"reasoning_effort": "high", "enable_thinking": True}
    assert chat(reasoning_effort="none").options({})["chat_template_kwargs"] == none
    assert response(reasoning={"effort": "high"}).options({})["chat_template_kwargs"] == high
    assert response(reasoning={"effort": None, "summary": None}).options({}).get("chat_template_kwargs") is None
    own = chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False, "x": None})
    assert own.options({})["chat_template_kwargs"] == high | {"enable_thinking": False, "x": None}
    on = message(thinking={"type": "enabled", "budget_tokens": 1024})
    assert on.options({})["chat_template_kwargs"] == {"enable_thinking": True}
    assert message(thinking={"type": "disabled"}).options({})["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in message(thinking={"type": "adaptive"}).options({})


CALL = {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}
SAID = {"role": "assistant", "content": "now", "tool_calls": [CALL], "reasoning_content": "why"}
RESULT = {"role": "tool", "tool_call_id": "call_a", "content": "21"}


def test_the_history_of_a_chat_has_calls_and_reasoning_under_either_name() -> None:
    said = {**SAID, "reasoning": "why", "refusal": None}
    del said["reasoning_content"]
    assert chat(messages=[*HELLO, said, RESULT]).conversation() == [*HELLO, SAID, RESULT]
    assert chat(messages=[*HELLO, SAID | {"reasoning": "other"}]).conversation()[-1] == SAID


def test_the_history_of_a_message_has_calls_results_and_thinking() -> None:
    history = [
        *HELLO,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "why", "signature": "anything"},
            {"type": "text", "text": "now"},
            {"type": "tool_use", "id": "call_a", "name": "f", "input": {"x": None}},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "more"},
            {"type": "tool_result", "tool_use_id": "call_a", "content": [{"type": "text", "text": "21"}]},
        ]},
    ]  # fmt: skip
    assert message(messages=history).conversation() == [*HELLO, SAID, RESULT, {"role": "user", "content": "more"}]
    call_alone = [*HELLO, {"role": "assistant", "content": history[1]["content"][2:]}, *HELLO]
    assert message(messages=call_alone).conversation()[1] == {
        "role": "assistant", "content": None, "tool_calls": [CALL]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("role", "block", "field"),
    [
        ("user", {"type": "tool_result"}, "tool_use_id"),
        ("user", {"type": "tool_result", "tool_use_id": "a", "content": 5}, "content"),
        ("user", {"type": "tool_result", "tool_use_id": "a", "content": [5]}, "content"),
        ("user", {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}, "content[0].type"),
        ("user", {"type": "tool_use", "id": "a", "name": "f", "input": {}}, "type"),
        ("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": "{}"}, "input"),
        ("assistant", {"type": "tool_use", "id": "a", "input": {}}, "name"),
        ("assistant", {"type": "thinking"}, "thinking"),
        ("assistant", {"type": "redacted_thinking", "data": "x"}, "type"),
        ("assistant", {"type": "tool_result", "tool_use_id": "a"}, "type"),
    ],
)
def test_a_block_that_cannot_be_read_is_refused_by_its_place(role: str, block: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        message(messages=[{"role": role, "content": [block]}, *HELLO]).conversation()
    assert error.value.field == f"messages[0].content[0].{field}"


def test_the_items_of_one_turn_are_one_message() -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "content": "now", "id": "msg_1", "status": "completed"},
        {"type": "function_call", "id": "fc_1", "call_id": "call_a", "name": "f", "arguments": '{"x": null}'},
        {"type": "function_call", "call_id": "call_b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_a", "output": "21"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "call_a", "name": "f", "arguments": "{}"},
    ]
    second = {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    alone = {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert response(input=items).new_messages() == [
        *HELLO,
        SAID | {"tool_calls": [CALL, second]},
        RESULT,
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [alone]},
    ]
    assert response(input=[items[3]]).new_messages()[0].get("content") is None
