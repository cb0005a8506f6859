"""The official `anthropic` client against `specdec up --http`: messages, streams, counts and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.gateway_system import MESSAGES, MODEL, System
from tests.support.output_forms import ENOUGH_TOKENS, LENIENT_SCHEMA, Ticket, Verdict


def send(claude: anthropic.Anthropic, **options: Any) -> Any:
    """A message of 12 greedy tokens unless said otherwise; the client knows no temperature."""
    body = {"temperature": 0, **options.pop("extra_body", {})}
    return claude.messages.create(
        **{"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "extra_body": body, **options}
    )


def test_a_message_has_the_sdk_s_text_and_usage(claude: anthropic.Anthropic, greedy: str) -> None:
    message = send(claude)
    assert [(block.type, block.text) for block in message.content] == [("text", greedy)]
    assert (message.role, message.model, message.stop_reason) == ("assistant", MODEL, "max_tokens")
    usage = message.usage
    assert (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens) == (4, 12)


def test_a_message_that_ends_by_itself_is_an_ended_turn(claude: anthropic.Anthropic) -> None:
    message = send(claude, extra_body={"logit_bias": {"1": 100}})  # the end of text becomes certain
    assert (message.stop_reason, message.content[0].text) == ("end_turn", "")


def test_a_system_prompt_comes_first_and_text_blocks_are_read(claude: anthropic.Anthropic, greedy: str) -> None:
    blocks: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "w17 w99 w42"}]}]
    assert send(claude, messages=blocks, system="w5").content[0].text == greedy
    system: list[Any] = [{"type": "text", "text": "w5", "cache_control": {"type": "ephemeral"}}]
    assert send(claude, messages=blocks, system=system).content[0].text == greedy


def test_a_stream_has_the_events_of_anthropic_in_order(claude: anthropic.Anthropic, greedy: str) -> None:
    events = list(send(claude, stream=True))
    texts = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert [event.type for event in events] == [  # the client keeps pings to itself
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(texts),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(texts) == greedy
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("max_tokens", 12)


def test_the_client_s_stream_helper_assembles_the_message(claude: anthropic.Anthropic, greedy: str) -> None:
    with claude.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=12, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == greedy
        assert stream.get_final_message().stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_ended_the_text_is_named(claude: anthropic.Anthropic, greedy: str, stream: bool) -> None:
    words = ["w" + word for word in greedy.split("w")[1:]]
    stop = next(word for word in words[2:] if greedy.count(word) == 1 and greedy.index(word))
    answer = send(claude, stop_sequences=["absent", stop], stream=stream)
    end = next(event.delta for event in answer if event.type == "message_delta") if stream else answer
    assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", stop)


def test_tokens_are_counted_with_the_system_prompt(claude: anthropic.Anthropic) -> None:
    assert claude.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens == 4
    assert claude.messages.count_tokens(model=MODEL, messages=MESSAGES, system="w7").input_tokens == 5


def test_a_session_and_metrics_of_speculation_come_as_extensions(claude: anthropic.Anthropic) -> None:
    body = {"session_id": "claude", "return_metrics": True, "speculation": {"gamma": 3}}
    message = send(claude, extra_body=body).model_dump()
    assert message["session_id"] == "claude"
    assert message["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "w1"}]}, "messages[1].role"),
        ({"messages": []}, "messages"),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"thinking": {"type": "long"}}, "thinking.type"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_never_succeed_is_a_400_in_anthropic_s_form(
    claude: anthropic.Anthropic, options: dict[str, Any], words: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        send(claude, stream=stream, **options)
    assert words in refused.value.message
    error = refused.value.body
    assert isinstance(error, dict)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


def test_an_unknown_model_is_404(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        send(claude, model="claude-sonnet")


# ---- structured output -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_claude(demo: System) -> Iterator[anthropic.Anthropic]:
    """A client of the demo pair, whose tokenizer is of bytes."""
    with anthropic.Anthropic(base_url=f"http://{demo.http}", api_key="unused", timeout=240, max_retries=0) as client:
        yield client


def demanded(**options: Any) -> dict[str, Any]:
    """Options of a message about a module."""
    hello = [{"role": "user", "content": "import os"}]
    return {"model": MODEL, "messages": hello, "max_tokens": ENOUGH_TOKENS, **options}


def test_the_client_parses_a_message_as_the_pydantic_model_that_it_demands(demo_claude: anthropic.Anthropic) -> None:
    seeded = {"seed": 7}
    message = demo_claude.messages.parse(**demanded(output_format=Verdict, extra_body=seeded))
    assert isinstance(message.parsed_output, Verdict)
    assert message.stop_reason == "end_turn"
    with demo_claude.messages.stream(**demanded(output_format=Verdict, extra_body=seeded)) as stream:
        assert "".join(stream.text_stream) == message.content[0].text
        assert stream.get_final_message().parsed_output == message.parsed_output


def test_a_schema_is_enforced_as_a_whole_or_refused_by_its_field(demo_claude: anthropic.Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": Ticket.model_json_schema()}, "effort": "low"}
    message = demo_claude.messages.create(**demanded(output_config=form))
    assert Ticket.model_validate(json.loads(message.content[0].text))
    counted = demo_claude.messages.count_tokens(model=MODEL, messages=MESSAGES, output_config=form)
    assert counted.input_tokens > 0
    form["format"]["schema"] = LENIENT_SCHEMA  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as refused:
        demo_claude.messages.create(**demanded(output_config=form))
    words = "output_config.format.schema cannot be followed: Unimplemented keys"
    assert words in refused.value.message
