"""Tool calls of a hybrid over HTTP: the same text whether a prompt is computed or begins at a snapshot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.redis_fixture import RedisServer, redis_server
from tests.support.stack import Stack
from tests.support.tiny_models import build_tiny_pair
from tests.support.tool_models import DEMO, FAMILIES, write_family

__all__ = ["redis_server"]

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Forecast",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Berlin", "Oslo"]}, "days": {"enum": [1, 3, 7]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]
#: Name under which the gateway serves the temporary directory of the target.
MODEL = "hybrid0"
USER: list[Any] = [{"role": "user", "content": "What is the weather like in the days to come?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[openai.OpenAI]:
    """A random hybrid with the vocabulary and the template of a family with tool calls."""
    config = json.loads((DEMO / "target" / "config.json").read_text())
    models = build_tiny_pair(
        "qwen3_5", tmp_path_factory.mktemp("random"), num_layers=4, context=2048,
        vocabulary_size=config["vocab_size"], eos_token_ids=(config["eos_token_id"],),
    )  # fmt: skip
    pair: list[Path] = []
    for role, random in zip(("target", "draft"), models, strict=True):
        pair.append(
            write_family(tmp_path_factory.mktemp("hybrid" if role == "target" else role), role, *FAMILIES["hermes"])
        )
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            shutil.copy(random / name, pair[-1] / name)
    with (
        Stack(*pair, redis_url=redis_server.url, gateway_arguments=[]) as running,
        openai.OpenAI(
            base_url=f"http://{running.parts['gateway'].address}/v1", api_key="unused", timeout=300, max_retries=0
        ) as opened,
    ):
        yield opened


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    given: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0,
                             "max_tokens": 120, "model": MODEL}  # fmt: skip
    return client.chat.completions.create(messages=messages, tools=TOOLS, **(given | options))


def test_a_tool_call_after_a_restored_prefix_is_the_one_without_it(client: openai.OpenAI) -> None:
    first, again = (ask(client, USER) for _ in range(2))
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"city", "days"}
    assert again.choices[0].message.tool_calls[0].function == call.function
    results = [
        *USER,
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
    ]
    for options in ({}, {"tool_choice": "none", "max_tokens": 24}):
        answers = [ask(client, results, **options).choices[0].message for _ in range(2)]
        calls = [[each.function for each in answer.tool_calls or ()] for answer in answers]
        assert answers[0].content == answers[1].content
        assert calls[0] == calls[1]


def test_eight_choices_of_one_prompt_are_one_greedy_text(client: openai.OpenAI) -> None:
    answer = ask(client, USER, n=8, tool_choice="none", max_tokens=12)
    assert len({choice.message.content for choice in answer.choices}) == 1
