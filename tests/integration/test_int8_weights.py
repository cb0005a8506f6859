"""int8 weights: products equal those of the rounded weights, and the whole system writes that target's text.

The oracle of the numbers is Hugging Face's eager forward over weights rounded here; that of the text is a greedy loop
over the quantised worker alone.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.harness.workload import prompt_token_ids
from bench.systems.models import DEMO
from draft_service.fan_out_policy import Predraft
from draft_service.proposer import DraftOptions, Proposer
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.linear.int8 import Int8Projection
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from target_service.verifier import Verifier
from tests.support.round_driver import RoundDriver
from tests.support.tiny_models import build_tiny_model, build_tiny_pair

NUM_TOKENS = 24
# Two logits this close may change places between steps of one row and of many: activations are bfloat16.
TIE = 0.1


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Round a weight to at most 127 multiples of a bfloat16 scale per output."""
    scales = (weight.abs().amax(dim=1) / 127).to(torch.bfloat16).to(torch.float32)[:, None]
    return torch.round(weight / scales).clamp(-127, 127) * scales


def execute(worker: Worker, token_ids: list[int], start: int, num_rows: int) -> torch.Tensor:
    return worker.execute(StepPlan((SequenceSlice(tuple(token_ids[start:]), start, tuple(range(16)), num_rows),)))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt_neox"])
def test_logits_equal_those_of_the_rounded_weights(architecture: str, tmp_path: Path) -> None:
    build_tiny_model(architecture, tmp_path, vocabulary_size=96, context=256, gain=1.0, logit_spread=1.0)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = torch.randint(2, 96, (45,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        exact = eager(torch.tensor([tokens])).logits[0, 40:, :96]
        for module in eager.modules():
            if type(module) is torch.nn.Linear and module is not eager.get_output_embeddings():
                module.weight.copy_(rounded(module.weight))
        expected = eager(torch.tensor([tokens])).logits[0, 40:, :96]
    worker = load_worker(LoadRequest(str(tmp_path), device="cpu", dtype="int8", num_kv_blocks=16))
    execute(worker, tokens[:40], 0, 0)
    logits = execute(worker, tokens, 40, 5)
    assert (logits - expected).abs().mean() < 0.02
    assert (logits - exact).abs().mean() < 0.05


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(40, 64), (7, 48), (10, 17)])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_products_of_any_size_are_right_to_bfloat16(num_outputs: int, num_inputs: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    bias, residual = (torch.randn(*shape, generator=generator) for shape in ((num_outputs,), (num_rows, num_outputs)))
    x = torch.randn(num_rows, num_inputs, generator=generator).to(torch.bfloat16).to(torch.float32)
    expected = x @ rounded(weight).t()
    projection = Int8Projection(weight, bias)
    torch.testing.assert_close(projection(x) - bias, expected, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(projection.add_to(residual, x) - residual - bias, expected, rtol=2**-7, atol=1e-4)


def test_a_row_of_a_product_does_not_depend_on_other_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    projection = Int8Projection(torch.randn(96, 64, generator=generator), None)
    rows = torch.randn(16, 64, generator=generator)
    assert torch.equal(projection(rows), torch.cat([projection(row[None]) for row in rows]))


def test_an_output_without_weights_stays_zero() -> None:
    assert torch.equal(Int8Projection(torch.zeros(8, 16), None)(torch.ones(1, 16)), torch.zeros(1, 8))


def perplexity(dtype: str) -> float:
    """Return the demo target's perplexity on the benchmark's prompts, which are not in its training data."""
    worker = load_worker(LoadRequest(str(DEMO / "target"), device="cpu", dtype=dtype, num_kv_blocks=16))
    total, count = 0.0, 0
    for prompt in prompt_token_ids(DEMO / "target"):
        tokens = prompt[: 16 * BLOCK_TOKENS]
        log_laws = execute(worker, tokens, 0, len(tokens)).log_softmax(dim=-1)
        total -= float(log_laws[range(len(tokens) - 1), tokens[1:]].sum())
        count += len(tokens) - 1
    return math.exp(total / count)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_the_demo_target_predicts_unseen_text_as_well_within_two_percent(dtype: str) -> None:
    exact, rounded_once = perplexity("float32"), perplexity(dtype)
    print(f"{dtype}: perplexity {rounded_once:.3f}, float32 {exact:.3f}")
    assert rounded_once / exact == pytest.approx(1.0, abs=0.02)


def greedy_alone(worker: Worker, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    logits = execute(worker, tokens, 0, 1)
    for _ in range(NUM_TOKENS):
        tokens.append(int(logits.argmax()))
        logits = execute(worker, tokens, len(tokens) - 1, 1)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("predraft", [Predraft.OFF, Predraft.ON])
async def test_greedy_rounds_write_what_the_quantised_target_writes_alone(tmp_path: Path, predraft: Predraft) -> None:
    target, draft = build_tiny_pair("llama", tmp_path, seed=3)
    alone = load_worker(LoadRequest(str(target), device="cpu", dtype="int8", num_kv_blocks=16))
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(2, 256, (5 + 7 * index,), generator=generator).tolist() for index in range(4)]
    proposer, verifier = (
        engine(load_worker(LoadRequest(str(path), device="cpu", dtype="int8", num_kv_blocks=64)))
        for engine, path in ((partial(Proposer, drafting=DraftOptions(predraft=predraft)), draft), (Verifier, target))
    )
    drivers = [RoundDriver(f"s{index}", list(prompt), proposer, verifier) for index, prompt in enumerate(prompts)]
    outputs = await asyncio.gather(*(driver.generate(NUM_TOKENS, gamma=4) for driver in drivers))
    for engine in (proposer, verifier):
        await engine.close()
    assert sum(decision.num_accepted for driver in drivers for decision in driver.decisions) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = greedy_alone(alone, prompt)
        if output == expected:
            continue
        first = next(index for index in range(NUM_TOKENS) if output[index] != expected[index])
        best = execute(alone, prompt + expected[:first], 0, 1)[0].topk(2).values
        print(f"first difference at output token {first}: best logits {best.tolist()}")
        assert best[0] - best[1] < TIE
