"""Tool calls through the services, with the built-in pair as a model of the Hermes family with reasoning.

The models know nothing of tools: every call is what the grammar leaves of their text.
"""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import jsonschema
import pytest

from specdec import Client, Constraint
from specdec.client import AnswerText, Chunk, Completion, ReasoningText, ToolCallDelta
from specdec.contract.errors import InvalidRequest
from specdec.contract.tools import OutputPart, joined_parts
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1 import coordinator_pb2_grpc
from tests.support.redis_fixture import RedisServer
from tests.support.stack import Stack
from tests.support.tool_models import DEMO, FAMILIES, HERMES_THINKING, THINK_MARKERS, TOOLS, WEATHER, write_family

USER = {"role": "user", "content": "def weather(city):"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("family")
    markers = (*FAMILIES["hermes"][1], *THINK_MARKERS)
    target, draft = (write_family(directory / role, role, HERMES_THINKING, markers) for role in ("target", "draft"))
    arguments = ["--lease-ttl-s", "1", "--draft-timeout-s", "20"]
    with Stack(
        target,
        draft,
        redis_url=redis_server.url,
        num_coordinators=2,
        coordinator_arguments=arguments,
        target_arguments=["--local-draft", f"eagle3:{DEMO / 'eagle3'}"],
    ) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.endpoint, insecure=True) as opened:
        yield opened


def generate(client: Client, **options: Any) -> Completion:
    settings = {"messages": [USER], "tools": TOOLS, "max_new_tokens": 120, "temperature": 0.0}
    completion: Completion = client.generate(**(settings | options))
    return completion


def only_weather(**options: Any) -> dict[str, Any]:
    return {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}} | options


def test_a_required_call_is_whole_and_its_arguments_follow_the_schema(client: Client) -> None:
    for seed in range(4):
        completion = generate(client, tool_choice="required", temperature=1.0, seed=seed, max_new_tokens=400)
        if completion.finish_reason == "length":  # the pair may write reasoning without end
            continue
        assert completion.finish_reason == "tool_calls"
        for call in completion.tool_calls:
            schema = WEATHER if call.name == "get_weather" else {"type": "object"}
            jsonschema.validate(json.loads(call.arguments), schema)
            assert call.id.startswith("call_")
        assert len({call.id for call in completion.tool_calls}) == len(completion.tool_calls) > 0


@pytest.mark.parametrize(("gamma", "pool"), [(0, "default"), (3, "default"), (8, "default"), (3, "eagle3")])
def test_the_text_of_a_call_is_the_same_with_and_without_drafts(client: Client, gamma: int, pool: str) -> None:
    """Drafts of heads are among them: with those, the calls of other engines were empty."""
    alone = generate(client, mode="off", **only_weather())
    drafted = generate(client, gamma=gamma, draft_pool=pool, **only_weather())
    assert drafted.token_ids == alone.token_ids
    assert [call.arguments for call in drafted.tool_calls] == [call.arguments for call in alone.tool_calls]


def test_deltas_of_several_tokens_give_the_name_once_and_lose_no_arguments(client: Client) -> None:
    chunks: list[Chunk] = list(client.generate(messages=[USER], tools=TOOLS, temperature=0.0, stream=True,
                                               chat_template_kwargs=NO_THINKING, **only_weather()))  # fmt: skip
    parts = [part for chunk in chunks for part in chunk.parts]
    assert all(isinstance(part, ToolCallDelta) for part in parts)
    assert any(len(chunk.token_ids) > 1 and chunk.parts for chunk in chunks), "no delta of several tokens"
    assert json.loads("".join(part.arguments for part in parts))
    first, *rest = parts
    assert isinstance(first, ToolCallDelta)
    assert first.name == "get_weather"
    assert first.id
    assert not any(part.name or part.id for part in rest if isinstance(part, ToolCallDelta))
    assert len(rest) > 1
    assert "".join(chunk.text for chunk in chunks) == ""


NO_THINKING = {"enable_thinking": False}


