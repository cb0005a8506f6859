"""Every bad field of a request is refused with its name and limit; good fields keep their values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from coordinator.front.raw_params import RawGenerationParams, RawSamplingParams, RawSpeculationParams
from coordinator.front.validation import ServingLimits, validate_request, validate_session_id
from coordinator.front.wire import decode_request
from coordinator.requests import GenerationRequest
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import Mode, SamplingFilters
from specdec.v1 import coordinator_pb2 as pb

LIMITS = ServingLimits(
    vocabulary_size=100, max_context_tokens=64, max_gamma=8, eos_token_ids=(1, 2), default_mode=Mode.BLOCK
)


def validated(message: pb.GenerateRequest) -> GenerationRequest:
    return validate_request(decode_request(message), LIMITS)


def sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="hello", sampling=pb.SamplingParams(**fields))


def chat(*roles: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role=role, content="x") for role in roles])
    )


def extra(extra_json: str, *, num_messages: int = 1) -> pb.GenerateRequest:
    message = pb.ChatMessage(role="user", extra_json=extra_json)
    return pb.GenerateRequest(messages=pb.ChatMessages(messages=[message] * num_messages))


def arguments(arguments_json: str) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="user", content="x")]
    return pb.GenerateRequest(messages=pb.ChatMessages(messages=messages, template_arguments_json=arguments_json))


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (pb.GenerateRequest(), "input", "input must be one of prompt, prompt_token_ids and messages, got none"),
        (pb.GenerateRequest(prompt=""), "prompt", "prompt must not be empty"),
        (pb.GenerateRequest(prompt_token_ids=pb.TokenIds()), "prompt_token_ids", "must not be empty"),
        (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5, 100])), "prompt_token_ids", "size 100, got 100"),
        (chat(), "messages", "messages must not be empty"),
        (chat(*["user"] * 4097), "messages", "at most 4096 messages, got 4097"),
        (chat("user", ""), "messages[1].role", "must not be empty"),
        (extra("[1]"), "messages[0].extra_json", "must be a JSON object, got list"),
        (extra("{"), "messages[0].extra_json", "must be a JSON object: "),
        (extra("[" * 100_000), "messages[0].extra_json", "must be a JSON object: "),
        (extra('{"name": NaN}'), "messages[0].extra_json", "must be a JSON object: NaN is not JSON"),
        (extra('{"refusal": "x"}'), "messages[0].extra_json", "tool_calls, content; got 'refusal'"),
        (extra('{"name": 1}'), "messages[0].extra_json", "must hold a text as name, got int"),
        (extra('{"tool_calls": {}}'), "messages[0].extra_json", "a list of JSON objects as tool_calls"),
        (extra('{"tool_calls": [1]}'), "messages[0].extra_json", "a list of JSON objects as tool_calls"),
        (extra('{"content": null}'), "messages[0].extra_json", "may hold content only as null"),
        (extra('{"content": "x", "tool_calls": [{}]}'), "messages[0].extra_json", "may hold content only as null"),
        (extra("x" * (1 << 19), num_messages=3), "messages", "at most 1048576 characters of extra_json together"),
        (arguments("[]"), "messages.template_arguments_json", "must be a JSON object, got list"),
        (arguments("x" * 65_537), "messages.template_arguments_json", "at most 65536 characters, got 65537"),
        (sampling(temperature=math.nan), "sampling.temperature", "must be a finite number, got nan"),
        (sampling(temperature=math.inf), "sampling.temperature", "must be a finite number, got inf"),
        (sampling(temperature=-0.5), "sampling.temperature", "must be at least 0, got -0.5"),
        (sampling(top_p=1.5), "sampling.top_p", "sampling.top_p must be in (0, 1], got 1.5"),
        (sampling(top_p=0.0), "sampling.top_p", "sampling.top_p must be in (0, 1], got 0"),
        (sampling(min_p=1.0), "sampling.min_p", "sampling.min_p must be in [0, 1), got 1"),
        (sampling(min_p=-0.1), "sampling.min_p", "must be in [0, 1), got -0.1"),
        (sampling(repetition_penalty=0.0), "sampling.repetition_penalty", "must be above 0, got 0"),
        (sampling(presence_penalty=math.nan), "sampling.presence_penalty", "finite"),
        (sampling(frequency_penalty=-math.inf), "sampling.frequency_penalty", "finite"),
        (sampling(logit_bias={100: 1.0}), "sampling.logit_bias", "below the vocabulary size 100, got 100"),
        (sampling(logit_bias={3: math.nan}), "sampling.logit_bias", "finite values, got nan for token 3"),
        (sampling(stop=["a", ""]), "sampling.stop", "must not hold an empty string"),
        (sampling(stop=["a"] * 17), "sampling.stop", "at most 16 strings, got 17"),
        (sampling(stop=["a" * 1025]), "sampling.stop", "at most 1024 characters, got 1025"),
        (sampling(stop_token_ids=[100]), "sampling.stop_token_ids", "size 100, got 100"),
        (sampling(stop_token_ids=[3] * 101), "sampling.stop_token_ids", "the vocabulary, 100, got 101"),
        (sampling(logprobs=21), "sampling.logprobs", "sampling.logprobs must be at most 20, got 21"),
        (sampling(max_new_tokens=4, min_new_tokens=5), "sampling.min_new_tokens", "at most max_new_tokens 4, got 5"),
        (
            pb.GenerateRequest(prompt="x", speculation=pb.SpeculationParams(gamma=9)),
            "speculation.gamma",
            "speculation.gamma must be at most 8, got 9",
        ),
        (
            pb.GenerateRequest(prompt="x", speculation=pb.SpeculationParams(task="é" * 65)),
            "speculation.task",
            "speculation.task must be at most 64 characters, got 65",
        ),
        (
            pb.GenerateRequest(prompt="x", speculation=pb.SpeculationParams(mode=17)),
            "speculation.mode",
            "must be a SpeculationMode, got 17",
        ),
        (pb.GenerateRequest(session_id="a b", prompt="x"), "session_id", "must be at most 128 of"),
        (pb.GenerateRequest(session_id="{a}", prompt="x"), "session_id", "must be at most 128 of"),
        (pb.GenerateRequest(request_id="x" * 129, prompt="x"), "request_id", "must be at most 128 of"),
        (pb.GenerateRequest(session_id="s", resume_from=3, prompt="x"), "resume_from", "without an input, got prompt"),
        (pb.GenerateRequest(resume_from=0), "session_id", "must be set with resume_from"),
    ],
)
def test_a_bad_field_is_refused_with_its_name_and_limit(request_: pb.GenerateRequest, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validated(request_)
    assert caught.value.field == field
    assert caught.value.reason == "INVALID_REQUEST"
    assert message in caught.value.message
    assert caught.value.message.startswith(field)


def test_more_ids_than_the_context_holds_are_refused_before_their_values_are_read() -> None:
    with pytest.raises(InvalidRequest, match="it holds 64 tokens, the context is 64") as caught:
        validated(pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[100] * 64)))
    assert (caught.value.reason, caught.value.field) == ("CONTEXT_TOO_LONG", "prompt_token_ids")


def test_an_empty_sampling_message_means_the_documented_defaults() -> None:
    request = validated(pb.GenerateRequest(prompt="hello"))
    assert request.text == "hello"
    assert request.sampling.filters == SamplingFilters()
    assert request.sampling.num_logprobs is None
    assert not request.is_seeded
    assert request.speculation.mode is Mode.BLOCK
    assert request.speculation.gamma is None


def test_fields_that_are_set_keep_their_values() -> None:
    request = validated(
        pb.GenerateRequest(
            session_id="s",
            request_id="r",
            prompt_token_ids=pb.TokenIds(ids=[7, 8]),
            sampling=pb.SamplingParams(
                temperature=0.0,
                top_k=5,
                min_new_tokens=2,
                stop_token_ids=[9],
                seed=2**64 - 1,
                logprobs=0,
                logit_bias={3: -2},
            ),
            speculation=pb.SpeculationParams(mode=pb.SPECULATION_MODE_OFF, gamma=0, draft_pool="small"),
        )
    )
    assert request.token_ids is not None
    assert request.token_ids.tolist() == [7, 8]
    assert request.sampling.filters.is_greedy
    assert request.sampling.filters.top_k == 5
    assert dict(request.sampling.filters.logit_bias) == {3: -2.0}
    assert request.sampling.filters.end_token_ids == (1, 2, 9)
    assert request.sampling.seed == 2**64 - 1
    assert request.is_seeded
    assert request.sampling.num_logprobs == 0
    assert (request.speculation.mode, request.speculation.gamma) == (Mode.OFF, 0)
    assert request.speculation.draft_pool == "small"


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    assert validated(sampling(top_k=100)).sampling.filters.top_k == 0


def test_a_retry_has_the_same_digest_and_another_request_has_another_one() -> None:
    first = sampling(seed=1, logit_bias={3: 1.0, 4: 2.0})
    retry = sampling(seed=1, logit_bias={4: 2.0, 3: 1.0})
    retry.session_id, retry.request_id, retry.return_provenance, retry.expected_session_tokens = "s", "r", True, 9
    digest = validated(first).digest
    assert digest == validated(retry).digest
    others = [
        sampling(seed=2, logit_bias={3: 1.0, 4: 2.0}),
        sampling(logit_bias={3: 1.0, 4: 2.0}),
        sampling(seed=1, logit_bias={3: 1.0, 4: 2.0}, temperature=0.0),
        sampling(seed=1, logit_bias={3: 1.0, 4: 2.0}, stop=["x"]),
        pb.GenerateRequest(prompt="hello!", sampling=first.sampling),
        pb.GenerateRequest(messages=chat("user").messages, sampling=first.sampling),
        pb.GenerateRequest(messages=extra('{"name": "n"}').messages, sampling=first.sampling),
        pb.GenerateRequest(messages=extra('{"name": "m"}').messages, sampling=first.sampling),
        pb.GenerateRequest(messages=arguments("{}").messages, sampling=first.sampling),
        pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5]), sampling=first.sampling),
        pb.GenerateRequest(prompt="hello", sampling=first.sampling, speculation=pb.SpeculationParams(gamma=0)),
    ]
    digests = [validated(other).digest for other in others]
    assert len({digest, *digests}) == 1 + len(others)


def test_digests_equal_those_that_stored_records_hold() -> None:
    """The values are constants: if a digest changed, retries of stored requests would be refused."""
    request = pb.GenerateRequest(
        session_id="s",
        request_id="r",
        prompt_token_ids=pb.TokenIds(ids=[7, 8]),
        sampling=pb.SamplingParams(
            max_new_tokens=9,
            min_new_tokens=2,
            temperature=0.0,
            top_p=0.9,
            top_k=5,
            min_p=0.25,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=0.5,
            logit_bias={3: -2, 4: 0.5},
            seed=2**64 - 1,
            stop=["é"],
            stop_token_ids=[9],
            ignore_eos=True,
            logprobs=0,
        ),
        speculation=pb.SpeculationParams(mode=pb.SPECULATION_MODE_OFF, gamma=0, draft_pool="small", task="chat"),
        return_provenance=True,
        expected_session_tokens=3,
    )
    every_field, few = validated(request), validated(pb.GenerateRequest(prompt="hello"))
    assert (every_field.digest, few.digest) == (
        "2:2d6a885593dbbe31b033405f09877e1d",
        "2:f057d67f2dd5a9c1e24e0d6907d8ad22",
    )
    assert (every_field.former_digests, few.former_digests) == (
        ("2164242a50dc17f4c58c558a34c8c394",),
        ("bcccbdfbc4558d1c0c378a2835f13ec4",),
    )
    conversation = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hello")])
    chatting = validated(pb.GenerateRequest(messages=conversation))
    assert (chatting.digest, chatting.former_digests) == (
        "2:2614480cd455048d67e9ed1def061c6d",
        ("92439e81b098013949177cd3d0b0b7bb",),
    )


@pytest.mark.parametrize(
    ("asked", "field", "message"),
    [
        (RawGenerationParams(prompt="x", prompt_token_ids=[1]), "input", "got prompt and prompt_token_ids"),
        (RawGenerationParams(prompt_token_ids=[5, -1]), "prompt_token_ids", "must be at least 0 and below"),
        (RawGenerationParams(prompt_token_ids=[2**40]), "prompt_token_ids", "size 100, got 1099511627776"),
        (RawGenerationParams(session_id="s", resume_from=-1), "resume_from", "must be at least 0, got -1"),
        (RawGenerationParams(prompt="x", expected_session_tokens=-1), "expected_session_tokens", "at least 0, got -1"),
        (
            RawGenerationParams(prompt="x", sampling=RawSamplingParams(seed=2**64)),
            "sampling.seed",
            f"at most {2**64 - 1}",
        ),
        (RawGenerationParams(prompt="x", sampling=RawSamplingParams(seed=-1)), "sampling.seed", "at least 0"),
        (
            RawGenerationParams(prompt="x", sampling=RawSamplingParams(max_new_tokens=-1)),
            "sampling.max_new_tokens",
            "got -1",
        ),
        (RawGenerationParams(prompt="x", sampling=RawSamplingParams(top_k=-1)), "sampling.top_k", "at least 0, got -1"),
        (
            RawGenerationParams(prompt="x", sampling=RawSamplingParams(logprobs=-1)),
            "sampling.logprobs",
            "at least 0, got -1",
        ),
        (
            RawGenerationParams(prompt="x", sampling=RawSamplingParams(stop_token_ids=[-1])),
            "sampling.stop_token_ids",
            "got -1",
        ),
        (RawGenerationParams(prompt="x", speculation=RawSpeculationParams(gamma=-1)), "speculation.gamma", "got -1"),
        (RawGenerationParams(prompt="x", speculation=RawSpeculationParams(mode=-1)), "speculation.mode", "got -1"),
    ],
)
def test_values_that_protobuf_cannot_hold_are_refused_from_other_fronts(
    asked: RawGenerationParams, field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_request(asked, LIMITS)
    assert caught.value.field == field
    assert message in caught.value.message


def test_a_request_from_another_front_gives_the_same_request() -> None:
    asked = RawGenerationParams(
        session_id="s",
        prompt="hello",
        sampling=RawSamplingParams(temperature=0.5, seed=3),
        speculation=RawSpeculationParams(),
    )
    message = pb.GenerateRequest(session_id="s", prompt="hello", sampling=pb.SamplingParams(temperature=0.5, seed=3))
    assert validate_request(asked, LIMITS).digest == validated(message).digest
    assert validate_request(asked, LIMITS).sampling == validated(message).sampling


def test_a_call_about_a_session_needs_its_id() -> None:
    assert validate_session_id("s-1") == "s-1"
    with pytest.raises(InvalidRequest, match="session_id must be set"):
        validate_session_id("")
