"""Tools and reasoning of chats by the official client, with the built-in pair as a model of the Hermes family.

The models know nothing of tools: every call is what the grammar leaves of their text.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from tests.support.gateway_system import MODEL
from tests.support.tool_requests import BEGUN, NAMED, TOOLS, USER, WEATHER, chat
from tests.support.tool_system import NO_THINKING


def test_a_chat_gives_calls_that_follow_the_schema_and_no_content(tool_client: openai.OpenAI) -> None:
    choice = chat(tool_client, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    schema = WEATHER if call.function.name == "get_weather" else {"type": "object"}
    jsonschema.validate(json.loads(call.function.arguments), schema)


def test_a_named_tool_is_called_and_the_reason_is_stop_as_at_openai(tool_client: openai.OpenAI) -> None:
    choice = chat(tool_client, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "stop"
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    *_, last = chat(tool_client, tool_choice=NAMED, stream=True)
    assert last.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_stream_gives_a_call_s_name_once_and_then_its_arguments(tool_client: openai.OpenAI, choice: Any) -> None:
    whole = chat(tool_client, tool_choice=choice).choices[0].message.tool_calls
    deltas: dict[int, list[Any]] = {}
    for chunk in chat(tool_client, tool_choice=choice, stream=True):
        assert not chunk.choices[0].delta.content
        for delta in chunk.choices[0].delta.tool_calls or ():
            deltas.setdefault(delta.index, []).append(delta)
    assert [*deltas] == [*range(len(whole))]
    for call, (first, *rest) in zip(whole, deltas.values(), strict=True):
        assert (first.type, first.function.name, first.function.arguments) == ("function", call.function.name, "")
        assert first.id
        assert not any(delta.id or delta.type or delta.function.name for delta in rest)
        assert "".join(delta.function.arguments for delta in rest) == call.function.arguments


def test_the_stream_helper_of_the_client_assembles_the_calls(tool_client: openai.OpenAI) -> None:
    options: Any = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False,
                    "extra_body": {"chat_template_kwargs": NO_THINKING}}  # fmt: skip
    strict: Any = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}]
    with tool_client.chat.completions.stream(
        model=MODEL, messages=USER, tools=strict, tool_choice="required", **options
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    first = message.tool_calls[0]
    jsonschema.validate(first.function.parsed_arguments, WEATHER)


def test_a_call_and_its_answer_come_back_as_messages(tool_client: openai.OpenAI) -> None:
    first = chat(tool_client, tool_choice=NAMED)
    session = {"session_id": first.session_id, "chat_template_kwargs": NO_THINKING}
    message = first.choices[0].message
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "21 degrees"} for call in message.tool_calls]
    said: Any = message.model_dump(exclude_none=True, exclude={"session_id"})
    history = [*USER, said | {"content": None}, *answers]
    second = chat(tool_client, messages=history, tool_choice="none", max_tokens=4, extra_body=session)
    assert not second.choices[0].message.tool_calls
    assert second.session_id == first.session_id
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_a_call_that_the_limit_cuts_is_given_as_far_as_it_came(tool_client: openai.OpenAI) -> None:
    whole = chat(tool_client, tool_choice=NAMED)
    arguments = whole.choices[0].message.tool_calls[0].function.arguments
    cut = chat(tool_client, tool_choice=NAMED, max_tokens=whole.usage.completion_tokens - 12).choices[0]
    assert cut.finish_reason == "length"
    assert arguments.startswith(cut.message.tool_calls[0].function.arguments)
    assert cut.message.tool_calls[0].function.arguments != arguments


def test_reasoning_has_both_names_whole_and_streamed_and_comes_back(tool_client: openai.OpenAI) -> None:
    options: Any = {"arguments": BEGUN, "tools": openai.NOT_GIVEN, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    message = chat(tool_client, **options).choices[0].message
    assert message.reasoning_content == message.reasoning != ""
    deltas = [chunk.choices[0].delta for chunk in chat(tool_client, stream=True, **options)]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == message.reasoning
    for name in ("reasoning", "reasoning_content"):
        history = [*USER, {"role": "assistant", "content": "x", name: "thought"}, *USER]
        assert chat(tool_client, messages=history, tools=openai.NOT_GIVEN, max_tokens=1).usage.completion_tokens == 1


def test_reasoning_tokens_are_counted_up_to_the_end_of_the_reasoning(tool_client: openai.OpenAI, tool_url: str) -> None:
    closer = httpx2.post(f"{tool_url}/tokenize", json={"prompt": "</think>"}, timeout=300).json()["tokens"][-1]
    options: Any = {"seed": 2, "temperature": 1.0, "max_tokens": 40, "logprobs": True, "logit_bias": {closer: 10}}
    thought, direct = (chat(tool_client, arguments=each, **options) for each in (BEGUN, NO_THINKING))
    tokens = [entry.token for entry in thought.choices[0].logprobs.content]
    assert thought.usage.completion_tokens_details.reasoning_tokens == tokens.index("</think>") + 1 < len(tokens)
    assert direct.usage.completion_tokens_details.reasoning_tokens == 0
    *_, last = chat(tool_client, arguments=BEGUN, stream=True, stream_options={"include_usage": True}, **options)
    assert last.usage == thought.usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details})


def test_no_effort_turns_the_reasoning_off_in_a_template_that_reads_it(tool_client: openai.OpenAI) -> None:
    options: Any = {"arguments": {}, "max_tokens": 1}
    plain, off = chat(tool_client, **options), chat(tool_client, reasoning_effort="none", **options)
    assert off.usage.prompt_tokens > plain.usage.prompt_tokens  # the template closes the reasoning itself
    low = chat(tool_client, reasoning_effort="low", **options)
    assert low.usage.prompt_tokens == plain.usage.prompt_tokens


@pytest.mark.parametrize(("choice", "reason"), [(NAMED, "stop"), ("required", "tool_calls")])
def test_a_resumed_stream_with_event_ids_gives_the_call_once_and_the_same_end(
    tool_client: openai.OpenAI, tool_url: str, choice: Any, reason: str
) -> None:
    session_id = f"resumed-over-http-{reason}"
    options: Any = {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": {"session_id": session_id}}
    answer = chat(tool_client, **options).choices[0]
    whole = answer.message.tool_calls[0]
    headers = {"accept": "text/event-stream"}
    path = f"{tool_url}/v1/sessions/{session_id}"
    events = _events(httpx2.get(path, headers=headers, timeout=300).text)
    assert _arguments(events) == whole.function.arguments
    assert events[-1][1]["choices"][0]["finish_reason"] == answer.finish_reason == reason
    for number, (event_id, _) in enumerate(events[:-1]):
        rest = _events(httpx2.get(path, headers=headers | {"last-event-id": event_id}, timeout=300).text)
        assert _arguments(events[: number + 1]) + _arguments(rest) == whole.function.arguments


def test_tokenize_counts_the_tools(tool_client: openai.OpenAI, tool_url: str) -> None:
    body = {"messages": USER, "tools": TOOLS, "chat_template_kwargs": NO_THINKING}
    count = httpx2.post(f"{tool_url}/tokenize", json=body, timeout=300).json()["count"]
    assert count == chat(tool_client, max_tokens=1).usage.prompt_tokens


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
    tool_client: openai.OpenAI, options: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(tool_client, stream=stream, **options)
    assert error.value.param == param
    assert param in error.value.message


def test_a_lenient_schema_tells_what_it_does_not_enforce(tool_client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [1], "not": {}}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = chat(tool_client, tools=[tool], max_tokens=1)
    assert any("not" in warning for warning in answer.specdec["constraint_warnings"])


def test_several_choices_have_calls_with_ids_that_differ(tool_client: openai.OpenAI) -> None:
    options: Any = {"n": 2, "tool_choice": NAMED, "temperature": 1.0, "seed": 3}
    calls = [choice.message.tool_calls[0] for choice in chat(tool_client, **options).choices]
    assert len({call.id for call in calls}) == 2
    streamed: dict[int, str] = {0: "", 1: ""}
    for chunk in chat(tool_client, stream=True, **options):
        for delta in chunk.choices[0].delta.tool_calls or ():
            streamed[chunk.choices[0].index] += delta.function.arguments
    assert [*streamed.values()] == [call.function.arguments for call in calls]


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
