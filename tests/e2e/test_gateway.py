"""The official `openai` client against `specdec up --http`: texts, streams, usage, logprobs, ends and seeds."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from specdec.client import Client
from tests.support.gateway_system import COUPLED, MESSAGES, MODEL, PROMPT, chat, complete, joined


def test_a_chat_and_a_completion_give_the_sdk_s_text(client: openai.OpenAI, greedy: str) -> None:
    answer = chat(client)
    assert answer.choices[0].message.content == greedy
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == MODEL
    assert re.fullmatch(r"[0-9a-f]{12}", answer.system_fingerprint)
    assert complete(client).choices[0].text == greedy


def test_streams_give_the_same_text_and_end_with_a_finish_reason(client: openai.OpenAI, greedy: str) -> None:
    chunks = list(chat(client, stream=True))
    assert joined(chunks) == greedy
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)
    assert joined(complete(client, stream=True)) == greedy


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_the_text_of_a_stream_does_not_depend_on_the_length_of_drafts(
    client: openai.OpenAI, greedy: str, gamma: int
) -> None:
    assert joined(chat(client, stream=True, extra_body={"speculation": {"gamma": gamma}})) == greedy


@pytest.mark.parametrize("mode", ["off", "rejection", "block", "coupled"])
def test_a_sampled_text_is_the_sdk_s_for_the_same_seed_in_each_mode(
    client: openai.OpenAI, sdk: Client, mode: str
) -> None:
    sampled = {"temperature": 1.0, "seed": 7}
    expected = sdk.generate(PROMPT, max_new_tokens=12, mode=mode, gamma=3, **sampled).text  # type: ignore[call-overload]
    body = {"speculation": {"mode": mode, "gamma": 3}}
    assert complete(client, extra_body=body, **sampled).choices[0].text == expected
    assert joined(chat(client, stream=True, extra_body=body, **sampled)) == expected


def test_usage_counts_prompt_output_and_cached_tokens(client: openai.OpenAI) -> None:
    usage = complete(client).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 12, 16)
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_a_stream_reports_usage_in_a_last_chunk_without_choices(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (4, 12)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_reports_usage_with_every_chunk_on_request(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in complete(client, stream=True, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_chat_logprobs_have_tokens_bytes_and_the_likeliest_tokens(client: openai.OpenAI, greedy: str) -> None:
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == greedy
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.top_logprobs[0].logprob == entry.logprob >= entry.top_logprobs[1].logprob
        assert entry.logprob <= 0


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in chat(client, logprobs=True, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)


def test_completion_logprobs_have_offsets_into_the_text(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=1).choices[0]
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    assert all(len(tops) == 1 for tops in choice.logprobs.top_logprobs)


def test_text_ends_before_a_stop_string(client: openai.OpenAI, greedy: str) -> None:
    words = ["w" + word for word in greedy.split("w")[1:]]
    stop = next(word for word in words[2:] if greedy.count(word) == 1 and greedy.index(word))
    answer = complete(client, stop=[stop]).choices[0]
    assert answer.text == greedy[: greedy.index(stop)]
    assert answer.finish_reason == "stop"
    assert joined(chat(client, stop=stop, stream=True)) == answer.text


def test_a_stop_token_id_ends_the_output(client: openai.OpenAI, sdk: Client) -> None:
    third = sdk.generate(PROMPT, temperature=0, max_new_tokens=3, ignore_eos=True).token_ids[2]
    answer = complete(client, extra_body={"stop_token_ids": [third]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens <= 3


def test_ignore_eos_and_min_tokens_reach_the_model(client: openai.OpenAI) -> None:
    forced = {"logit_bias": {"1": 100}}  # the end of text becomes certain
    assert complete(client, **forced).usage.completion_tokens == 1
    assert complete(client, **forced, extra_body={"ignore_eos": True}).usage.completion_tokens == 12
    assert complete(client, **forced, extra_body={"min_tokens": 5}).usage.completion_tokens == 6


def test_the_same_seed_gives_the_same_text_and_another_seed_another(client: openai.OpenAI) -> None:
    texts = [complete(client, temperature=1.0, seed=seed, extra_body=COUPLED).choices[0].text for seed in (11, 11, 12)]
    assert texts[0] == texts[1] != texts[2]


def test_n_outputs_draw_with_seeds_that_follow_one_another(client: openai.OpenAI) -> None:
    sampled = {"temperature": 1.0, "extra_body": COUPLED}
    answer = chat(client, n=3, seed=20, **sampled)
    alone = [chat(client, seed=20 + place, **sampled).choices[0].message.content for place in range(3)]
    assert [choice.message.content for choice in answer.choices] == alone
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 36)
    streamed = list(chat(client, n=3, seed=20, stream=True, **sampled))
    assert [joined(streamed, index) for index in range(3)] == alone


def test_the_client_s_stream_helper_assembles_the_completion(client: openai.OpenAI, greedy: str) -> None:
    stop = "w" + greedy.split("w")[-1]  # the helper raises for an output that its length ended
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "stop": stop}
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == text == greedy[: greedy.index(stop)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
