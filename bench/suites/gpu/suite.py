"""Suite `gpu`: a random model of Llama 3.1 8B's shape on one CUDA device, with its first three layers as the draft.

`--rows` selects among four measurements: the engine alone against the limit of the device's memory bandwidth; one
layer's attention, paged and gathered; one greedy stream through the three services against target-only mode and Hugging
Face's assisted generation; tokens per second of 1 to 64 streams. The acceptance is set when the pair is made
(`random_pair`) and measured again in the stream. Without a CUDA device the suite prints a line and measures nothing. It
needs 60 GB of device memory, for two targets at once, and 20 GB of disk for temporary files. `--tensor-parallel N`
measures one row on N devices instead (`ranks`).
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig

from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.suites.gpu.attention import attention_rows
from bench.suites.gpu.engine import copy_bandwidth, engine_rows, scaling_rows
from bench.suites.gpu.stack import ONE_STREAM, STREAMS, stack_rows
from bench.systems.random_pair import write_random_pair

SUITE = "gpu"
SHAPE = "random Llama-3.1-8B shape, bf16"
ENGINE, ATTENTION = "engine", "attention"
FIGURES = (ENGINE, ATTENTION, ONE_STREAM, STREAMS)
NUM_DRAFT_LAYERS = 3
ALPHA = 0.8
_COPY_BYTES = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select rows."""
    parser.add_argument("--rows", nargs="+", choices=FIGURES, default=FIGURES, help="only these rows")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="instead, what a step takes on N GPUs against one"
    )


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; without a CUDA device, return none."""
    if not torch.cuda.is_available():
        print("bench gpu: no CUDA device on this machine; nothing was measured", file=sys.stderr)
        return []
    num_ranks, num_devices = arguments.tensor_parallel, torch.cuda.device_count()
    if num_ranks > num_devices:
        print(f"bench gpu: {num_ranks} GPUs are needed, this machine has {num_devices}; nothing was measured",
              file=sys.stderr)  # fmt: skip
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
    if num_ranks > 1:
        return divided_rows(config, "cuda", SHAPE, num_ranks, quick=arguments.quick)
    return device_rows(config, "cuda", SHAPE, arguments.rows, _COPY_BYTES, quick=arguments.quick)


def divided_rows(config: LlamaConfig, device: str, shape: str, num_ranks: int, *, quick: bool) -> list[Row]:
    """Make a model of this shape and measure its steps on one device and on several.

    Args:
        config: the shape.
        device: `cuda`, or `cpu` in tests.
        shape: name of the shape in the rows.
        num_ranks: number of devices.
        quick: measure less.
    """
    row = partial(Row, suite=SUITE, origin=Origin(hardware=_device_name(device)), quick=quick)
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        with progress("gpu: model", 1) as advance:
            pair = write_random_pair(config, NUM_DRAFT_LAYERS, ALPHA, Path(folder), device)
            advance()
        _free_device_memory(device)
        return scaling_rows(str(pair.target.directory), device, num_ranks, shape, row, quick=quick)


def device_rows(
    config: LlamaConfig, device: str, shape: str, figures: Sequence[str], copy_bytes: int, *, quick: bool
) -> list[Row]:
    """Make a pair of this shape on the device and measure it there.

    Args:
        config: the target's shape.
        device: `cuda`, or `cpu` in tests.
        shape: name of the shape in the rows.
        figures: measurements, of `FIGURES`.
        copy_bytes: size of the copy whose bandwidth is the engine's floor.
        quick: measure less.
    """
    row = partial(Row, suite=SUITE, origin=Origin(hardware=_device_name(device)), quick=quick)
    rows = []
    if ATTENTION in figures:
        rows += attention_rows(config, device, shape, row, copy_bandwidth(device, copy_bytes))
        _free_device_memory(device)
    if not set(figures) - {ATTENTION}:
        return rows
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        with progress("gpu: pair", 1) as advance:
            pair = write_random_pair(config, NUM_DRAFT_LAYERS, ALPHA, Path(folder), device)
            advance()
        _free_device_memory(device)
        if ENGINE in figures:
            rows += engine_rows(pair, device, shape, row, copy_bytes, quick=quick)
            _free_device_memory(device)
        if set(figures) - {ENGINE, ATTENTION}:
            rows += stack_rows(pair, device, shape, row, figures, quick=quick)
    return rows


def _free_device_memory(device: str) -> None:
    """Free the device memory of this process's models for the services that come next."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device != "cpu" else "cpu"
