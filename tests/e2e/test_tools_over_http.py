"""Tools and reasoning over HTTP by the official clients, with the built-in pair as a model of the Hermes family.

The models know nothing of tools: every call is what the grammar leaves of their text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import jsonschema
import openai
import pytest

from tests.support.tool_system import NO_THINKING
from tests.support.up_rig import ENVIRON

ROOT = Path(__file__).resolve().parents[2]
MODEL = "target"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "São Paulo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Forecast", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
CLAUDE_TOOLS: list[Any] = [{"name": "get_weather", "description": "Forecast", "input_schema": WEATHER}]
USER: list[Any] = [{"role": "user", "content": "def weather(city):"}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
BEGUN = {"begun": True}


@pytest.fixture(scope="module")
def client(tool_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_url}/v1", api_key="unused", timeout=300, max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def claude(tool_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_url, api_key="unused", timeout=300, max_retries=0) as opened:
        yield opened


def chat(client: openai.OpenAI, *, arguments: dict[str, Any] = NO_THINKING, **options: Any) -> Any:
    """A greedy chat with tools."""
    body = {"chat_template_kwargs": arguments, **options.pop("extra_body", {})}
    given: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    return client.chat.completions.create(**(given | {"extra_body": body} | options))


def respond(client: openai.OpenAI, *, arguments: dict[str, Any] = NO_THINKING, **options: Any) -> Any:
    """A greedy response with a tool that must be called."""
    given: dict[str, Any] = {
        "model": MODEL,
        "input": USER[0]["content"],
        "tools": RESPONSE_TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_output_tokens": 200,
        "extra_body": {"chat_template_kwargs": arguments},
    }
    return client.responses.create(**(given | options))


def send(claude: anthropic.Anthropic, *, arguments: dict[str, Any] = NO_THINKING, **options: Any) -> Any:
    """A greedy message with a tool that must be called."""
    given: dict[str, Any] = {
        "model": MODEL,
        "messages": USER,
        "tools": CLAUDE_TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 200,
        "extra_body": {"temperature": 0, "chat_template_kwargs": arguments},
    }
    return claude.messages.create(**(given | options))


def test_a_chat_gives_calls_that_follow_the_schema_and_no_content(client: openai.OpenAI) -> None:
    choice = chat(client, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    schema = WEATHER if call.function.name == "get_weather" else {"type": "object"}
    jsonschema.validate(json.loads(call.function.arguments), schema)


def test_a_named_tool_is_called_and_the_reason_is_stop_as_at_openai(client: openai.OpenAI) -> None:
    choice = chat(client, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "stop"
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    *_, last = chat(client, tool_choice=NAMED, stream=True)
    assert last.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_stream_gives_a_call_s_name_once_and_then_its_arguments(client: openai.OpenAI, choice: Any) -> None:
    whole = chat(client, tool_choice=choice).choices[0].message.tool_calls
    deltas: dict[int, list[Any]] = {}
    for chunk in chat(client, tool_choice=choice, stream=True):
        assert not chunk.choices[0].delta.content
        for delta in chunk.choices[0].delta.tool_calls or ():
            deltas.setdefault(delta.index, []).append(delta)
    assert [*deltas] == [*range(len(whole))]
    for call, (first, *rest) in zip(whole, deltas.values(), strict=True):
        assert (first.type, first.function.name, first.function.arguments) == ("function", call.function.name, "")
        assert first.id
        assert not any(delta.id or delta.type or delta.function.name for delta in rest)
        assert "".join(delta.function.arguments for delta in rest) == call.function.arguments


def test_the_stream_helper_of_the_client_assembles_the_calls(client: openai.OpenAI) -> None:
    options: Any = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False,
                    "extra_body": {"chat_template_kwargs": NO_THINKING}}  # fmt: skip
    strict: Any = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}]
    with client.chat.completions.stream(
        model=MODEL, messages=USER, tools=strict, tool_choice="required", **options
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    first = message.tool_calls[0]
    jsonschema.validate(first.function.parsed_arguments, WEATHER)


def test_a_call_and_its_answer_come_back_as_messages(client: openai.OpenAI) -> None:
    first = chat(client, tool_choice=NAMED)
    session = {"session_id": first.session_id, "chat_template_kwargs": NO_THINKING}
    message = first.choices[0].message
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "21 degrees"} for call in message.tool_calls]
    said: Any = message.model_dump(exclude_none=True, exclude={"session_id"})
    history = [*USER, said | {"content": None}, *answers]
    second = chat(client, messages=history, tool_choice="none", max_tokens=4, extra_body=session)
    assert not second.choices[0].message.tool_calls
    assert second.session_id == first.session_id
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_a_call_that_the_limit_cuts_is_given_as_far_as_it_came(client: openai.OpenAI) -> None:
    whole = chat(client, tool_choice=NAMED)
    arguments = whole.choices[0].message.tool_calls[0].function.arguments
    cut = chat(client, tool_choice=NAMED, max_tokens=whole.usage.completion_tokens - 12).choices[0]
    assert cut.finish_reason == "length"
    assert arguments.startswith(cut.message.tool_calls[0].function.arguments)
    assert cut.message.tool_calls[0].function.arguments != arguments


def test_reasoning_has_both_names_whole_and_streamed_and_comes_back(client: openai.OpenAI) -> None:
    options: Any = {"arguments": BEGUN, "tools": openai.NOT_GIVEN, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    message = chat(client, **options).choices[0].message
    assert message.reasoning_content == message.reasoning != ""
    deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True, **options)]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == message.reasoning
    for name in ("reasoning", "reasoning_content"):
        history = [*USER, {"role": "assistant", "content": "x", name: "thought"}, *USER]
        assert chat(client, messages=history, tools=openai.NOT_GIVEN, max_tokens=1).usage.completion_tokens == 1


def test_no_effort_turns_the_reasoning_off_in_a_template_that_reads_it(client: openai.OpenAI) -> None:
    options: Any = {"arguments": {}, "max_tokens": 1}
    plain, off = chat(client, **options), chat(client, reasoning_effort="none", **options)
    assert off.usage.prompt_tokens > plain.usage.prompt_tokens  # the template closes the reasoning itself
    low = chat(client, reasoning_effort="low", **options)
    assert low.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_resumed_stream_with_event_ids_gives_the_call_once(client: openai.OpenAI, tool_url: str) -> None:
    session_id = "resumed-over-http"
    whole = chat(client, tool_choice=NAMED, extra_body={"session_id": session_id}).choices[0].message.tool_calls[0]
    headers = {"accept": "text/event-stream"}
    path = f"{tool_url}/v1/sessions/{session_id}"
    events = _events(httpx2.get(path, headers=headers, timeout=300).text)
    assert _arguments(events) == whole.function.arguments
    for number, (event_id, _) in enumerate(events[:-1]):
        rest = _events(httpx2.get(path, headers=headers | {"last-event-id": event_id}, timeout=300).text)
        assert _arguments(events[: number + 1]) + _arguments(rest) == whole.function.arguments


def test_tokenize_counts_the_tools(client: openai.OpenAI, tool_url: str) -> None:
    body = {"messages": USER, "tools": TOOLS, "chat_template_kwargs": NO_THINKING}
    count = httpx2.post(f"{tool_url}/tokenize", json=body, timeout=300).json()["count"]
    assert count == chat(client, max_tokens=1).usage.prompt_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].function.name"),
        ({"tools": [TOOLS[1], {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "properties": {"a": {"not": {}}}}}}]}, "tools[1].function.parameters"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_bad_tools_are_refused_by_their_name(
    client: openai.OpenAI, options: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, stream=stream, **options)
    assert error.value.param == param
    assert param in error.value.message


def test_a_lenient_schema_tells_what_it_does_not_enforce(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [1], "not": {}}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = chat(client, tools=[tool], max_tokens=1)
    assert any("not" in warning for warning in answer.specdec["constraint_warnings"])


def test_a_response_has_the_call_as_an_item_and_goes_on_with_its_output(client: openai.OpenAI) -> None:
    first = respond(client)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    assert first.output_text == ""
    assert [tool.name for tool in first.tools] == ["get_weather"]
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}]
    options: Any = {"tool_choice": "none", "max_output_tokens": 4}
    second = respond(client, input=output, previous_response_id=first.id, **options)
    assert second.usage.input_tokens > first.usage.total_tokens
    history: Any = [*USER, call.model_dump(), *output]
    whole = respond(client, input=history, **options)
    assert whole.usage.input_tokens == second.usage.input_tokens
    assert client.responses.retrieve(first.id).output == first.output


def test_a_streamed_response_has_the_events_of_a_call_in_order(client: openai.OpenAI) -> None:
    whole = respond(client).output[0]
    events = list(respond(client, stream=True))
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * len(deltas),
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert (events[2].item.name, events[2].item.arguments, events[2].item.status) == ("get_weather", "", "in_progress")
    assert "".join(event.delta for event in deltas) == whole.arguments == events[-3].arguments
    assert events[-1].response.output == [events[-2].item]
    assert {event.item_id for event in deltas} == {events[2].item.id}


def test_a_response_has_its_reasoning_as_an_item(client: openai.OpenAI) -> None:
    body = {"chat_template_kwargs": BEGUN, "ignore_eos": True}
    options: Any = {"extra_body": body, "tools": openai.NOT_GIVEN, "tool_choice": "auto", "max_output_tokens": 8}
    whole = respond(client, **options)
    assert whole.output[0].type == "reasoning"
    text = whole.output[0].content[0].text
    events = list(respond(client, stream=True, **options))
    assert [event.type for event in events[2:4]] == ["response.output_item.added", "response.content_part.added"]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == text
    item = whole.output[0].model_dump(exclude_none=True)
    again = respond(client, input=[*USER, item, *USER], tool_choice="auto", max_output_tokens=1)
    assert again.usage.output_tokens == 1


def test_the_stream_helper_of_responses_assembles_the_call(client: openai.OpenAI) -> None:
    options: Any = {"temperature": 0, "max_output_tokens": 200, "parallel_tool_calls": False,
                    "extra_body": {"chat_template_kwargs": NO_THINKING}}  # fmt: skip
    tools: Any = [RESPONSE_TOOLS[0] | {"strict": True}]
    with client.responses.stream(
        model=MODEL, input=USER[0]["content"], tools=tools, tool_choice="required", **options
    ) as stream:
        (first, *_) = stream.get_final_response().output
    assert first.type == "function_call"
    jsonschema.validate(json.loads(first.arguments), WEATHER)


def test_a_message_has_the_call_as_a_block_and_reads_it_back(claude: anthropic.Anthropic) -> None:
    message = send(claude)
    (block,) = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "get_weather", "tool_use")
    jsonschema.validate(block.input, WEATHER)
    history: Any = [
        *USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "21 degrees"}]},
            {"type": "text", "text": "And tomorrow?"},
        ]},
    ]  # fmt: skip
    second = send(claude, messages=history, max_tokens=4, tool_choice={"type": "none"})
    counted = claude.messages.count_tokens(
        model=MODEL, messages=history, tools=CLAUDE_TOOLS, extra_body={"chat_template_kwargs": NO_THINKING}
    )
    assert counted.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens


def test_a_streamed_message_has_the_events_of_a_call_in_order(claude: anthropic.Anthropic) -> None:
    (block,) = send(claude).content
    events = list(send(claude, stream=True, tool_choice={"type": "tool", "name": "get_weather"}))
    deltas = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert (events[1].content_block.name, events[1].content_block.input) == ("get_weather", {})
    assert json.loads("".join(deltas)) == block.input
    assert events[-2].delta.stop_reason == "tool_use"


def test_the_stream_helper_of_anthropic_assembles_reasoning_and_call(claude: anthropic.Anthropic) -> None:
    body = {"temperature": 1.0, "seed": 2, "chat_template_kwargs": BEGUN}
    with claude.messages.stream(model=MODEL, messages=USER, tools=CLAUDE_TOOLS, max_tokens=300,
                                tool_choice={"type": "any"}, extra_body=body) as stream:  # fmt: skip
        message = stream.get_final_message()
    thinking, *rest = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking
    assert thinking.signature
    assert all(block.type == "tool_use" for block in rest)
    history: Any = [*USER, {"role": "assistant", "content": message.content}, *USER]
    assert send(claude, messages=history, tool_choice={"type": "none"}, max_tokens=1).usage.output_tokens == 1


def test_a_call_that_is_cut_is_incomplete_in_the_newer_apis_too(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    limit = chat(client, tool_choice=NAMED).usage.completion_tokens - 12
    (item,) = (cut := respond(client, max_output_tokens=limit)).output
    assert (cut.status, cut.incomplete_details.reason, item.status) == ("incomplete", "max_output_tokens", "incomplete")
    message = send(claude, max_tokens=limit)
    (block,) = message.content
    assert (message.stop_reason, block.input) == ("max_tokens", {})
    assert block.specdec["partial_json"] == item.arguments != ""
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        json.loads(item.arguments)


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_every_token_is_told_with_its_origin_and_logprob_also_inside_a_call(
    client: openai.OpenAI, claude: anthropic.Anthropic, choice: str
) -> None:
    told = {"chat_template_kwargs": NO_THINKING, "return_provenance": True}
    options: Any = {"tool_choice": choice, "parallel_tool_calls": False, "logprobs": True}
    whole = chat(client, extra_body=told, **options)
    chunks = list(chat(client, extra_body=told, stream=True, **options))
    num_tokens = whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.content) == num_tokens
    assert sum(len(each.choices[0].logprobs.content) for each in chunks if each.choices[0].logprobs) == num_tokens
    assert sum(len(each.specdec["tokens"]) for each in chunks if hasattr(each, "specdec")) == num_tokens
    events = list(respond(client, extra_body=told, stream=True, tool_choice=choice))
    num_tokens = events[-1].response.usage.output_tokens
    assert sum(len(each.specdec["tokens"]) for each in events if hasattr(each, "specdec")) == num_tokens
    kind = {"type": "any" if choice == "required" else "auto", "disable_parallel_tool_use": True}
    body = told | {"temperature": 0}
    events = list(send(claude, extra_body=body, stream=True, tool_choice=kind))
    num_tokens = events[-2].usage.output_tokens
    assert sum(len(each.specdec["tokens"]) for each in events if hasattr(each, "specdec")) == num_tokens


def test_several_choices_have_calls_with_ids_that_differ(client: openai.OpenAI) -> None:
    options: Any = {"n": 2, "tool_choice": NAMED, "temperature": 1.0, "seed": 3}
    calls = [choice.message.tool_calls[0] for choice in chat(client, **options).choices]
    assert len({call.id for call in calls}) == 2
    streamed: dict[int, str] = {0: "", 1: ""}
    for chunk in chat(client, stream=True, **options):
        for delta in chunk.choices[0].delta.tool_calls or ():
            streamed[chunk.choices[0].index] += delta.function.arguments
    assert [*streamed.values()] == [call.function.arguments for call in calls]


def test_a_message_without_thinking_closes_it_in_the_prompt(claude: anthropic.Anthropic) -> None:
    options: Any = {"arguments": {}, "max_tokens": 1, "tool_choice": {"type": "auto"}}
    counts = [
        (usage := send(claude, **options, **given).usage).input_tokens + usage.cache_read_input_tokens
        for given in ({}, {"thinking": {"type": "disabled"}})
    ]
    assert counts[0] < counts[1]


def _events(text: str) -> list[tuple[str, Any]]:
    """Return the events of a stream with their ids, without its end."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if fields.get("data", "[DONE]") != "[DONE]":
            found.append((fields.get("id", ""), json.loads(fields["data"])))
    return found


def _arguments(events: list[tuple[str, Any]]) -> str:
    """Return the arguments of the only call that the events tell."""
    calls = [call for _, event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert {call["index"] for call in calls} <= {0}
    return "".join(call["function"]["arguments"] for call in calls)


def test_the_example_prints_what_its_guide_shows(tool_url: str) -> None:
    environ = ENVIRON | {"OPENAI_BASE_URL": f"{tool_url}/v1"}
    result = subprocess.run(
        [sys.executable, "examples/tools_over_http.py"], cwd=ROOT, capture_output=True, text=True, env=environ
    )
    assert result.returncode == 0, result.stderr
    guide = (ROOT / "docs" / "how-to" / "tools-and-agents.md").read_text()
    assert f"```text\n{result.stdout}```\n" in guide
