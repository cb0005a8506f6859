"""The official `openai` client's `responses` against `specdec up --http`: conversations that the server keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specdec.client import Client
from tests.support.gateway_system import MODEL, PROMPT, System, chat
from tests.support.output_forms import ENOUGH_TOKENS, LENIENT_SCHEMA, WARNINGS, Ticket


def respond(client: openai.OpenAI, **options: Any) -> Any:
    """A response of 12 greedy tokens unless said otherwise."""
    return client.responses.create(
        **{"model": MODEL, "input": PROMPT, "max_output_tokens": 12, "temperature": 0, **options}
    )


def test_a_response_has_the_sdk_s_text_and_usage(client: openai.OpenAI, greedy: str) -> None:
    response = respond(client, metadata={"topic": "words"})
    assert response.output_text == greedy
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].role == "assistant"
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (4, 12, 16)
    assert response.metadata == {"topic": "words"}


def test_a_response_that_ends_by_itself_is_completed(client: openai.OpenAI) -> None:
    response = respond(client, extra_body={"logit_bias": {"1": 100}})  # the end of text becomes certain
    assert (response.status, response.incomplete_details, response.output_text) == ("completed", None, "")


def test_input_may_be_messages_and_instructions_come_first(client: openai.OpenAI, greedy: str) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "w17"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "w99"}]},
        {"role": "user", "content": "w42"},
    ]
    assert respond(client, input=items, instructions="w5").output_text == greedy


def test_a_stream_has_the_events_of_openai_in_order(client: openai.OpenAI, greedy: str) -> None:
    events = list(respond(client, stream=True))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == greedy
    assert events[-1].response.output_text == greedy
    assert client.responses.retrieve(events[-1].response.id).output_text == greedy


def test_the_client_s_stream_helper_assembles_the_final_response(client: openai.OpenAI, greedy: str) -> None:
    with client.responses.stream(model=MODEL, input=PROMPT, max_output_tokens=12, temperature=0) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == greedy


def test_logprobs_come_on_request(client: openai.OpenAI) -> None:
    response = respond(client, top_logprobs=2, include=["message.output_text.logprobs"])
    expected = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    logprobs = response.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == [entry.token for entry in expected]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


def test_a_follow_up_continues_the_session_and_a_fork_begins_another(client: openai.OpenAI, sdk: Client) -> None:
    first = respond(client)
    session_id = first.model_dump()["session_id"]
    follow_up = respond(client, input="w3", previous_response_id=first.id)
    assert follow_up.model_dump()["session_id"] == session_id
    assert follow_up.usage.input_tokens_details.cached_tokens > 0
    fork = respond(client, input="w3", previous_response_id=first.id)
    assert fork.model_dump()["session_id"] != session_id
    assert fork.output_text == follow_up.output_text
    assert sdk.get_session(session_id).num_tokens == follow_up.usage.total_tokens
    whole = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": first.output_text}]
    expected = chat(client, messages=[*whole, {"role": "user", "content": "w3"}]).choices[0].message.content
    assert follow_up.output_text == expected


def test_a_conversation_goes_on_after_its_session_was_lost(client: openai.OpenAI, sdk: Client) -> None:
    first = respond(client)
    expected = respond(client, input="w3", previous_response_id=first.id).output_text
    sdk.delete_session(first.model_dump()["session_id"])
    again = respond(client, input="w3", previous_response_id=first.id)
    assert again.output_text == expected


def test_instructions_belong_to_one_response_alone(client: openai.OpenAI) -> None:
    first = respond(client, instructions="w9 w9")
    follow_up = respond(client, input="w3", previous_response_id=first.id)
    whole = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": first.output_text}]
    expected = chat(client, messages=[*whole, {"role": "user", "content": "w3"}]).choices[0].message.content
    assert follow_up.output_text == expected


def test_a_stored_response_is_read_and_deleted_with_its_session(client: openai.OpenAI) -> None:
    response = respond(client)
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.retrieve(response.id)
    assert gone.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.get(f"/sessions/{response.model_dump()['session_id']}", cast_to=object)


def test_deleting_a_response_leaves_the_session_of_the_one_after_it(client: openai.OpenAI) -> None:
    first = respond(client)
    follow_up = respond(client, input="w3", previous_response_id=first.id)
    client.responses.delete(first.id)
    third = respond(client, input="w4", previous_response_id=follow_up.id)
    assert third.model_dump()["session_id"] == first.model_dump()["session_id"]


def test_a_response_that_is_not_stored_cannot_be_read_or_continued(client: openai.OpenAI) -> None:
    response = respond(client, store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as refused:
        respond(client, previous_response_id=response.id)
    assert (refused.value.code, refused.value.param) == ("response_not_found", "previous_response_id")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"truncation": "auto"}, "truncation"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 1000}, "max_output_tokens"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"priority": 0.5}}, "priority"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_can_never_succeed_is_a_400_that_names_its_field(
    client: openai.OpenAI, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        respond(client, **options)
    assert refused.value.param == param


# ---- structured output -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_client(demo: System) -> Iterator[openai.OpenAI]:
    """A client of the demo pair, whose tokenizer is of bytes."""
    with openai.OpenAI(base_url=demo.base_url, api_key="unused", timeout=240, max_retries=0) as client:
        yield client


def demanded(**options: Any) -> dict[str, Any]:
    """Options of a sampled response about a module."""
    return {"model": MODEL, "input": "import os", "max_output_tokens": ENOUGH_TOKENS, "temperature": 1.0, **options}


def test_the_client_parses_a_response_as_the_pydantic_model_that_it_demands(demo_client: openai.OpenAI) -> None:
    seeded = {"seed": 7}
    whole = demo_client.responses.parse(**demanded(text_format=Ticket, extra_body=seeded))
    assert isinstance(whole.output_parsed, Ticket)
    assert (whole.status, whole.text.format.type, whole.text.format.strict) == ("completed", "json_schema", True)
    with demo_client.responses.stream(**demanded(text_format=Ticket, extra_body=seeded)) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert (last.output_text, last.output_parsed) == (whole.output_text, whole.output_parsed)


def test_a_turn_has_its_own_form(demo_client: openai.OpenAI) -> None:
    first = demo_client.responses.parse(**demanded(text_format=Ticket))
    form = {"format": {"type": "json_object"}}
    second = demo_client.responses.create(**demanded(previous_response_id=first.id, text=form, max_output_tokens=20))
    assert second.output_text.startswith("{")
    third = demo_client.responses.create(**demanded(previous_response_id=first.id, max_output_tokens=2))
    assert third.text.format.type == "text"


def test_a_response_says_what_it_ignores_of_a_schema_that_is_not_strict(demo_client: openai.OpenAI) -> None:
    form = {"format": {"type": "json_schema", "name": "verdict", "schema": LENIENT_SCHEMA}}
    whole = demo_client.responses.create(**demanded(text=form))
    assert json.loads(whole.output_text)["answer"] in ("yes", "no", None)
    assert whole.specdec == {"constraint_warnings": WARNINGS}
    assert whole.text.format.schema_ == LENIENT_SCHEMA
    assert demo_client.responses.retrieve(whole.id).specdec == whole.specdec
    last = list(demo_client.responses.create(**demanded(text=form, stream=True)))[-1]
    assert (last.type, last.response.specdec) == ("response.completed", whole.specdec)
    form["format"]["strict"] = True
    with pytest.raises(openai.BadRequestError) as refused:
        demo_client.responses.create(**demanded(text=form))
    assert (refused.value.param, refused.value.code) == ("text.format.schema", "constraint_invalid")
