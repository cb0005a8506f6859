"""Suite `engines`: specdec in front of vLLM and llama.cpp, its draft pool inside vLLM, and its own footprint.

Parts, each on two cores of this machine with greedy streams:

- `vllm`: one vLLM server, asked directly and through a target of backend `vllm`. Their difference is what a round costs
  above vLLM's own pass.
- `pool`: vLLM with specdec's draft pool beside vLLM with the same draft model in its own process, and the longest pause
  of a step when the draft service is stopped.
- `llama-cpp`: Qwen2.5-Coder 1.5B with 0.5B through the backend `llama-cpp`, beside llama.cpp's own server.
- `footprint`: memory, idle processor time and start of `specdec up` with real models.

`make peers` prepares vLLM and llama.cpp, `make real` SmolLM2, `make demo-pair` the Qwen pair. A part whose programs or
models are missing is left out with its reason.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.harness.rows import Origin, Row
from bench.suites.engines.draft_pool import pool_rows
from bench.suites.engines.footprint import footprint_rows
from bench.suites.engines.llama_backend import llama_rows
from bench.suites.engines.vllm_front import front_rows
from bench.suites.peers.suite import PEERS_FOLDER
from bench.systems.process import ServerFailure

SUITE = "engines"

_PARTS: Mapping[str, Callable[..., list[Row]]] = {
    "vllm": front_rows,
    "pool": pool_rows,
    "llama-cpp": llama_rows,
    "footprint": footprint_rows,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which parts are measured, and where the other engines are."""
    parser.add_argument(
        "--part", choices=list(_PARTS), action="append", help="measure this part (repeat; default: all)"
    )
    parser.add_argument(
        "--peers-folder", type=Path, default=PEERS_FOLDER, metavar="DIR", help="folder that `make peers` has filled"
    )


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; print nothing but progress."""
    make_row = partial(Row, suite=SUITE, row=None, origin=Origin(), quick=arguments.quick)
    rows: list[Row] = []
    with asyncio.Runner() as runner:
        for part in arguments.part or _PARTS:
            try:
                rows += _PARTS[part](make_row, runner.run, arguments.peers_folder, arguments.quick)
            except (FileNotFoundError, ServerFailure) as error:
                print(f"{part} is left out: {error}", file=sys.stderr)
    return rows
