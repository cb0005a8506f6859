"""Clients that read slowly or not at all: memory stays bounded, and they get every token when they resume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from coordinator.generation import stream as output_stream
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.support.coordinator_rig import PROMPT, Coordinator, eventually, request, started_coordinator
from tests.support.output import Output, read_rest, read_until
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]

KEPT = 16
NUM_TOKENS = 500
#: Each token has details of 20 logprobs, so that the buffers of the transport hold only a part of the output.
LARGE = {"max_new_tokens": NUM_TOKENS, "logprobs": 20, "provenance": True}


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_stream, "MAX_BUFFERED_TOKENS", KEPT)


def kept_tokens(coordinator: Coordinator) -> int:
    """Return the largest number of tokens that a running generation keeps for its readers."""
    streams = [generation.stream for generation in coordinator.generations._running.values()]
    return max((stream.num_tokens - stream.num_dropped_tokens for stream in streams), default=0)


@asynccontextmanager
async def narrow_stub(coordinator: Coordinator) -> AsyncIterator[CoordinatorServiceStub]:
    """A client whose HTTP/2 window is small."""
    options = (("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(coordinator.server.address, options=options) as channel:
        yield CoordinatorServiceStub(channel)


async def read_to_the_cut(stream: Any, output: Output) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_rest(stream, output)
    return caught.value


async def test_a_reader_that_never_reads_is_cut_off_and_resumes_without_repeat_or_gap() -> None:
    async with started_coordinator() as (rig, coordinator), narrow_stub(coordinator) as stub:
        generations = coordinator.generations
        stream = stub.Generate(request(session_id="s", **LARGE))
        output = Output()
        output.add(await stream.read())
        most = 0
        while generations.num_running:
            most = max(most, kept_tokens(coordinator))
            await asyncio.sleep(0)
        assert 0 < most <= KEPT + 16
        error = from_rpc_error(await read_to_the_cut(stream, output))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert error.retryable
        assert "resume" in error.message
        failures = {"model_name": "table", "reason": "QUEUE_FULL"}  # not a cancellation: the server ended the stream
        assert coordinator.metrics.registry.get_sample_value("specdec:request_interruptions_total", failures) == 1.0
        num_read = len(output.token_ids)
        assert 0 < num_read < NUM_TOKENS
        rest = await coordinator.generate(request(None, session_id="s", resume_from=num_read))
        assert rest.chunks[0].index == num_read
        assert output.token_ids + rest.token_ids == rig.target.worker.greedy_continuation(PROMPT, NUM_TOKENS)


async def test_a_reader_that_never_reads_does_not_delay_other_readers_of_its_request() -> None:
    async with started_coordinator() as (rig, coordinator), narrow_stub(coordinator) as stub:
        asked = request(session_id="s", request_id="r", **LARGE)
        idle = stub.Generate(asked)
        begun = Output()
        begun.add(await idle.read())
        whole = await coordinator.generate(asked)
        assert whole.token_ids == rig.target.worker.greedy_continuation(PROMPT, NUM_TOKENS)
        error = await read_to_the_cut(idle, begun)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_reader_that_joins_late_gets_dropped_tokens_from_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 100  # on a slow machine readers fall a few rounds behind
    monkeypatch.setattr(output_stream, "MAX_BUFFERED_TOKENS", kept)
    async with started_coordinator() as (rig, coordinator):
        asked = request(session_id="s", request_id="r", max_new_tokens=400, gamma=2)
        first = asyncio.create_task(coordinator.generate(asked))
        await eventually(lambda: any(g.stream.num_tokens > 2 * kept for g in coordinator.generations._running.values()))
        rig.target.worker.gate.clear()
        late = coordinator.stub.Generate(asked)
        resumed = coordinator.stub.Generate(request(None, session_id="s", resume_from=5))
        outputs = [await read_until(late, 1), await read_until(resumed, 1)]
        rig.target.worker.gate.set()
        joined, later = await asyncio.gather(read_rest(late, outputs[0]), read_rest(resumed, outputs[1]))
        whole = await first
        assert (joined.token_ids, joined.text) == (whole.token_ids, whole.text)
        assert later.chunks[0].index == 5
        assert later.token_ids == whole.token_ids[5:]
        assert joined.finished.reason == whole.finished.reason == pb.FINISH_REASON_LENGTH


async def test_unread_streams_of_one_connection_are_cut_off_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with started_coordinator() as (rig, coordinator), narrow_stub(coordinator) as stub:
        streams = [stub.Generate(request(session_id=f"s{index}", **LARGE)) for index in range(3)]
        outputs = [Output() for _ in streams]
        await eventually(lambda: coordinator.generations.num_running == len(streams))
        await eventually(lambda: not coordinator.generations.num_running)
        for stream, output in zip(streams, outputs, strict=True):
            assert (await read_to_the_cut(stream, output)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        output = await coordinator.generate(request(None, session_id="s2", resume_from=len(outputs[2].token_ids)))
        assert outputs[2].token_ids + output.token_ids == rig.target.worker.greedy_continuation(PROMPT, NUM_TOKENS)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_reader_that_takes_nothing_after_the_output_is_complete_is_cut_off_and_resumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_stream, "MAX_BUFFERED_TOKENS", 2 * NUM_TOKENS)
    monkeypatch.setattr(output_stream, "MAX_SENDING_S", 2.0)
    async with started_coordinator(drafts=0) as (rig, coordinator), narrow_stub(coordinator) as stub:
        stream = stub.Generate(request(session_id="s", **LARGE))
        output = Output()
        output.add(await stream.read())
        await eventually(lambda: not coordinator.generations.num_running)
        await asyncio.sleep(4.0)
        error = from_rpc_error(await read_to_the_cut(stream, output))
        assert (error.reason, error.retryable, "was not read for" in error.message) == ("QUEUE_FULL", True, True)
        rest = await coordinator.generate(request(None, session_id="s", resume_from=len(output.token_ids)))
        assert output.token_ids + rest.token_ids == rig.target.worker.greedy_continuation(PROMPT, NUM_TOKENS)
