"""Real processes and a real Redis: the end of a process costs clients no token."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest

from specdec.client import AsyncClient
from specdec.v1 import coordinator_pb2 as pb
from tests.support.process_rig import (
    NUM_TOKENS,
    PROMPT,
    ask,
    models,
    read_rest,
    read_some,
    reference,
    run,
    stack,
    stub_of,
)
from tests.support.redis_fixture import redis_server
from tests.support.stack import Stack

__all__ = ["models", "redis_server", "reference", "stack"]


def test_a_stream_continues_without_a_killed_draft_and_uses_it_after_its_restart(
    stack: Stack, reference: list[int]
) -> None:
    stub = stub_of(stack.endpoint)
    stream = stub.Generate(ask(num_tokens=4 * NUM_TOKENS, gamma=1, return_provenance=True))
    output = read_some(stream, 8)
    stack.kill("draft")
    read_rest(stream, output)
    assert output.token_ids == reference
    assert output.details[-1].source == pb.TOKEN_SOURCE_TARGET
    stack.restart("draft")
    while not any(pool.role == "draft" for pool in stub.GetInfo(pb.GetInfoRequest()).pools):
        pass
    assert run(stub, ask()).finished.stats.num_accepted_tokens > 0


def test_another_coordinator_finishes_the_stream_of_a_killed_one(stack: Stack, reference: list[int]) -> None:
    stream = stub_of(stack.endpoint).Generate(ask("orphan", num_tokens=4 * NUM_TOKENS, gamma=1))
    held = read_some(stream, 20)
    stack.kill("coordinator")
    with pytest.raises(grpc.RpcError) as caught:
        read_rest(stream, held)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    request = pb.GenerateRequest(session_id="orphan", resume_from=len(held.token_ids))
    rest = run(stub_of(stack.parts["coordinator2"].address), request)
    assert held.token_ids + rest.token_ids == reference
    assert rest.finished.usage.num_output_tokens == len(reference)
    stack.restart("coordinator")
    record = stub_of(stack.endpoint).GetSession(pb.GetSessionRequest(session_id="orphan", include_token_ids=True))
    assert list(record.token_ids) == [*PROMPT, *reference]


async def test_another_coordinator_finishes_the_stream_of_a_stopped_one(stack: Stack, reference: list[int]) -> None:
    standing = stack.parts["coordinator"].process
    assert standing is not None
    endpoint = f"ipv4:{stack.endpoint},{stack.parts['coordinator2'].address}"
    options = {"prompt_token_ids": PROMPT, "temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4 * NUM_TOKENS}
    try:
        async with (
            AsyncClient(endpoint) as client,
            client.generate(stream=True, gamma=1, **options) as one,
            client.generate(stream=True, gamma=1, **options) as other,  # each is at another coordinator
        ):
            await anext(one)
            await anext(other)
            standing.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(40):  # gRPC alone would wait for a minute
                outputs = [await one.result(), await other.result()]
    finally:
        standing.send_signal(signal.SIGCONT)
    assert [list(output.token_ids) for output in outputs] == [reference] * 2


def test_a_terminated_coordinator_finishes_running_requests_and_exits_with_0(
    stack: Stack, reference: list[int]
) -> None:
    stream = stub_of(stack.endpoint).Generate(ask(num_tokens=NUM_TOKENS, gamma=1))
    output = read_some(stream, 1)
    process = stack.parts["coordinator"].process
    process.terminate()
    read_rest(stream, output)
    assert output.token_ids == reference[:NUM_TOKENS]
    assert process.wait() == 0
    stack.restart("coordinator")