def test_a_request_that_is_resumed_at_any_token_of_its_call_gives_the_same_parts(stack: Stack, client: Client) -> None:
    whole = generate(client, chat_template_kwargs=NO_THINKING, **only_weather())
    (call,) = whole.tool_calls
    rests = [_parts_of(_raw(stack, whole, start)) for start in range(len(whole.token_ids) + 1)]
    assert rests[0] == [ToolCallDelta(0, call.id, "get_weather", call.arguments)]
    assert rests[-1] == []
    for longer, shorter in itertools.pairwise(rests):
        (one,), other = longer or [None], shorter[0] if shorter else None
        assert isinstance(other, ToolCallDelta | None)
        if isinstance(one, ToolCallDelta) and other is not None:
            assert one.arguments.endswith(other.arguments)
            assert (other.name, other.id) in ((one.name, one.id), ("", ""))
        assert one is not None or other is None


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0, "gamma": 2}, pytest.param({"temperature": 1.0, "seed": 7}, marks=pytest.mark.full)],
)
def test_a_call_that_is_left_at_any_token_goes_on_at_another_coordinator(
    stack: Stack, client: Client, sampling: dict[str, Any]
) -> None:
    options = {"chat_template_kwargs": NO_THINKING, **sampling, **only_weather()}
    whole = generate(client, **options)
    (call,) = whole.tool_calls
    for num_read in range(1, len(whole.token_ids)):
        session_id = f"left-{sampling['temperature']}-{num_read}"
        read: list[Chunk] = []
        with client.generate(messages=[USER], tools=TOOLS, stream=True, session_id=session_id, max_new_tokens=120,
                             **options) as stream:  # fmt: skip
            while sum(len(chunk.token_ids) for chunk in read) < num_read:
                read.append(next(stream))
        num_held = sum(len(chunk.token_ids) for chunk in read)
        rest = _resume(stack.parts["coordinator2"].address, session_id, num_held)
        assert tuple(token_id for chunk in [*read, *rest] for token_id in chunk.token_ids) == whole.token_ids
        (joined,) = joined_parts([*(part for chunk in read for part in chunk.parts), *_parts_of(rest)])
        assert isinstance(joined, ToolCallDelta)
        assert (joined.name, joined.arguments) == (call.name, call.arguments)
        assert joined.id == _first_id(stack, session_id)


@pytest.mark.parametrize(
    ("part", "num_read"),
    [
        ("coordinator", 16),
        ("target", 4),
        *(pytest.param("coordinator", num_read, marks=pytest.mark.full) for num_read in (1, 6, 11, 21, 26)),
        pytest.param("target", 15, marks=pytest.mark.full),
    ],
)
def test_a_call_survives_the_death_of_a_process(stack: Stack, client: Client, part: str, num_read: int) -> None:
    options = {"chat_template_kwargs": NO_THINKING, "temperature": 0.0, "gamma": 0, **only_weather()}
    whole = generate(client, **options)
    session_id = f"killed-{part}-{num_read}"
    read: list[Chunk] = []
    with Client(f"{stack.endpoint},{stack.parts['coordinator2'].address}", insecure=True) as both:
        with both.generate(messages=[USER], tools=TOOLS, stream=True, session_id=session_id, max_new_tokens=120,
                           timeout=300, **options) as stream:  # fmt: skip
            for chunk in stream:
                read.append(chunk)
                if num_read and sum(len(chunk.token_ids) for chunk in read) >= num_read:
                    num_read = 0
                    stack.kill(part)
                    stack.restart(part)
        completion = stream.result()
    assert completion.token_ids == whole.token_ids
    (call,) = completion.tool_calls
    assert (call.name, call.arguments) == ("get_weather", whole.tool_calls[0].arguments)
    assert call.id == _first_id(stack, session_id)


@pytest.mark.parametrize("num_read", [2, 9, 16])
@pytest.mark.parametrize(
    "form",
    [only_weather(tools=TOOLS, chat_template_kwargs=NO_THINKING), {"constraint": Constraint.json_schema(WEATHER)}],
)
def test_an_output_goes_on_after_its_target_stood_still(
    stack: Stack, client: Client, form: dict[str, Any], num_read: int
) -> None:
    options = {"messages": [USER], "max_new_tokens": 120, "temperature": 1.0, "seed": 4, "mode": "coupled", **form}
    whole = client.generate(**options)
    target, read = stack.parts["target"].process, list[Chunk]()
    assert target is not None
    with client.generate(stream=True, **options) as stream:
        for chunk in stream:
            read.append(chunk)
            if num_read and sum(len(chunk.token_ids) for chunk in read) >= num_read:
                num_read = 0
                target.send_signal(signal.SIGSTOP)
                time.sleep(1.0)  # longer than any step, so that calls of the coordinator wait
                target.send_signal(signal.SIGCONT)
    assert num_read == 0
    assert tuple(token_id for chunk in read for token_id in chunk.token_ids) == whole.token_ids
    assert "".join(chunk.text for chunk in read) == whole.text
    assert [call.arguments for call in stream.result().tool_calls] == [call.arguments for call in whole.tool_calls]
    assert whole.finish_reason in ("stop", "tool_calls", "length")


