"""The kernel of row products on a GPU: compiled, recorded, and batch-invariant on tensor cores."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from draft_service.proposer import Proposer
from specdec.contract.types import SamplingFilters
from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.cuda_graphs.capture import CudaCapture
from specdec.engine.linear.int8 import Int8Weight, round_to_int8
from specdec.engine.linear.row_products import multiply
from specdec.engine.loader import load_worker
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.options import CompileOptions, LoadRequest, row_counts
from target_service.verifier import Verifier
from tests.support.cuda_graphs_rig import MIXED_LAYERS, build, random_tokens
from tests.support.round_driver import RoundDriver
from tests.support.tiny_models import build_tiny_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine: nothing was multiplied"),
]
CUDA = torch.device("cuda:0")
#: Outputs and inputs of layers and a head of Llama 3.1 8B, and a layer of an odd size.
SHAPES = ((4096, 14336), (28672, 4096), (128_256, 4096), (300, 200))


@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_products_are_right_and_a_row_has_the_same_bits_in_any_batch(
    num_outputs: int, num_inputs: int, is_int8: bool
) -> None:
    generator = torch.Generator(CUDA).manual_seed(1)
    plain = torch.randn(num_outputs, num_inputs, generator=generator, device=CUDA).to(torch.bfloat16)
    weight: torch.Tensor | Int8Weight = plain
    if is_int8:
        weight = round_to_int8(plain)
    exact = (weight.rounded() if isinstance(weight, Int8Weight) else weight).double()
    rows = torch.randn(513, num_inputs, generator=generator, device=CUDA).to(torch.bfloat16)
    expected = rows[:70].double() @ exact.t()
    actual = multiply(rows, weight, output_dtype=torch.float32)
    torch.testing.assert_close(actual[:70].double(), expected, rtol=1e-4, atol=1e-2)
    for count in (*range(1, 10), 16, 17, 64, 65, 512):
        assert torch.equal(multiply(rows[-count:], weight, output_dtype=torch.float32), actual[-count:]), count


def test_a_product_can_be_recorded() -> None:
    rows, weight = torch.ones(5, 256, device=CUDA), torch.ones(64, 256, device=CUDA)
    output = torch.zeros(5, 64, device=CUDA)

    def step() -> None:
        output.copy_(multiply(rows, weight))

    replay = CudaCapture(CUDA)(step)
    rows.fill_(2.0)
    replay()
    assert (output == 512.0).all()


def test_logits_of_a_bfloat16_model_are_not_rounded(tmp_path: Path) -> None:
    directory = build("qwen3", tmp_path, config_overrides=MIXED_LAYERS | {"head_dim": 64})
    worker = load_worker(
        LoadRequest(
            str(directory),
            device="cuda:0",
            dtype="bfloat16",
            num_kv_blocks=64,
            compiling=CompileOptions(row_counts=(1, 5)),
        )
    )
    for count in (5, 30):  # recorded, and not
        logits = worker.execute(StepPlan((SequenceSlice(tuple(random_tokens(1, count)), 0, (0, 1), count),)))
        assert (logits.to(torch.bfloat16) != logits).float().mean() > 0.9


def test_int8_weights_take_half_of_the_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, "num_attention_heads": 32}
    directory = build("qwen3", tmp_path, config_overrides=sizes)
    used = {}
    for dtype in ("bfloat16", "int8"):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(CUDA)
        worker = load_worker(
            LoadRequest(
                str(directory), device="cuda:0", dtype=dtype, num_kv_blocks=8, compiling=CompileOptions("eager")
            )
        )
        torch.cuda.empty_cache()
        used[dtype] = torch.cuda.memory_reserved(CUDA) - before
        del worker
    assert used["int8"] < 0.6 * used["bfloat16"]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
async def test_greedy_text_is_the_same_alone_and_in_a_batch(dtype: str, tmp_path: Path) -> None:
    """The number of drafts does not matter either: alone each session drafts 4 tokens a round, in a batch 2."""
    target, draft = build_tiny_pair("llama", tmp_path, seed=3)
    compiling = CompileOptions(row_counts=row_counts(9), is_deterministic=True)

    async def texts(companies: list[list[int]], gamma: int) -> dict[int, list[int]]:
        proposer, verifier = (
            engine(
                load_worker(
                    LoadRequest(str(path), device="cuda:0", dtype=dtype, num_kv_blocks=400, compiling=compiling)
                ),
                ReplicaOptions(max_step_tokens=40),
            )
            for engine, path in ((Proposer, draft), (Verifier, target))
        )
        found: dict[int, list[int]] = {}
        for company in companies:
            drivers = [
                RoundDriver(
                    f"s{index}", random_tokens(index, 5 + 9 * index), proposer, verifier,
                    filters=SamplingFilters(temperature=0.0), seed=index,
                )
                for index in company
            ]  # fmt: skip
            written = await asyncio.gather(*(driver.generate(60, gamma=gamma) for driver in drivers))
            found |= dict(zip(company, written, strict=True))
        for engine in (proposer, verifier):
            await engine.close()
        return found

    sessions = list(range(8))
    assert await texts([[index] for index in sessions], 4) == await texts([sessions], 2)
