"""Three real processes and a real Redis: greedy is what Hugging Face gives, and no process's end costs a token."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.rpc.status import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.coordinator_rig import Output
from tests.redis_fixture import RedisServer, redis_server
from tests.stack import Stack, free_port
from tests.tiny_models import build_tiny_model, build_tiny_pair

__all__ = ["redis_server"]

PROMPT = (5, 17, 99, 42, 3, 8)
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_tiny_pair("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stack(models: tuple[Path, Path], redis_server: RedisServer) -> Iterator[Stack]:
    arguments = ["--lease-ttl-s", "1", "--draft-timeout-s", "20"]
    with Stack(*models, redis_url=redis_server.url, num_coordinators=2, coordinator_arguments=arguments) as stack:
        yield stack


@pytest.fixture(scope="module")
def reference(models: tuple[Path, Path]) -> list[int]:
    """Hugging Face's greedy continuation of PROMPT, long enough for every test here."""
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    return greedy(model, PROMPT, 4 * NUM_TOKENS)


def greedy(model: torch.nn.Module, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
                            eos_token_id=None)  # fmt: skip
    return output[0, len(prompt) :].tolist()


def stub_of(address: str) -> CoordinatorServiceStub:
    return CoordinatorServiceStub(grpc.insecure_channel(address))


def ask(session_id: str = "", *, num_tokens: int = NUM_TOKENS, gamma: int = 3, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        session_id=session_id,
        prompt_token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True),
        speculation=pb.SpeculationParams(gamma=gamma),
        **fields,
    )


def run(stub: CoordinatorServiceStub, request: pb.GenerateRequest) -> Output:
    output = Output()
    for response in stub.Generate(request):
        output.add(response)
    return output


def read_rest(stream: Iterator[pb.GenerateResponse], output: Output) -> None:
    for response in stream:
        output.add(response)


def read_some(stream: Iterator[pb.GenerateResponse], num_tokens: int) -> Output:
    output = Output()
    while len(output.token_ids) < num_tokens:
        output.add(next(stream))
    return output


@pytest.mark.parametrize("mode", [pb.SPECULATION_MODE_REJECTION, pb.SPECULATION_MODE_OFF], ids=["rejection", "off"])
def test_greedy_output_is_hugging_faces_and_drafts_are_accepted_and_rejected(
    stack: Stack, reference: list[int], mode: int
) -> None:
    request = ask()
    request.speculation.mode = mode
    output = run(stub_of(stack.endpoint), request)
    assert output.token_ids == reference[:NUM_TOKENS]
    stats = output.finished.stats
    if mode == pb.SPECULATION_MODE_OFF:
        assert stats.num_target_only_steps == NUM_TOKENS
    else:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_killed_draft_is_done_without_and_taken_back(stack: Stack, reference: list[int]) -> None:
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


def test_a_killed_coordinators_stream_is_finished_by_another(stack: Stack, reference: list[int]) -> None:
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


def test_a_terminated_coordinator_finishes_what_runs_and_leaves_well(stack: Stack, reference: list[int]) -> None:
    stream = stub_of(stack.endpoint).Generate(ask(num_tokens=NUM_TOKENS, gamma=1))
    output = read_some(stream, 1)
    process = stack.parts["coordinator"].process
    process.terminate()
    read_rest(stream, output)
    assert output.token_ids == reference[:NUM_TOKENS]
    assert process.wait() == 0
    stack.restart("coordinator")


def test_a_whole_generation_loads_neither_torch_nor_ray(stack: Stack) -> None:
    code = f"""
import asyncio, sys, threading
import grpc
from coordinator.__main__ import main
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.stack import is_serving
import os, signal
address = "127.0.0.1:{free_port()}"
def ask():
    while not is_serving(address):
        pass
    with grpc.insecure_channel(address) as channel:
        sampling = pb.SamplingParams(max_new_tokens=16, seed=1, stop=["w0w0"])
        request = pb.GenerateRequest(prompt="w5 w6", sampling=sampling)
        print(sum(len(r.tokens.token_ids) for r in CoordinatorServiceStub(channel).Generate(request)))
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=ask, daemon=True).start()
code = main(["--listen", address, *{list(coordinator_arguments(stack))!r}])
print([name for name in ("torch", "ray") if name in sys.modules])
sys.exit(code)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["16", "[]"]


def coordinator_arguments(stack: Stack) -> list[str]:
    """Those of the stack's first coordinator, but for its address."""
    arguments = list(stack.parts["coordinator"].arguments)
    return arguments[: arguments.index("--listen")]


def test_a_draft_with_another_vocabulary_ends_the_coordinator_with_both_fingerprints(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    other = build_tiny_model("llama", tmp_path / "other", vocabulary_size=200, num_layers=1)
    with pytest.raises(AssertionError, match="does not serve") as caught, Stack(models[0], other):
        pass
    lines = [line for line in str(caught.value).splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: FAILED_PRECONDITION VOCABULARY_MISMATCH: draft replica ")
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["--tokenizer", "no/such/model/dir"], 1, "error: INVALID_ARGUMENT INVALID_REQUEST: "),
        (["--tokenizer", "MODEL", "--redis-url", "redis://127.0.0.1:1"], 1, "error: UNAVAILABLE STORE_UNAVAILABLE: "),
        (["--tokenizer", "MODEL", "--listen", "TAKEN"], 1, "error: UNAVAILABLE REPLICA_UNAVAILABLE: cannot listen"),
        (["--tokenizer", "MODEL", "--http", "127.0.0.1:0"], 2, "error: --http: is not available"),
        (["--tokenizer", "MODEL", "--redis-url", "memory://"], 2, "error: --redis-url memory:// needs"),
        ([], 2, "error: --tokenizer: Field required"),
    ],
    ids=["bad model", "no redis", "taken port", "http", "memory without endpoints", "no tokenizer"],
)
def test_what_keeps_it_from_starting_is_one_line_on_stderr(
    stack: Stack, models: tuple[Path, Path], arguments: list[str], code: int, line: str
) -> None:
    replaced = {"MODEL": str(models[0]), "TAKEN": stack.endpoint}
    command = [sys.executable, "-m", "coordinator", *(replaced.get(word, word) for word in arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == code
    assert result.stdout == ""
    assert result.stderr.startswith(line), result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_request_before_any_target_is_refused_and_health_says_so(models: tuple[Path, Path]) -> None:
    address, nobody = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    arguments = ["--tokenizer", str(models[0]), "--redis-url", "memory://", "--target-endpoint", nobody]
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator", "--listen", address, *arguments], stderr=subprocess.DEVNULL
    )
    try:
        with grpc.insecure_channel(address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                list(CoordinatorServiceStub(channel).Generate(ask(), wait_for_ready=True, timeout=60))
            assert from_rpc_error(caught.value).reason == "REPLICA_UNAVAILABLE"
    finally:
        process.terminate()
        assert process.wait() == 0