def test_a_turn_that_is_rendered_again_keeps_the_tokens_of_the_session(client: Client) -> None:
    *_, think = client.tokenize("<think>")
    first = generate(client, logit_bias={think: -100.0}, **only_weather())
    assert first.finish_reason == "tool_calls"
    held = client.get_session(first.session_id, include_token_ids=True).token_ids
    calls = [call.for_message() for call in first.tool_calls]
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "21 degrees"} for call in first.tool_calls]
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, *answers]
    # The pair spells the arguments by tokens that the tokenizer would not choose.
    usual = client.tokenize(client.detokenize(first.token_ids, skip_special_tokens=False))
    assert tuple(usual[-len(first.token_ids) :]) != first.token_ids
    second = generate(client, messages=messages, session_id=first.session_id, max_new_tokens=4, tool_choice="none")
    later = client.get_session(first.session_id, include_token_ids=True).token_ids
    assert later[: len(held)] == held
    assert second.usage.num_cached_prompt_tokens >= len(held) - 1


def test_reasoning_that_the_prompt_has_begun_comes_before_the_call(client: Client) -> None:
    completion = generate(client, chat_template_kwargs={"begun": True}, tool_choice="required", temperature=1.0, seed=2)
    assert completion.reasoning
    assert completion.text == ""
    whole = generate(client, tools=None, chat_template_kwargs={"begun": True}, ignore_eos=True, max_new_tokens=8)
    assert whole.reasoning
    assert not whole.tool_calls


def test_an_answer_with_a_constraint_may_follow_the_reasoning(client: Client) -> None:
    for arguments in (NO_THINKING, {"begun": True}):
        completion = generate(
            client, tools=None, constraint=Constraint.choice(["yes", "no"]), chat_template_kwargs=arguments
        )
        assert completion.text in ("yes", "no") or completion.finish_reason == "length"


def test_without_reasoning_and_tools_an_output_has_no_parts(client: Client) -> None:
    chunks: list[Chunk] = list(client.generate("def f(x):", max_new_tokens=4, stream=True))
    assert not any(chunk.parts for chunk in chunks)


def test_the_choice_none_and_auto_end_as_the_model_ends(client: Client) -> None:
    for choice in ("none", "auto"):
        completion = generate(client, tool_choice=choice, temperature=1.0, seed=5, max_new_tokens=24)
        assert completion.finish_reason in ("stop", "length", "tool_calls")
        assert choice == "auto" or not completion.tool_calls


