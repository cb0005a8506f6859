"""LiteLLM against `specdec up --http`: completions, streams, usage, conversations, tools and errors by class."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.gateway_system import MESSAGES, MODEL, PROMPT, System, joined
from tests.support.optional_clients import REASON
from tests.support.output_forms import ENOUGH_TOKENS, Ticket
from tests.support.tool_system import NO_THINKING

litellm = pytest.importorskip("litellm", reason=REASON)

#: A name without a provider that LiteLLM knows needs the prefix of the API's form.
LITELLM_MODEL = f"openai/{MODEL}"


@pytest.fixture(scope="module")
def options(system: System) -> dict[str, Any]:
    """12 greedy tokens of the system's model."""
    return {
        "model": LITELLM_MODEL, "api_base": system.base_url, "api_key": "unused", "max_tokens": 12, "temperature": 0,
        "max_retries": 0, "timeout": 240,
    }  # fmt: skip


def ask(options: dict[str, Any], **more: Any) -> Any:
    return litellm.completion(**{**options, "messages": MESSAGES, **more})


def test_a_completion_has_the_sdk_s_text_and_usage(options: dict[str, Any], greedy: str) -> None:
    answer = ask(options)
    assert answer.choices[0].message.content == greedy
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 12, 16)


def test_a_text_completion_has_the_same_text(options: dict[str, Any], greedy: str) -> None:
    answer = litellm.text_completion(**{**options, "model": f"text-completion-openai/{MODEL}"}, prompt=PROMPT)
    assert answer.choices[0].text == greedy


def test_a_stream_has_the_same_text_and_its_usage_on_request(options: dict[str, Any], greedy: str) -> None:
    chunks = list(ask(options, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == greedy
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 12)
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].message.content == greedy


def test_calls_at_once_give_the_same_text(options: dict[str, Any], greedy: str) -> None:
    async def all_texts() -> list[str]:
        calls = (litellm.acompletion(**options, messages=MESSAGES) for _ in range(8))
        return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert asyncio.run(all_texts()) == [greedy] * 8


def test_a_conversation_is_sent_as_a_whole(options: dict[str, Any], greedy: str) -> None:
    turns = [
        {"role": "user", "content": "w5 w17"},
        {"role": "assistant", "content": "w99"},
        {"role": "user", "content": "w42"},
    ]
    assert ask(options, messages=turns).choices[0].message.content == greedy


def test_stops_seeds_logprobs_and_our_fields_reach_the_server(options: dict[str, Any], greedy: str) -> None:
    body = {"speculation": {"mode": "coupled", "gamma": 3}, "session_id": "litellm"}
    sampled = {"temperature": 1.0, "seed": 7, "extra_body": {"speculation": {"mode": "coupled"}}}
    assert ask(options, extra_body=body).choices[0].message.content == greedy
    assert ask(options, **sampled).choices[0].message.content == ask(options, **sampled).choices[0].message.content
    last = "w" + greedy.split("w")[-1]
    assert ask(options, stop=[last]).choices[0].message.content == greedy[: greedy.index(last)]
    content = ask(options, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == greedy


def test_a_pydantic_model_as_the_form_gives_its_json(demo: System, options: dict[str, Any]) -> None:
    hello = [{"role": "user", "content": "import os"}]
    demanded = {"api_base": demo.base_url, "messages": hello, "max_tokens": ENOUGH_TOKENS, "response_format": Ticket}
    text = ask(options, **demanded).choices[0].message.content
    assert Ticket.model_validate_json(text)
    assert joined(ask(options, **demanded, stream=True)) == text


@pytest.fixture(scope="module")
def with_a_tool(tool_url: str, options: dict[str, Any]) -> dict[str, Any]:
    """A request that must call the tool `ticket` once."""
    function = {"name": "ticket", "parameters": Ticket.model_json_schema()}
    return options | {
        "api_base": f"{tool_url}/v1", "messages": [{"role": "user", "content": "import os"}], "tool_choice": "required",
        "tools": [{"type": "function", "function": function}], "parallel_tool_calls": False,
        "max_tokens": ENOUGH_TOKENS, "extra_body": {"chat_template_kwargs": NO_THINKING},
    }  # fmt: skip


def test_a_tool_is_called_whole_and_streamed_and_its_result_is_read(with_a_tool: dict[str, Any]) -> None:
    choice = ask(with_a_tool, messages=with_a_tool["messages"]).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "ticket")
    assert Ticket.model_validate_json(call.function.arguments)
    chunks = list(ask(with_a_tool, messages=with_a_tool["messages"], stream=True))
    streamed = litellm.stream_chunk_builder(chunks).choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert [each.function.arguments for each in streamed.message.tool_calls] == [call.function.arguments]
    answer = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    history = [*with_a_tool["messages"], choice.message, answer]
    last = ask(with_a_tool, messages=history, tool_choice="none", max_tokens=2)
    assert not last.choices[0].message.tool_calls
    assert last.usage.completion_tokens <= 2


def test_a_tool_that_is_named_is_called(with_a_tool: dict[str, Any]) -> None:
    named = {"type": "function", "function": {"name": "ticket"}}
    choice = ask(with_a_tool, messages=with_a_tool["messages"], tool_choice=named).choices[0]
    assert Ticket.model_validate_json(choice.message.tool_calls[0].function.arguments)


def test_reasoning_has_litellm_s_name(with_a_tool: dict[str, Any]) -> None:
    body = {"chat_template_kwargs": {"begun": True}, "ignore_eos": True}
    messages = with_a_tool["messages"]
    answer = ask(with_a_tool, messages=messages, extra_body=body, max_tokens=8)
    assert answer.choices[0].message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 8


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"temperature": -1}, "BadRequestError", "temperature"),
        ({"extra_body": {"priority": 0.5}}, "BadRequestError", "priority"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "BadRequestError", "tools"),
        ({"response_format": {"type": "json_object"}}, "BadRequestError", "response_format"),
        ({"model": "openai/gpt-4"}, "NotFoundError", "gpt-4"),
        ({"api_base": "http://127.0.0.1:1/v1"}, "InternalServerError", "Connection error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_litellm_s_classes(
    options: dict[str, Any], more: dict[str, Any], kind: str, words: str, stream: bool
) -> None:
    with pytest.raises(getattr(litellm, kind), match=words):
        list(ask(options, stream=stream, **more))


def test_embeddings_are_refused_in_words(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError, match="generates text"):
        litellm.embedding(LITELLM_MODEL, input=["w5"], api_base=options["api_base"], api_key="unused", max_retries=0)
