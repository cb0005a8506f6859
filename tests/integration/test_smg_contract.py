"""A coordinator as a worker of the router smg: every call of the contract, over real gRPC to real replicas."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import zipfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from coordinator.replicas.replica import TARGET
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.tenant import TENANT_KEY
from tests.support.coordinator_rig import (
    PROMPT,
    VOCABULARY,
    Coordinator,
    Rig,
    eventually,
    start_service,
    write_tokenizer,
)
from tests.support.coordinator_rig import request as own_request
from tests.support.stack import free_port

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass(frozen=True)
class Worker:
    """A coordinator and a router's stub to it."""

    rig: Rig
    coordinator: Coordinator
    stub: VllmEngineStub


@dataclass
class Answer:
    """The messages of one output."""

    chunks: list[pb.GenerateStreamChunk] = field(default_factory=list)
    complete: pb.GenerateComplete | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig(write_checkpoint=partial(write_tokenizer, chat_template=TEMPLATE)) as rig:
        yield rig


@pytest.fixture
async def worker(rig: Rig) -> Worker:
    return worker_of(rig, await rig.coordinator(has_smg_contract=True))


def worker_of(rig: Rig, coordinator: Coordinator) -> Worker:
    return Worker(rig, coordinator, VllmEngineStub(coordinator.channel))


def request(*, stream: bool = True, request_id: str = "r-1", **params: Any) -> pb.GenerateRequest:
    """A greedy request of 24 tokens, unless said otherwise."""
    fields = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params}
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=PROMPT),
        sampling_params=pb.SamplingParams(**fields),
        stream=stream,
    )


async def run(stub: VllmEngineStub, message: pb.GenerateRequest) -> Answer:
    """Run a request to its end."""
    answer = Answer()
    async for response in stub.Generate(message):
        assert answer.complete is None, "a message follows the last one"
        if response.WhichOneof("response") == "chunk":
            answer.chunks.append(response.chunk)
        else:
            answer.complete = response.complete
    return answer


async def test_the_tokens_are_those_of_our_own_contract_whether_they_are_streamed_or_not(worker: Worker) -> None:
    expected = (await worker.coordinator.generate(own_request())).token_ids
    streamed, whole = await run(worker.stub, request()), await run(worker.stub, request(stream=False, request_id="r-2"))
    assert streamed.token_ids == expected
    assert len(streamed.chunks) > 1
    assert [chunk.completion_tokens for chunk in streamed.chunks] == [len(each.token_ids) for each in streamed.chunks]
    assert not streamed.complete.output_ids
    assert (whole.chunks, list(whole.complete.output_ids)) == ([], expected)
    for complete in (streamed.complete, whole.complete):
        counts = (complete.prompt_tokens, complete.completion_tokens, complete.finish_reason)
        assert counts == (len(PROMPT), 24, "length")


async def test_the_end_counts_the_draft_tokens_and_the_accepted_ones() -> None:
    async with Rig(draft_salt=0) as rig:  # a perfect draft
        worker = worker_of(rig, await rig.coordinator(has_smg_contract=True))
        for stream in (False, True):
            complete = (await run(worker.stub, request(stream=stream))).complete
            while not complete.spec_draft_tokens:  # on a busy machine, drafting may not pay for a while
                complete = (await run(worker.stub, request(stream=stream))).complete
            assert 0 < complete.spec_accepted_tokens <= complete.spec_draft_tokens


async def test_an_output_ends_at_stop_tokens_and_stop_strings_with_the_reason_stop(worker: Worker) -> None:
    tokens = worker.rig.greedy(PROMPT, 24)
    for stop in ({"stop_token_ids": [tokens[3]]}, {"stop": [f"w{tokens[3]}"]}):
        answer = await run(worker.stub, request(**stop))
        assert (answer.complete.finish_reason, answer.token_ids) == ("stop", tokens[: tokens.index(tokens[3]) + 1])


async def test_without_a_limit_the_output_fills_the_context(worker: Worker) -> None:
    message = request(stream=False)
    message.sampling_params.ClearField("max_tokens")
    complete = (await run(worker.stub, message)).complete
    assert complete.prompt_tokens + complete.completion_tokens == 512
    assert complete.finish_reason == "length"


async def test_logprobs_belong_to_the_tokens_they_come_with(worker: Worker) -> None:
    streamed, whole = (
        await run(worker.stub, request(logprobs=2)),
        await run(worker.stub, request(stream=False, logprobs=2)),
    )
    for chunk in streamed.chunks:
        assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
    found = whole.complete.output_logprobs
    assert list(found.token_ids) == list(whole.complete.output_ids) == streamed.token_ids
    for token_id, logprob, top in zip(found.token_ids, found.token_logprobs, found.top_logprobs, strict=True):
        assert (len(top.token_ids), top.token_ids[0]) == (2, token_id)  # greedy: the likeliest token
        assert top.values[0] == logprob <= 0
    assert not (await run(worker.stub, request(stream=False))).complete.HasField("output_logprobs")


