"""The official `openai` client against `specdec up --http`: refusals, cancellation, parallel streams, other routes."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from specdec.client import Client
from tests.support.gateway_system import MESSAGES, MODEL, PROMPT, PROMPT_IDS, System, chat, complete, joined


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
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
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


@pytest.mark.parametrize("call", [chat, complete])
def test_priority_is_a_whole_number_or_a_400_that_names_the_field(
    client: openai.OpenAI, call: Callable[..., Any]
) -> None:
    assert call(client, extra_body={"priority": -1}).usage.completion_tokens == 12
    for priority in (1 << 31, "0", 0.5):
        with pytest.raises(openai.BadRequestError, match="priority") as refused:
            call(client, extra_body={"priority": priority})
        assert refused.value.param == "priority"


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


def test_a_client_that_leaves_a_stream_ends_its_generation(client: openai.OpenAI, sdk: Client) -> None:
    with complete(client, max_tokens=500, stream=True, extra_body={"session_id": "left", "ignore_eos": True}) as stream:
        next(iter(stream))
    while sdk.get_session("left").status == "running":
        pass
    assert sdk.get_session("left").num_tokens < 504


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


def test_the_openapi_document_describes_every_route(client: openai.OpenAI, system: System) -> None:
    text = client.with_options(base_url=f"http://{system.http}").get("/openapi.json", cast_to=str)
    document = json.loads(text) if isinstance(text, str) else text
    paths = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/ready"}
    assert paths <= document["paths"].keys()
