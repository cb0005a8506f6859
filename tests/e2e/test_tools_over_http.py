"""Tools and reasoning of responses and messages by the official clients, and what all APIs have in common.

The models know nothing of tools: every call is what the grammar leaves of their text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import jsonschema
import openai
import pytest

from tests.support.gateway_system import MODEL
from tests.support.tool_requests import (
    BEGUN,
    CLAUDE_TOOLS,
    NAMED,
    RESPONSE_TOOLS,
    USER,
    WEATHER,
    chat,
    respond,
    send,
)
from tests.support.tool_system import NO_THINKING
from tests.support.up_rig import ENVIRON

ROOT = Path(__file__).resolve().parents[2]


def test_a_response_has_the_call_as_an_item_and_goes_on_with_its_output(tool_client: openai.OpenAI) -> None:
    first = respond(tool_client)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    assert first.output_text == ""
    assert [tool.name for tool in first.tools] == ["get_weather"]
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}]
    options: Any = {"tool_choice": "none", "max_output_tokens": 4}
    second = respond(tool_client, input=output, previous_response_id=first.id, **options)
    assert second.usage.input_tokens > first.usage.total_tokens
    history: Any = [*USER, call.model_dump(), *output]
    whole = respond(tool_client, input=history, **options)
    assert whole.usage.input_tokens == second.usage.input_tokens
    assert tool_client.responses.retrieve(first.id).output == first.output


def test_a_streamed_response_has_the_events_of_a_call_in_order(tool_client: openai.OpenAI) -> None:
    whole = respond(tool_client).output[0]
    events = list(respond(tool_client, stream=True))
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


def test_a_response_has_its_reasoning_as_an_item(tool_client: openai.OpenAI) -> None:
    body = {"chat_template_kwargs": BEGUN, "ignore_eos": True}
    options: Any = {"extra_body": body, "tools": openai.NOT_GIVEN, "tool_choice": "auto", "max_output_tokens": 8}
    whole = respond(tool_client, **options)
    assert whole.output[0].type == "reasoning"
    assert whole.usage.output_tokens_details.reasoning_tokens == whole.usage.output_tokens == 8
    text = whole.output[0].content[0].text
    events = list(respond(tool_client, stream=True, **options))
    assert [event.type for event in events[2:4]] == ["response.output_item.added", "response.content_part.added"]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == text
    item = whole.output[0].model_dump(exclude_none=True)
    again = respond(tool_client, input=[*USER, item, *USER], tool_choice="auto", max_output_tokens=1)
    assert again.usage.output_tokens == 1


def test_the_stream_helper_of_responses_assembles_the_call(tool_client: openai.OpenAI) -> None:
    options: Any = {"temperature": 0, "max_output_tokens": 200, "parallel_tool_calls": False,
                    "extra_body": {"chat_template_kwargs": NO_THINKING}}  # fmt: skip
    tools: Any = [RESPONSE_TOOLS[0] | {"strict": True}]
    with tool_client.responses.stream(
        model=MODEL, input=USER[0]["content"], tools=tools, tool_choice="required", **options
    ) as stream:
        (first, *_) = stream.get_final_response().output
    assert first.type == "function_call"
    jsonschema.validate(json.loads(first.arguments), WEATHER)


def test_a_message_has_the_call_as_a_block_and_reads_it_back(tool_claude: anthropic.Anthropic) -> None:
    message = send(tool_claude)
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
    second = send(tool_claude, messages=history, max_tokens=4, tool_choice={"type": "none"})
    counted = tool_claude.messages.count_tokens(
        model=MODEL, messages=history, tools=CLAUDE_TOOLS, extra_body={"chat_template_kwargs": NO_THINKING}
    )
    assert counted.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens


def test_a_streamed_message_has_the_events_of_a_call_in_order(tool_claude: anthropic.Anthropic) -> None:
    (block,) = send(tool_claude).content
    events = list(send(tool_claude, stream=True, tool_choice={"type": "tool", "name": "get_weather"}))
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


def test_the_stream_helper_of_anthropic_assembles_reasoning_and_call(
    tool_claude: anthropic.Anthropic, tool_url: str
) -> None:
    closer = httpx2.post(f"{tool_url}/tokenize", json={"prompt": "</think>"}, timeout=300).json()["tokens"][-1]
    body = {"temperature": 1.0, "seed": 2, "chat_template_kwargs": BEGUN, "logit_bias": {closer: 10}}
    with tool_claude.messages.stream(model=MODEL, messages=USER, tools=CLAUDE_TOOLS, max_tokens=300,
                                tool_choice={"type": "any"}, extra_body=body) as stream:  # fmt: skip
        message = stream.get_final_message()
    thinking, *rest = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking
    assert thinking.signature
    assert rest
    assert all(block.type == "tool_use" for block in rest)
    history: Any = [*USER, {"role": "assistant", "content": message.content}, *USER]
    assert send(tool_claude, messages=history, tool_choice={"type": "none"}, max_tokens=1).usage.output_tokens == 1


def test_a_call_that_is_cut_is_incomplete_in_the_newer_apis_too(
    tool_client: openai.OpenAI, tool_claude: anthropic.Anthropic
) -> None:
    limit = chat(tool_client, tool_choice=NAMED).usage.completion_tokens - 12
    (item,) = (cut := respond(tool_client, max_output_tokens=limit)).output
    assert (cut.status, cut.incomplete_details.reason, item.status) == ("incomplete", "max_output_tokens", "incomplete")
    message = send(tool_claude, max_tokens=limit)
    (block,) = message.content
    assert (message.stop_reason, block.input) == ("max_tokens", {})
    assert block.specdec["partial_json"] == item.arguments != ""
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        json.loads(item.arguments)


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_every_token_is_told_with_its_origin_and_logprob_also_inside_a_call(
    tool_client: openai.OpenAI, tool_claude: anthropic.Anthropic, choice: str
) -> None:
    told = {"chat_template_kwargs": NO_THINKING, "return_provenance": True}
    options: Any = {"tool_choice": choice, "parallel_tool_calls": False, "logprobs": True}
    whole = chat(tool_client, extra_body=told, **options)
    chunks = list(chat(tool_client, extra_body=told, stream=True, **options))
    num_tokens = whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.content) == num_tokens
    assert sum(len(each.choices[0].logprobs.content) for each in chunks if each.choices[0].logprobs) == num_tokens
    assert sum(len(each.specdec["tokens"]) for each in chunks if hasattr(each, "specdec")) == num_tokens
    events = list(respond(tool_client, extra_body=told, stream=True, tool_choice=choice))
    num_tokens = events[-1].response.usage.output_tokens
    assert sum(len(each.specdec["tokens"]) for each in events if hasattr(each, "specdec")) == num_tokens
    kind = {"type": "any" if choice == "required" else "auto", "disable_parallel_tool_use": True}
    body = told | {"temperature": 0}
    events = list(send(tool_claude, extra_body=body, stream=True, tool_choice=kind))
    num_tokens = events[-2].usage.output_tokens
    assert sum(len(each.specdec["tokens"]) for each in events if hasattr(each, "specdec")) == num_tokens


def test_a_message_without_thinking_closes_it_in_the_prompt(tool_claude: anthropic.Anthropic) -> None:
    options: Any = {"arguments": {}, "max_tokens": 1, "tool_choice": {"type": "auto"}}
    counts = [
        (usage := send(tool_claude, **options, **given).usage).input_tokens + usage.cache_read_input_tokens
        for given in ({}, {"thinking": {"type": "disabled"}})
    ]
    assert counts[0] < counts[1]


def test_the_example_prints_what_its_guide_shows(tool_url: str) -> None:
    environ = ENVIRON | {"OPENAI_BASE_URL": f"{tool_url}/v1"}
    result = subprocess.run(
        [sys.executable, "examples/tools_over_http.py"], cwd=ROOT, capture_output=True, text=True, env=environ
    )
    assert result.returncode == 0, result.stderr
    guide = (ROOT / "docs" / "how-to" / "tools-and-agents.md").read_text()
    assert f"```text\n{result.stdout}```\n" in guide