async def test_a_seed_decides_a_sampled_output_and_may_be_negative() -> None:
    sampled = {"temperature": 1.0, "seed": -7}
    async with Rig(drafts=0) as rig:  # the length of drafts, which the server chooses, changes what a seed gives
        worker = worker_of(rig, await rig.coordinator(has_smg_contract=True))
        first, second = [(await run(worker.stub, request(**sampled))).token_ids for _ in range(2)]
        other = (await run(worker.stub, request(**{**sampled, "seed": -8}))).token_ids
    assert first == second != other


async def test_an_aborted_request_ends_with_the_reason_abort_and_frees_its_session(worker: Worker) -> None:
    stream = worker.stub.Generate(request(max_tokens=500))
    first = await stream.read()
    num_read = len(first.chunk.token_ids)
    await worker.stub.Abort(pb.AbortRequest(request_ids=["unknown", "r-1"]))
    while (response := await stream.read()).WhichOneof("response") == "chunk":
        num_read += len(response.chunk.token_ids)
    assert (response.complete.finish_reason, response.complete.completion_tokens) == ("abort", num_read)
    assert num_read < 500
    await eventually(lambda: worker.coordinator.generations.num_running == 0)
    engines = [service.engine for service in worker.rig.services]
    await eventually(lambda: not any(engine.stats().num_running_calls for engine in engines))
    labels = {"model_name": "table", "cause": "client_left"}
    assert worker.coordinator.metrics.registry.get_sample_value("specdec:request_cancellations_total", labels) == 1


async def test_a_caller_that_leaves_ends_its_request(worker: Worker) -> None:
    stream = worker.stub.Generate(request(max_tokens=500))
    await stream.read()
    assert worker.coordinator.generations.num_running == 1
    stream.cancel()
    await eventually(lambda: worker.coordinator.generations.num_running == 0)


async def test_a_request_is_not_aborted_by_another_tenant(rig: Rig) -> None:
    worker = worker_of(rig, await rig.coordinator(has_smg_contract=True, tenant_header=True))
    stream = worker.stub.Generate(request(max_tokens=200))
    await stream.read()
    await worker.stub.Abort(pb.AbortRequest(request_ids=["r-1"]), metadata=((TENANT_KEY, "another"),))
    while (response := await stream.read()).WhichOneof("response") == "chunk":
        pass
    assert (response.complete.finish_reason, response.complete.completion_tokens) == ("length", 200)


@pytest.mark.parametrize(
    ("field_name", "params"),
    [
        ("sampling_params.n", {"n": 2}),
        ("sampling_params.max_tokens", {"max_tokens": 0}),
        ("sampling_params.json_schema", {"json_schema": "{}"}),
        ("sampling_params.regex", {"regex": "a+"}),
        ("sampling_params.prompt_logprobs", {"prompt_logprobs": 0}),
        ("sampling_params.truncate_prompt_tokens", {"truncate_prompt_tokens": 4}),
        ("sampling.logprobs", {"logprobs": -1}),
        ("sampling.top_p", {"top_p": 2.0}),
        ("sampling.max_new_tokens", {"max_tokens": 600}),
    ],
)
async def test_a_field_that_cannot_be_honoured_is_refused_by_name(
    worker: Worker, field_name: str, params: dict[str, Any]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=field_name) as caught:
        await run(worker.stub, request(**params))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_prompt_must_be_token_ids_that_the_context_holds(worker: Worker) -> None:
    refused = {
        "tokenized: ": pb.GenerateRequest(text="w5 w6"),
        "prompt_token_ids must not be empty": pb.GenerateRequest(tokenized=pb.TokenizedInput()),
        "prompt_token_ids must leave room": pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5] * 600)),
        f"below the vocabulary size {VOCABULARY}": pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[99])),
        "mm_inputs": pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=[5]), mm_inputs=pb.MultimodalInputs(mm_hashes=["a"])
        ),
    }
    for told, message in refused.items():
        with pytest.raises(grpc.aio.AioRpcError, match=told) as caught:
            await run(worker.stub, message)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_full_queue_is_resource_exhausted(rig: Rig) -> None:
    worker = worker_of(rig, await rig.coordinator(has_smg_contract=True, max_queue=0))
    with pytest.raises(grpc.aio.AioRpcError, match="--max-queue") as caught:
        await run(worker.stub, request())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_worker_is_healthy_while_the_coordinator_serves(worker: Worker) -> None:
    server = worker.coordinator.server
    for change, is_healthy in ((None, False), (server.set_serving, True), (server.set_not_serving, False)):
        if change is not None:
            await change()
        assert (await worker.stub.HealthCheck(pb.HealthCheckRequest())).healthy is is_healthy


