"""Real processes and a real Redis: greedy output equals Hugging Face's, and start-up errors take one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.support.process_rig import NUM_TOKENS, ask, models, reference, run, stack, stub_of
from tests.support.process_template import run_like
from tests.support.redis_fixture import redis_server
from tests.support.stack import Stack, free_port
from tests.support.tiny_models import build_tiny_model

__all__ = ["models", "redis_server", "reference", "stack"]


@pytest.mark.parametrize("mode", [pb.SPECULATION_MODE_REJECTION, pb.SPECULATION_MODE_OFF], ids=["rejection", "off"])
def test_greedy_output_equals_hugging_faces_with_accepted_and_rejected_drafts(
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


def test_a_whole_generation_loads_neither_torch_nor_ray(stack: Stack) -> None:
    code = f"""
import asyncio, sys, threading
import grpc
from coordinator.__main__ import main
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.support.stack import is_serving
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
    """Return the arguments of the stack's first coordinator without its address."""
    arguments = list(stack.parts["coordinator"].arguments)
    return arguments[: arguments.index("--listen")]


def redeploy_draft(stack: Stack, model: Path) -> None:
    """Serve another model at the draft's address."""
    stack.kill("draft")
    draft = stack.parts["draft"]
    before = draft.arguments.index("--model") + 1
    draft.arguments = [*draft.arguments[:before], str(model), *draft.arguments[before + 1 :]]
    stack.restart("draft")


@pytest.mark.full
def test_a_draft_redeployed_with_another_vocabulary_is_left_out_and_ends_the_next_start_with_both_fingerprints(
    models: tuple[Path, Path], reference: list[int], tmp_path: Path
) -> None:
    other = build_tiny_model("llama", tmp_path / "other", vocabulary_size=200, num_layers=1)
    with Stack(*models) as stack:
        coordinator = stack.parts["coordinator"]
        assert run(stub_of(stack.endpoint), ask()).finished.stats.num_draft_tokens > 0
        redeploy_draft(stack, other)
        while '"refused: draft replica' not in coordinator.log:
            assert coordinator.is_alive, coordinator.log
        output = run(stub_of(stack.endpoint), ask())
        assert output.token_ids == reference[:NUM_TOKENS]
        assert output.finished.stats.num_draft_tokens == 0
        assert coordinator.log.count("refused: ") == 1
        assert stack.terminate("coordinator") == 0
        written = len(coordinator.log)
        with pytest.raises(AssertionError, match="does not serve"):
            stack.restart("coordinator")
        log = coordinator.log[written:]
    lines = [line for line in log.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: draft replica ")
    assert lines[0].endswith("(VOCABULARY_MISMATCH)")
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["--tokenizer", "no/such/model/dir"], 1, "(INVALID_REQUEST)"),
        (
            ["--tokenizer", "MODEL", "--redis-url", "redis://127.0.0.1:1", "--store-wait-s", "0"],
            1,
            "(STORE_UNAVAILABLE)",
        ),
        (["--tokenizer", "MODEL", "--listen", "TAKEN"], 1, "error: cannot listen"),
        (["--tokenizer", "MODEL", "--redis-url", "memory://"], 2, "error: --redis-url memory:// needs"),
        ([], 2, "error: --tokenizer: Field required"),
    ],
    ids=["bad model", "no redis", "taken port", "memory without endpoints", "no tokenizer"],
)
def test_a_coordinator_that_cannot_start_prints_one_line_on_stderr(
    stack: Stack, models: tuple[Path, Path], arguments: list[str], code: int, line: str
) -> None:
    replaced = {"MODEL": str(models[0]), "TAKEN": stack.endpoint}
    result = run_like("coordinator", *(replaced.get(word, word) for word in arguments))
    assert result.returncode == code
    assert result.stdout == ""
    assert result.stderr.startswith("error: "), result.stderr
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_a_target_requests_are_refused_and_health_reports_not_serving(models: tuple[Path, Path]) -> None:
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
