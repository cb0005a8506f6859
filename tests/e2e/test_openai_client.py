"""The official `openai` client against `specdec up --http`: chats, completions, sessions and refusals."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from specdec.client import Client
from tests.support.gateway_system import COUPLED, MESSAGES, MODEL, PROMPT, PROMPT_IDS, System, chat, complete, joined

#: Fields of vLLM's `metrics.speculative_decoding`, without those of each step, which vLLM adds on demand.
VLLM_FIELDS = {
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps",
    "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens",
}  # fmt: skip


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


def test_n_outputs_draw_with_seeds_that_follow_one_another(client: openai.OpenAI) -> None:
    sampled = {"temperature": 1.0, "extra_body": COUPLED}
    answer = chat(client, n=3, seed=20, **sampled)
    alone = [chat(client, seed=20 + place, **sampled).choices[0].message.content for place in range(3)]
    assert [choice.message.content for choice in answer.choices] == alone
    assert len(set(alone)) == 3
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


# ---- prompts, conversations, sessions and extensions ---------------------------------------------------------------


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
    assert set(metrics) == VLLM_FIELDS
    histogram = metrics["acceptance_histogram"]
    assert len(histogram) == metrics["num_spec_tokens"] + 1 <= 4
    assert sum(histogram) == metrics["num_spec_steps"] > 0
    assert sum(number * count for number, count in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
    assert metrics["num_draft_tokens"] >= metrics["num_accepted_draft_tokens"]
    assert metrics["mean_acceptance_length"] == 1 + metrics["num_accepted_draft_tokens"] / sum(histogram)
    assert metrics["draft_acceptance_rate"] == metrics["num_accepted_draft_tokens"] / metrics["num_draft_tokens"]
    tokens = answer["choices"][0]["specdec"]["tokens"]
    assert "".join(token["text"] for token in tokens) == answer["choices"][0]["text"]
    assert {token["source"] for token in tokens} <= {"accepted", "corrected", "bonus", "target"}
    chunks = [chunk.model_dump() for chunk in complete(client, stream=True, extra_body=body)]
    assert [chunk for chunk in chunks if "metrics" in chunk] == chunks[-1:]
    assert set(chunks[-1]["metrics"]["speculative_decoding"]) == VLLM_FIELDS
    assert chunks[-1]["metrics"]["specdec"]["num_rounds"] >= sum(histogram)
    rounds = [chunk["specdec"]["round"] for chunk in chunks if "specdec" in chunk]
    assert [each["index"] for each in rounds] == [0, *itertools.accumulate(each["num_tokens"] for each in rounds)][:-1]


def test_a_stream_has_its_metrics_where_vllm_has_them_and_only_those_of_one_output(client: openai.OpenAI) -> None:
    body = {"return_metrics": True, "speculation": {"gamma": 3}}
    for ask in (complete, chat):
        usage = {"stream_options": {"include_usage": True}}
        chunks = [chunk.model_dump() for chunk in ask(client, stream=True, extra_body=body, **usage)]
        assert [chunk for chunk in chunks if "metrics" in chunk] == chunks[-1:]
        assert chunks[-1]["choices"] == []
        assert set(chunks[-1]["metrics"]["speculative_decoding"]) == VLLM_FIELDS
        several = ask(client, n=2, extra_body=body).model_dump()["metrics"]
        assert several["speculative_decoding"] is None
        assert several["specdec"]["num_draft_tokens"] > 0
    without = complete(client, extra_body={"return_metrics": True, "speculation": {"mode": "off"}}).model_dump()
    assert without["metrics"]["speculative_decoding"] == dict.fromkeys(VLLM_FIELDS, 0) | {
        "mean_acceptance_length": 1.0, "acceptance_histogram": [0]
    }  # fmt: skip
    assert "metrics" not in complete(client).model_dump()


def test_a_session_continues_where_it_ended(client: openai.OpenAI, sdk: Client) -> None:
    first = complete(client, extra_body={"session_id": "gateway-turns"})
    assert first.model_dump()["session_id"] == "gateway-turns"
    second = complete(client, prompt="w3", extra_body={"session_id": "gateway-turns"})
    assert second.usage.prompt_tokens == first.usage.total_tokens + 1
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert sdk.get_session("gateway-turns").num_tokens == second.usage.total_tokens


# ---- refusals, streams at once and other routes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 9}, "n"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"stop": ["w"] * 10_000}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),  # this vocabulary of words has no bytes
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "w5 " * 600}]}, "messages"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"extra_body": {"priority": 0.5}}, "priority"),
        ({"extra_body": {"speculation": {"mode": "fast"}}}, "speculation.mode"),
        ({"extra_body": {"speculation": {"gamma": "2"}}}, "speculation.gamma"),
        ({"extra_body": {"speculation": {"task": "x" * 65}}}, "speculation.task"),
        ({"extra_body": {"seed": 1.5}}, "seed"),
        ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids[0]"),
        ({"n": 2, "extra_body": {"session_id": "shared"}}, "session_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_can_never_succeed_is_a_400_that_names_its_field(
    client: openai.OpenAI, options: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, stream=stream, **options)
    assert refused.value.param == param
    assert param.partition("[")[0].rpartition(".")[2] in refused.value.message
    assert refused.value.type == "invalid_request_error"


def test_an_unknown_model_pool_and_model_page_are_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        chat(client, model="gpt-4")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as refused:
        chat(client, extra_body={"speculation": {"draft_pool": "absent"}})
    assert refused.value.code == "pool_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_32_streams_at_once_each_get_their_own_text(client: openai.OpenAI) -> None:
    prompts = [f"w{10 + place} w{20 + place}" for place in range(32)]
    alone = [complete(client, prompt=prompt).choices[0].text for prompt in prompts]
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(lambda prompt: joined(complete(client, prompt=prompt, stream=True)), prompts))
    assert together == alone


def test_tokens_and_text_are_translated_both_ways(client: openai.OpenAI, system: System) -> None:
    root = client.with_options(base_url=f"http://{system.http}")
    assert root.post("/tokenize", cast_to=object, body={"prompt": PROMPT})["tokens"] == PROMPT_IDS  # type: ignore[index]
    chat_tokens = root.post("/tokenize", cast_to=object, body={"messages": MESSAGES})
    assert chat_tokens == {"count": 4, "max_model_len": 512, "tokens": PROMPT_IDS}
    text = root.post("/detokenize", cast_to=object, body={"tokens": PROMPT_IDS})
    assert text == {"prompt": PROMPT.replace(" ", "")}


def test_metrics_count_drafts_under_vllm_s_names(client: openai.OpenAI, system: System) -> None:
    complete(client, extra_body={"speculation": {"gamma": 3}})
    text = client.with_options(base_url=f"http://{system.http}").get("/metrics", cast_to=str)
    series = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    drafted, accepted = (float(series[f"vllm:spec_decode_num_{name}_tokens_total"]) for name in ("draft", "accepted"))
    assert drafted >= accepted > 0
    assert float(series['specdec:http_requests_total{route="/v1/completions",status="200"}']) > 0