async def test_health_is_an_error_before_the_first_target_is_connected() -> None:
    async with Rig(targets=0, drafts=0) as rig:
        worker = worker_of(rig, await rig.coordinator(has_smg_contract=True))
        with pytest.raises(grpc.aio.AioRpcError, match="no target replica has been connected yet") as caught:
            await worker.stub.HealthCheck(pb.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def write_recommending_tokenizer(directory: Path) -> None:
    write_tokenizer(directory, TEMPLATE)
    recommended = {"temperature": 0.5, "top_k": 3, "max_new_tokens": 9}
    (directory / "generation_config.json").write_text(json.dumps(recommended))


async def test_a_worker_describes_its_model_its_load_and_its_tokenizer(tmp_path: Path) -> None:
    async with Rig(write_checkpoint=write_recommending_tokenizer) as rig:
        worker = worker_of(rig, await rig.coordinator(has_smg_contract=True))
        model = await worker.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.is_generation, model.vocab_size) == ("table", True, VOCABULARY)
        assert (model.max_context_length, model.max_req_input_len, list(model.eos_token_ids)) == (512, 511, [1])
        assert json.loads(model.default_sampling_params_json) == {"temperature": 0.5, "top_k": 3}

        stream = worker.stub.Generate(request(max_tokens=500))
        await stream.read()
        server = await worker.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.active_requests, server.data_parallel_size, server.server_type) == (1, 1, "specdec")
        loads = (await worker.stub.GetLoads(pb.GetLoadsRequest())).loads
        assert [load.num_running_reqs for load in loads] == [1]
        stream.cancel()

        chunks = [chunk async for chunk in worker.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        assert chunks[-1].sha256
        zipfile.ZipFile(io.BytesIO(b"".join(chunk.data for chunk in chunks))).extractall(tmp_path)
        received = ServedTokenizer(tmp_path)
        assert received.fingerprint == rig.tokenizer.fingerprint
        assert received.has_chat_template


async def test_what_the_contract_has_beside_generation_is_unimplemented(worker: Worker) -> None:
    stub = worker.stub
    for call in (
        stub.Embed(pb.EmbedRequest()),
        stub.FlushCache(common_pb2.FlushCacheRequest()),
        stub.StartProfile(common_pb2.StartProfileRequest()),
        stub.StopProfile(common_pb2.StopProfileRequest()),
        stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="this worker offers no") as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def becomes_healthy(stub: VllmEngineStub) -> bool:
    """Return whether a worker is healthy, 0.1 s later where it is not: it listens before it has a target."""
    try:
        await stub.HealthCheck(pb.HealthCheckRequest(), wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        await asyncio.sleep(0.1)
        return False
    return True


async def test_a_coordinator_process_with_the_flag_is_a_worker(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TEMPLATE)
    target = await start_service(TARGET, salt=0, vocabulary=ServedTokenizer(tmp_path).fingerprint)
    listen = f"127.0.0.1:{free_port()}"
    flags = ["--listen", listen, "--tokenizer", str(tmp_path), "--redis-url", "memory://"]
    flags += ["--target-endpoint", target.address, "--worker-contract", "smg"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator", *flags, cwd=ROOT, stdout=DEVNULL, stderr=DEVNULL
    )
    try:
        async with grpc.aio.insecure_channel(listen) as channel:
            stub = VllmEngineStub(channel)
            async with asyncio.timeout(120):
                while not await becomes_healthy(stub):
                    pass
            assert (await run(stub, request())).token_ids == target.worker.greedy_continuation(PROMPT, 24)
            model = await stub.GetModelInfo(pb.GetModelInfoRequest())
            assert (model.tokenizer_path, model.served_model_name) == (str(tmp_path), "table")
    finally:
        process.terminate()
        await process.wait()
        await target.kill()
    assert process.returncode == 0


async def test_without_the_contracts_package_the_flag_is_refused_with_the_extra_to_install(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    flags = ["--listen", "127.0.0.1:0", "--tokenizer", str(tmp_path), "--redis-url", "memory://"]
    flags += ["--target-endpoint", "127.0.0.1:1", "--worker-contract", "smg"]
    hidden = f"import sys\nsys.modules['smg_grpc_proto'] = None\nfrom coordinator.__main__ import main\nmain({flags!r})"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", hidden, cwd=ROOT, stdout=DEVNULL, stderr=PIPE)
    _, log = await process.communicate()
    assert b'worker_contract: package smg-grpc-proto is not installed: run pip install "specdec[smg]"' in log