def test_a_call_that_the_limit_cuts_is_given_as_far_as_it_came(client: Client) -> None:
    options = {"chat_template_kwargs": NO_THINKING, **only_weather()}
    whole = generate(client, **options)
    for limit in range(1, len(whole.token_ids) - 1, 3):
        cut = generate(client, max_new_tokens=limit, **options)
        assert cut.finish_reason == "length"
        for call in cut.tool_calls:
            assert call.name == "get_weather"
            assert whole.tool_calls[0].arguments.startswith(call.arguments)


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"name": ""}]}, "tools.definitions[0].name"),
        ({"tools": [{"name": "x" * 1024}]}, "tools.definitions[0].name"),
        ({"tools": [{"name": "a b"}]}, "tools.definitions[0].name"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools.definitions[1].name"),
        ({"tools": [{"name": f"f{index}"} for index in range(129)]}, "tools.definitions"),
        ({"tools": [{"name": "f", "parameters": {"type": "string"}}]}, "tools.definitions[0].parameters_json"),
        ({"tools": [{"name": "f", "parameters": {"type": 3}}]}, "tools.definitions[0].parameters_json"),
        ({"tools": [{"name": "f", "parameters": {"properties": 3}}]}, "tools.definitions[0].parameters_json"),
        (
            {"tools": [FUNCTION, {"name": "g", "parameters": {"properties": {"a": {"$ref": "http://x/y"}}}}]},
            "tools.definitions[1].parameters_json",
        ),
        (
            {"tools": [{"name": "g", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}}]},
            "tools.definitions[0].parameters_json",
        ),
        (
            {"tools": [{"name": "g", "strict": True, "parameters": {"properties": {"a": {"nullable": True}}}}]},
            "tools.definitions[0].parameters_json",
        ),
        (
            {"tools": [{"name": "g", "parameters": {"description": "x" * (1 << 20)}}]},
            "tools.definitions[0].parameters_json",
        ),
        ({"tools": [FUNCTION], "tool_choice": {"function": {"name": "g"}}}, "tools.name"),
        ({"tools": [FUNCTION], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "messages": None, "prompt_token_ids": [5]}, "tools"),
    ],
)
def test_bad_tools_are_refused_by_name_before_anything_is_queued(
    client: Client, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        generate(client, **options)
    assert error.value.field == field


def test_tokens_of_a_conversation_are_counted_with_its_tools(client: Client) -> None:
    completion = generate(client, max_new_tokens=1)
    assert len(client.tokenize(messages=[USER], tools=TOOLS)) == completion.usage.num_prompt_tokens
    assert len(client.tokenize(messages=[USER])) < completion.usage.num_prompt_tokens
    with pytest.raises(InvalidRequest):
        client.tokenize(messages=[USER], tools=[{"name": ""}])
    with pytest.raises(InvalidRequest):
        client.tokenize("x", tools=TOOLS)


def test_a_bad_constraint_beside_tools_and_reasoning_is_refused_under_its_own_name(client: Client) -> None:
    for part in ({"not": {}}, {"type": "string", "contentEncoding": "base64"}):
        bad = Constraint.json_schema({"type": "object", "properties": {"a": part}})
        for options in ({}, {"tools": None}):
            with pytest.raises(InvalidRequest) as error:
                generate(client, constraint=bad, **options)
            assert (error.value.field, error.value.reason) == ("constraint.json_schema", "CONSTRAINT_INVALID")


def test_a_client_cannot_send_the_servers_own_kind_of_constraint(stack: Stack) -> None:
    request = pb.GenerateRequest(prompt="x")
    request.constraint.kind = 6
    request.constraint.text = 'start: "a"'
    with grpc.insecure_channel(stack.endpoint) as channel, pytest.raises(grpc.RpcError, match="STRUCTURAL"):
        list(coordinator_pb2_grpc.CoordinatorServiceStub(channel).Generate(request))


def test_another_choice_under_the_same_request_id_is_another_request(client: Client) -> None:
    ids = {"session_id": "same", "request_id": "one", "max_new_tokens": 2}
    generate(client, **ids)
    generate(client, **ids)
    with pytest.raises(InvalidRequest, match="was used for another request"):
        generate(client, tool_choice="required", **ids)


def _first_id(stack: Stack, session_id: str) -> str:
    (part,) = _parts_of(_resume(stack.endpoint, session_id, 0))
    assert isinstance(part, ToolCallDelta)
    return part.id


def _raw(stack: Stack, completion: Completion, resume_from: int) -> list[pb.TokenChunk]:
    return _resume(stack.endpoint, completion.session_id, resume_from)


def _resume(endpoint: str, session_id: str, resume_from: int) -> list[pb.TokenChunk]:
    request = pb.GenerateRequest(session_id=session_id, resume_from=resume_from)
    with grpc.insecure_channel(endpoint) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        responses = list(stub.Generate(request, timeout=300))
    return [response.tokens for response in responses if response.WhichOneof("event") == "tokens"]


def _parts_of(chunks: Sequence[pb.TokenChunk]) -> list[OutputPart]:
    """Return the parts of chunks, neighbours joined."""
    parts: list[OutputPart] = []
    for chunk in chunks:
        for part in chunk.parts:
            kind = part.WhichOneof("part")
            call = part.tool_call
            if kind == "tool_call":
                parts.append(ToolCallDelta(call.index, call.id, call.name, call.arguments))
            else:
                parts.append(AnswerText(part.text) if kind == "text" else ReasoningText(part.reasoning))
    return joined_parts(parts)
