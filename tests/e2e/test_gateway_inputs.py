"""The official `openai` client against `specdec up --http`: prompts, conversations, sessions and our extensions."""

from __future__ import annotations

import itertools
from typing import Any

import openai
import pytest

from specdec.client import Client
from tests.support.gateway_system import PROMPT, PROMPT_IDS, chat, complete, joined


@pytest.mark.parametrize("stream", [False, True])
def test_echo_returns_the_prompt_first_for_text_and_for_token_ids(
    client: openai.OpenAI, greedy: str, stream: bool
) -> None:
    def text_of(answer: Any) -> str:
        return joined(answer) if stream else str(answer.choices[0].text)

    assert text_of(complete(client, echo=True, stream=stream)) == PROMPT + greedy
    assert text_of(complete(client, echo=True, stream=stream, prompt=PROMPT_IDS)) == PROMPT.replace(" ", "") + greedy


def test_prompts_may_be_token_ids_lists_of_texts_and_lists_of_token_ids(client: openai.OpenAI, greedy: str) -> None:
    assert complete(client, prompt=PROMPT_IDS).choices[0].text == greedy
    other = complete(client, prompt="w9").choices[0].text
    for prompts in ([PROMPT, "w9"], [PROMPT_IDS, [9]]):
        answer = complete(client, prompt=prompts)
        assert [choice.text for choice in answer.choices] == [greedy, other]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)
    streamed = list(complete(client, prompt=[PROMPT, "w9"], stream=True))
    assert [joined(streamed, index) for index in range(2)] == [greedy, other]


def test_without_a_limit_a_chat_fills_the_context_and_a_completion_has_16_tokens(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=openai.omit, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 512
    assert complete(client, max_tokens=openai.omit, extra_body={"ignore_eos": True}).usage.completion_tokens == 16


def test_max_completion_tokens_wins_over_the_former_name(client: openai.OpenAI) -> None:
    assert chat(client, max_completion_tokens=3, max_tokens=7).usage.completion_tokens == 3


def test_text_parts_and_tool_messages_are_rendered_and_unknown_fields_ignored(
    client: openai.OpenAI, greedy: str
) -> None:
    parts = [{"type": "text", "text": PROMPT}]
    assert chat(client, messages=[{"role": "user", "content": parts}]).choices[0].message.content == greedy
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": "w17", "tool_calls": [call]},
        {"role": "tool", "content": "w99 w42", "tool_call_id": "c"},
    ]
    answer = chat(client, messages=history, user="someone", extra_body={"unknown_field": 1})
    assert answer.choices[0].message.content == greedy


def test_metrics_and_provenance_come_on_request(client: openai.OpenAI) -> None:
    body = {"return_metrics": True, "return_provenance": True, "speculation": {"gamma": 3}}
    answer = complete(client, extra_body=body).model_dump()
    metrics = answer["metrics"]["speculative_decoding"]
    histogram = metrics["acceptance_histogram"]
    assert len(histogram) == metrics["num_spec_tokens"] + 1 <= 4
    assert sum(histogram) == metrics["num_spec_steps"] > 0
    assert sum(number * count for number, count in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
    assert metrics["num_draft_tokens"] >= metrics["num_accepted_draft_tokens"]
    tokens = answer["choices"][0]["specdec"]["tokens"]
    assert "".join(token["text"] for token in tokens) == answer["choices"][0]["text"]
    assert {token["source"] for token in tokens} <= {"accepted", "corrected", "bonus", "target"}
    chunks = [chunk.model_dump() for chunk in complete(client, stream=True, extra_body=body)]
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_rounds"] > 0
    rounds = [chunk["specdec"]["round"] for chunk in chunks if "specdec" in chunk]
    assert [each["index"] for each in rounds] == [0, *itertools.accumulate(each["num_tokens"] for each in rounds)][:-1]


def test_a_session_continues_where_it_ended(client: openai.OpenAI, sdk: Client) -> None:
    first = complete(client, extra_body={"session_id": "gateway-turns"})
    assert first.model_dump()["session_id"] == "gateway-turns"
    second = complete(client, prompt="w3", extra_body={"session_id": "gateway-turns"})
    assert second.usage.prompt_tokens == first.usage.total_tokens + 1
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert sdk.get_session("gateway-turns").num_tokens == second.usage.total_tokens
