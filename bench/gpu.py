"""Suite `gpu`: the engine alone on one CUDA device, bf16, against what the device's memory allows.

A random model of Llama 3.1 8B's shape, and one of three such layers as the draft. A step of one row reads every weight
once (of the input embedding one row), so its floor is those bytes over the copy bandwidth measured in the same run
(bytes read plus bytes written). Without a CUDA device the suite says so and measures nothing. Not here: acceptance, the
three services on a GPU.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.models import DEMO, copy_tokenizer
from bench.report import progress
from bench.rows import Origin, Row
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.block_manager import blocks_for
from specdec.engine.compiled import CompileOptions, row_counts
from specdec.engine.hf_adapter import load_worker

SUITE = "gpu"
CASE = "random Llama-3.1-8B shape, bf16, 1 stream, context 512"
TARGET_LIMIT, DRAFT_LIMIT = 1.25, 2.0
CONTEXT_TOKENS = 512
NUM_STEPS, NUM_QUICK_STEPS = 50, 5
NUM_DRAFT_LAYERS = 3
_COPY_BYTES = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing beyond what every suite takes."""


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; none where there is no CUDA device."""
    if not torch.cuda.is_available():
        print("bench gpu: no CUDA device on this machine; nothing was measured", file=sys.stderr)
        return []
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )
    return engine_rows(config, "cuda", CASE, _COPY_BYTES, quick=arguments.quick)


def engine_rows(config: LlamaConfig, device: str, case: str, copy_bytes: int, *, quick: bool) -> list[Row]:
    """Steps of a target of this shape and of its first layers, each over its own floor."""
    num_steps = NUM_QUICK_STEPS if quick else NUM_STEPS
    row = partial(Row, suite=SUITE, row=None, case=case, origin=Origin(hardware=_device_name(device)), quick=quick)
    rows = []
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder, progress("gpu", 3) as advance:
        bytes_per_s = _copy_bandwidth(device, copy_bytes, num_steps)
        rows.append(row(system="device", metric="copy_bandwidth", value=bytes_per_s / 1e9, unit="GB/s"))
        advance()
        limits = {"target": (config.num_hidden_layers, TARGET_LIMIT), "draft": (NUM_DRAFT_LAYERS, DRAFT_LIMIT)}
        for name, (num_layers, limit) in limits.items():
            directory, weight_bytes = _write_model(config, num_layers, Path(folder) / name, device)
            compiling = CompileOptions(row_counts=row_counts(1))
            worker = load_worker(
                str(directory), device=device, dtype="bfloat16", num_kv_blocks=256, compiling=compiling
            )
            step_s, floor_s = _step_s(worker, device, num_steps), weight_bytes / bytes_per_s
            rows.append(row(system=name, metric="step_ms", value=step_s * 1e3, unit="ms"))
            rows.append(
                row(system=name, metric="step_over_floor", value=step_s / floor_s, unit="x", ratio_to="floor",
                    at_most=limit)
            )  # fmt: skip
            advance()
    return rows


def _write_model(config: LlamaConfig, num_layers: int, directory: Path, device: str) -> tuple[Path, int]:
    """A random checkpoint with the demo's tokenizer, and the bytes that a step of one row reads of it."""
    shape = LlamaConfig(**(config.to_dict() | {"num_hidden_layers": num_layers}))
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    copy_tokenizer(DEMO / "target", directory)
    embedding = model.get_input_embeddings().weight
    return directory, sum(parameter.nbytes for parameter in model.parameters()) - embedding.nbytes


def _step_s(worker: Worker, device: str, num_steps: int) -> float:
    """Median time of one row after the context."""
    blocks = tuple(range(blocks_for(CONTEXT_TOKENS + 1)))
    worker.execute(StepPlan((SequenceSlice((5,) * CONTEXT_TOKENS, 0, blocks, 0),)))
    plan = StepPlan((SequenceSlice((5,), CONTEXT_TOKENS, blocks, 1),))
    return _median_s(lambda: worker.execute(plan), device, num_steps)


def _copy_bandwidth(device: str, num_bytes: int, num_steps: int) -> float:
    """Bytes read plus bytes written a second."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * num_bytes / _median_s(lambda: destination.copy_(source), device, num_steps)


def _median_s(action: Callable[[], object], device: str, num_steps: int) -> float:
    seconds = []
    for _ in range(num_steps + 3):
        began = time.perf_counter()
        action()
        if device != "cpu":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:])


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device != "cpu" else "cpu"
