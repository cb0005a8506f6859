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
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.harness.report import waiting
from bench.harness.rows import Origin, Row
from bench.suites.engines.backends import front_rows, llama_rows
from bench.suites.engines.draft_pool import pool_rows
from bench.suites.engines.turns import start_all, stop_all
from bench.systems.process import PeerServer, Run, ServerFailure
from bench.systems.real_models import QWEN_DRAFT, QWEN_TARGET, SMOLLM2
from bench.systems.served import PEERS_FOLDER, prompts_of
from bench.systems.specdec_server import SpecdecServer
from specdec.checkpoints.locate import locate_checkpoint

_IDLE_S, _QUICK_IDLE_S = 60.0, 5.0
#: Longer than a coordinator takes to be idle.
_SETTLE_S = 45.0


def footprint_rows(make_row: Callable[..., Row], run: Run, peers: Path, quick: bool) -> list[Row]:
    """Return memory after a stream, processor time of an idle system, and the time of a second start.

    Raises:
        ServerFailure: a system did not start.
        FileNotFoundError: a model is not installed.
    """
    smollm2, target, draft = SMOLLM2.path(), QWEN_TARGET.path(), QWEN_DRAFT.path()
    cases = [
        ("SmolLM2 bfloat16, target only", SpecdecServer("specdec", smollm2, None, "auto"), smollm2, 700.0, None),
        ("Qwen2.5-Coder 1.5B with 0.5B, int8", SpecdecServer("specdec", target, draft, "int8"), target, 3072.0, 15.0),
    ]
    rows = []
    for case, server, model, memory_mib, start_s in cases:
        rows += _system_rows(
            partial(make_row, case=case, system="specdec"), run, server, model, memory_mib, start_s, quick
        )
    return rows


def _system_rows(
    make_row: Callable[..., Row],
    run: Run,
    server: PeerServer,
    model: Path,
    memory_mib: float,
    start_s: float | None,
    quick: bool,
) -> list[Row]:
    prompt = prompts_of(locate_checkpoint(model))[0]
    start_all(run, [server])  # the first start converts the model
    stop_all(run, [server])
    start_all(run, [server])
    try:
        run(server.answer([prompt], 32))
        time.sleep(_SETTLE_S)
        idle_s = _QUICK_IDLE_S if quick else _IDLE_S
        with waiting(f"idle for {idle_s:g} s"):
            before_s = server.cpu_s()
            time.sleep(idle_s)
            idle_share = (server.cpu_s() - before_s) / idle_s
        pss_mib = server.pss_bytes() / 2**20
    finally:
        stop_all(run, [server])
    return [
        make_row(metric="memory_mib", value=pss_mib, unit="MiB (PSS)", at_most=memory_mib),
        make_row(metric="idle_cpu", value=idle_share * 100, unit="% of a core", at_most=0.5),
        make_row(metric="second_start_s", value=server.start_s, unit="s", at_most=start_s),
    ]


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
    make_row = partial(Row, suite=SUITE, origin=Origin(), quick=arguments.quick)
    rows: list[Row] = []
    with asyncio.Runner() as runner:
        for part in arguments.part or _PARTS:
            try:
                rows += _PARTS[part](make_row, runner.run, arguments.peers_folder, arguments.quick)
            except (FileNotFoundError, ServerFailure) as error:
                print(f"{part} is left out: {error}", file=sys.stderr)
    return rows
