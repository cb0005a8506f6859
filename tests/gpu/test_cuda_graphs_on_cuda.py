"""Steps as CUDA graphs on a GPU: against eager steps on the same device, and whole rounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draft_service.proposer import Proposer
from specdec.contract.types import SamplingFilters
from specdec.engine.base import StepPlan
from specdec.engine.cuda_graphs.capture import CudaCapture
from specdec.engine.loader import load_worker
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.options import CompileOptions, LoadRequest, row_counts
from target_service.verifier import Verifier
from tests.support.cuda_graphs_rig import (
    MIXED_LAYERS,
    NAN_TOKEN_ID,
    Pair,
    build,
    check_ragged_steps,
    load,
    piece,
    random_tokens,
)
from tests.support.round_driver import RoundDriver
from tests.support.tiny_models import build_tiny_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine: nothing was recorded"),
]
CUDA = torch.device("cuda:0")
# Tolerance between a graph's kernels and eager ones, whose other shapes give other sums.
ATOL = {"float32": 1e-3, "bfloat16": 0.1}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model with windowed and full layers and heads of a size that every attention kernel supports."""
    overrides = MIXED_LAYERS | {"head_dim": 64}
    return build("qwen3", tmp_path_factory.mktemp("mixed"), config_overrides=overrides)


@pytest.mark.parametrize("attention", ["paged", "gathered"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_mixed_steps_equal_eager_steps(
    dtype: str, attention: str, mixed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    pair = Pair(mixed, capture=CudaCapture(CUDA), device="cuda:0", dtype=dtype, atol=ATOL[dtype], attention=attention)
    assert f"with {attention} attention" in caplog.text
    check_ragged_steps(pair)


def test_recorded_steps_on_the_device_equal_eager_steps_on_the_cpu(mixed: Path) -> None:
    """The eager steps equal Hugging Face's forward pass (tests/integration/test_engine_parity.py)."""
    pair = Pair(mixed, capture=CudaCapture(CUDA), device="cuda:0", atol=ATOL["float32"])
    pair.eager = load(mixed, "eager")
    tokens = random_tokens(1, 60)
    recorded, eager = pair.recorded, pair.eager
    for start in range(0, 60, 3):
        step = StepPlan((piece(tokens, start, start + 3, pair.tables[0], 3),))
        difference = (recorded.execute(step).cpu() - eager.execute(step)).abs().max()
        assert difference < ATOL["float32"]


def test_nans_of_former_owners_do_not_spread(mixed: Path) -> None:
    pair = Pair(mixed, capture=CudaCapture(CUDA), device="cuda:0", dtype="bfloat16", atol=ATOL["bfloat16"])
    for table in pair.tables[1:3]:
        assert pair.run(piece([NAN_TOKEN_ID] * 90, 0, 90, table, 1), uses_cuda_graphs=False).isnan().all()
    one, two = random_tokens(2, 60), random_tokens(3, 60)
    for start in range(0, 60, 3):
        poison = piece([NAN_TOKEN_ID] * 60, start, start + 1, pair.tables[3], 1)
        steps = (
            piece(one, start, start + 3, pair.tables[1], 3),
            piece(two, start, start + 3, pair.tables[2], 3),
            poison,
        )
        assert pair.run(*steps)[:6].isfinite().all()


def test_a_service_records_its_steps_by_default(mixed: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    load(mixed, "auto", device="cuda:0")
    (message,) = (message for message in caplog.messages if message.startswith("recorded "))
    assert "with paged attention" in message


def test_a_step_that_cannot_be_recorded_leaves_the_device_usable() -> None:
    capture = CudaCapture(CUDA)
    numbers, doubled = torch.ones(8, device=CUDA), torch.zeros(8, device=CUDA)

    def copies_to_the_host() -> None:
        doubled.mul_(float(numbers.sum()))

    def doubles() -> None:
        torch.add(numbers, numbers, out=doubled)

    with pytest.raises(RuntimeError):
        capture(copies_to_the_host)
    assert torch.cuda.current_stream(CUDA) == torch.cuda.default_stream(CUDA)
    replay: Callable[[], None] = capture(doubles)
    numbers.fill_(3.0)
    replay()
    assert doubled.tolist() == [6.0] * 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_rounds_give_the_same_text_recorded_and_eagerly(temperature: float, tmp_path: Path) -> None:
    target, draft = build_tiny_pair("llama", tmp_path, seed=3)
    texts = {}
    for backend in ("eager", "cuda-graphs"):
        compiling = CompileOptions(backend, row_counts(9))
        proposer, verifier = (
            engine(
                load_worker(
                    LoadRequest(str(path), device="cuda:0", dtype="float32", num_kv_blocks=200, compiling=compiling)
                ),
                ReplicaOptions(max_step_tokens=40),
            )
            for engine, path in ((Proposer, draft), (Verifier, target))
        )
        drivers = [
            RoundDriver(
                f"s{index}", random_tokens(index, 5 + 9 * index), proposer, verifier,
                filters=SamplingFilters(temperature=temperature), seed=index,
            )
            for index in range(4)
        ]  # fmt: skip
        texts[backend] = await asyncio.gather(*(driver.generate(40, gamma=4) for driver in drivers))
        for engine in (proposer, verifier):
            engine.check_integrity()
            await engine.close()
    assert texts["cuda-graphs"] == texts["eager"]
