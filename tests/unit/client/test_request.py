"""Building a request message from the arguments of `generate`."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gateway.outputs import plan
from specdec.client.messages import ChatMessage, TextPart
from specdec.client.request import GenerateOptions, build_detokenize_request, build_request, build_tokenize_request
from specdec.client.results import Completion, GenerationStats, Usage
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import Mode
from specdec.v1 import coordinator_pb2 as pb


def test_every_option_reaches_its_field() -> None:
    request = build_request(
        None,
        GenerateOptions(
            prompt_token_ids=[1, 2], session_id="s", request_id="r", max_new_tokens=9, min_new_tokens=2,
            temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5, presence_penalty=0.5,
            frequency_penalty=-0.5, logit_bias={3: -1.5}, seed=2**64 - 1, stop=["a", "b"], stop_token_ids=[4],
            ignore_eos=True, logprobs=0, mode="coupled", gamma=0, draft_pool="code", provenance=True,
        ),
    )  # fmt: skip
    assert request == pb.GenerateRequest(
        session_id="s",
        request_id="r",
        prompt_token_ids=pb.TokenIds(ids=[1, 2]),
        sampling=pb.SamplingParams(
            max_new_tokens=9, min_new_tokens=2, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125,
            repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={3: -1.5}, seed=2**64 - 1,
            stop=["a", "b"], stop_token_ids=[4], ignore_eos=True, logprobs=0,
        ),
        speculation=pb.SpeculationParams(mode=pb.SPECULATION_MODE_COUPLED, gamma=0, draft_pool="code"),
        return_provenance=True,
    )  # fmt: skip


def test_every_field_of_the_proto_has_an_option() -> None:
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    names |= {field.name for field in pb.SpeculationParams.DESCRIPTOR.fields}
    assert names <= GenerateOptions.__annotations__.keys()


def test_an_absent_option_is_left_to_the_server() -> None:
    request = build_request("hello", GenerateOptions(temperature=None, mode=None))
    assert request.sampling == pb.SamplingParams()
    assert request.speculation == pb.SpeculationParams()
    assert not request.HasField("resume_from")


def test_zero_temperature_is_sent_and_differs_from_no_temperature() -> None:
    assert build_request("p", GenerateOptions(temperature=0)).sampling.HasField("temperature")


def test_each_request_has_ids_of_its_own() -> None:
    first, second = build_request("p", {}), build_request("p", {})
    assert first.session_id != second.session_id
    assert first.request_id != second.request_id


@pytest.mark.parametrize("mode", [Mode.BLOCK, "block", "BLOCK"])
def test_a_mode_is_an_enum_member_or_its_name(mode: Mode | str) -> None:
    assert build_request("p", GenerateOptions(mode=mode)).speculation.mode == pb.SPECULATION_MODE_BLOCK


def test_empty_inputs_are_sent_for_the_server_to_refuse() -> None:
    assert build_request("", {}).WhichOneof("input") == "prompt"
    assert build_request(None, GenerateOptions(prompt_token_ids=[])).WhichOneof("input") == "prompt_token_ids"
    assert build_request(None, GenerateOptions(messages=[])).WhichOneof("input") == "messages"


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (None, {}, "input"),
        ("p", {"prompt_token_ids": [1]}, "input"),
        ("p", {"top_k": -1}, "sampling.top_k"),
        ("p", {"seed": 2**64}, "sampling.seed"),
        ("p", {"temperature": "hot"}, "sampling.temperature"),
        ("p", {"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ("p", {"stop_token_ids": [-1]}, "sampling.stop_token_ids"),
        ("p", {"gamma": 2**32}, "speculation.gamma"),
        ("p", {"mode": "fast"}, "speculation.mode"),
        ("\udc80", {}, "prompt"),
        (None, {"prompt_token_ids": [-1]}, "prompt_token_ids.ids"),
        (None, {"messages": [{"role": "user"}]}, "messages"),
        (None, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (None, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_field_name(prompt: str | None, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(prompt, options)
    assert caught.value.field == field


def test_the_error_about_content_that_is_not_text_is_plain() -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(None, GenerateOptions(messages=[{"role": "user", "content": None}]))  # type: ignore[typeddict-item]
    assert caught.value.message == "messages[0].content must be a text, got None"


def test_messages_can_be_the_first_argument() -> None:
    messages: list[ChatMessage] = [{"role": "user", "content": "hello"}]
    by_position, by_name = build_request(messages, {}), build_request(None, GenerateOptions(messages=messages))
    assert by_position.WhichOneof("input") == "messages"
    assert by_position.messages == by_name.messages


def test_text_parts_of_a_message_are_joined_by_line_breaks() -> None:
    content: list[TextPart] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = build_request([{"role": "user", "content": content}], {})
    assert request.messages.messages[0].content == "one\ntwo"


def test_further_fields_of_a_message_travel_as_json_and_none_is_absent() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages: list[ChatMessage] = [
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "user", "content": "x"},
    ]
    asked = build_request(messages, GenerateOptions(chat_template_kwargs={"enable_thinking": False})).messages
    first, second, third = asked.messages
    assert (first.content, json.loads(first.extra_json)) == ("", {"tool_calls": [call], "content": None})
    assert (second.content, json.loads(second.extra_json)) == ("3", {"tool_call_id": "c1"})
    assert third == pb.ChatMessage(role="user", content="x")
    assert json.loads(asked.template_arguments_json) == {"enable_thinking": False}
    tokenized = build_tokenize_request(None, messages, {"enable_thinking": False})
    assert tokenized.messages == asked


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63, 2**64 - 1])
def test_a_seed_counts_modulo_2_to_the_64_as_over_http(seed: int) -> None:
    (job,) = plan(["x"], 1, {}, seed)
    assert build_request("x", {"seed": seed}).sampling.seed == job.options["seed"] == seed % 2**64


SEED_LIMITS = "must be at least -9223372036854775808 and at most 18446744073709551615"
FLOAT_LIMITS = "must be 0 or have a size from 1.4e-45 to 3.4028234e+38, the limits of a 32-bit float"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -(2**63) - 1}, f"sampling.seed {SEED_LIMITS}, got -9223372036854775809"),
        ({"seed": 2**64}, f"sampling.seed {SEED_LIMITS}, got 18446744073709551616"),
        ({"seed": 10**5000}, f"sampling.seed {SEED_LIMITS}, got a number of 16610 bits"),
        ({"seed": 2.5}, "sampling.seed must be a whole number, got float"),
        ({"seed": "7"}, "sampling.seed must be a whole number, got str"),
        ({"gamma": 2**32}, "speculation.gamma must be at least 0 and at most 4294967295, got 4294967296"),
        ({"priority": -(2**31) - 1}, "priority must be at least -2147483648 and at most 2147483647, got -2147483649"),
        ({"stop_token_ids": [1, -2]}, "sampling.stop_token_ids must be at least 0 and at most 4294967295, got -2"),
        ({"top_k": 10**5000}, "sampling.top_k must be at least 0 and at most 4294967295, got a number of 16610 bits"),
        ({"repetition_penalty": 1e300}, f"sampling.repetition_penalty {FLOAT_LIMITS}, got 1e+300"),
        ({"repetition_penalty": 1e-300}, f"sampling.repetition_penalty {FLOAT_LIMITS}, got 1e-300"),
        ({"temperature": -1e-300}, f"sampling.temperature {FLOAT_LIMITS}, got -1e-300"),
        ({"presence_penalty": 10**39}, f"sampling.presence_penalty {FLOAT_LIMITS}, got 1e+39"),
        ({"top_p": 10**400}, f"sampling.top_p {FLOAT_LIMITS}, got a number of 1329 bits"),
        ({"logit_bias": {4: 1.0, 5: 1e308}}, f"sampling.logit_bias {FLOAT_LIMITS}, got 1e+308 for token 5"),
        ({"logit_bias": {4: 10**400}}, f"sampling.logit_bias {FLOAT_LIMITS}, got a number of 1329 bits for token 4"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias must map token ids from 0 to 4294967295, got -1"),
        ({"logit_bias": {4: "x"}}, "sampling.logit_bias must map token ids to numbers, got str for token 4"),
    ],
)
def test_a_number_that_protobuf_cannot_hold_is_refused_with_its_limits(options: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request("p", options)
    assert str(caught.value) == words


def test_ids_to_detokenize_that_protobuf_cannot_hold_are_refused_by_name() -> None:
    assert build_detokenize_request([3], skip_special_tokens=False).keep_special_tokens
    with pytest.raises(InvalidRequest) as caught:
        build_detokenize_request([-1], skip_special_tokens=True)
    assert caught.value.field == "token_ids"


@pytest.mark.parametrize(
    ("prompt", "options", "field", "words"),
    [
        ([1, 2], {}, "prompt", "prompt_token_ids"),
        (7, {}, "prompt", "got int"),
        ({"role": "user", "content": "x"}, {}, "prompt", "list of messages"),
        ([{"role": "user", "content": "x"}], {"messages": []}, "messages", "once"),
        ([{"role": "user", "content": "x", "refusal": "n"}], {}, "messages", "got role, content, refusal"),
        ([{"role": "user", "name": "n"}], {}, "messages", "must have content, unless it has tool_calls"),
        ([{"role": "tool", "content": "x", "name": math.nan}], {}, "messages[0]", "must be JSON"),
        ("p", {"chat_template_kwargs": {}}, "chat_template_kwargs", "needs messages"),
        ([], {"chat_template_kwargs": {"a": {1, 2}}}, "chat_template_kwargs", "must be JSON"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
            {},
            "messages[0].content",
            "image_url",
        ),
        ([{"role": "user", "content": ["text"]}], {}, "messages[0].content", "'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages[0].content[0].text", "be text"),
    ],
)
def test_an_input_that_is_neither_prompt_nor_messages_is_refused(
    prompt: Any, options: Any, field: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(prompt, options)
    assert caught.value.field == field
    assert words in caught.value.message


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_new_token"])
def test_an_option_name_of_another_sdk_gets_a_suggestion(name: str) -> None:
    options: Any = {name: 7}
    with pytest.raises(TypeError, match=rf"{name} \(did you mean max_new_tokens\?\)"):
        build_request("p", options)


def test_an_option_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        build_request("p", {"temprature": 1.0})  # type: ignore[typeddict-unknown-key]


def test_a_completion_becomes_json_with_the_names_of_the_proto() -> None:
    stats = GenerationStats(2, 4, 2, (1, 1), 0, 0.1, 0.5, 0.2, 0.2, 2**40)
    completion = Completion("s", "r", "text", (1, 2), "stop", Usage(3, 2, 0), stats)
    shown = json.loads(json.dumps(completion.to_dict()))
    assert list(shown) == ["session_id", "request_id", "text", "token_ids", "finish_reason", "usage", "stats"]
    assert list(shown["usage"]) == [field.name for field in pb.Usage.DESCRIPTOR.fields]
    assert list(shown["stats"]) == [field.name for field in pb.GenerationStats.DESCRIPTOR.fields]
    assert shown["stats"]["wire_bytes"] == 2**40
