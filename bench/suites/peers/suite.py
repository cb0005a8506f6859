"""Suite `peers`: specdec beside vLLM, llama.cpp and Transformers, each a server of its own on this machine's CPU.

One asyncio client sends prompts as token ids and reads streamed answers: over gRPC from specdec, over HTTP from vLLM
and llama.cpp, over a pipe from Transformers. All servers get the same weights, prompts, threads and number of greedy
tokens, with a draft model (`_drafted`) and without (`_alone`). They take turns on every batch, in an order that is
reversed every time, and no prompt is sent twice to a server. specdec chooses gamma itself; the others draft four tokens
a round. The demo pair runs on all servers at once; the Qwen pair, which takes 8 GB in float32, on specdec and one peer
at a time, beside llama.cpp's 4-bit weights also as `specdec_int8`. In float32 every text must be Transformers' own,
ties aside. A server that does not start is left out with its reason. `make peers` prepares vLLM and llama.cpp, `make
demo-pair` the Qwen pair.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from bench.harness.report import waiting
from bench.harness.rows import Row
from bench.suites.peers.pair_run import PairRun
from bench.systems.served import (
    LLAMA,
    PEERS_FOLDER,
    SPECDEC,
    SPECDEC_INT8,
    TRANSFORMERS,
    VLLM,
    System,
    demo_pair,
    qwen_pair,
)

SUITE = "peers"
PEERS = (VLLM, LLAMA, TRANSFORMERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which pairs are measured beside which peers, and where the peers are."""
    parser.add_argument(
        "--pair", choices=["demo", "qwen", "all"], default="all", help="default: all that are installed"
    )
    parser.add_argument("--peer", choices=PEERS, action="append", help="measure beside this one (repeat; default: all)")
    parser.add_argument(
        "--peers-folder", type=Path, default=PEERS_FOLDER, metavar="DIR", help="folder that `make peers` has filled"
    )


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; print nothing but progress."""
    rows: list[Row] = []
    peers = arguments.peer or PEERS
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder, asyncio.Runner() as runner:
        if arguments.pair != "qwen":
            together = [System(kind, drafts) for drafts in (True, False) for kind in (SPECDEC, *peers)]
            rows += PairRun(SUITE, runner, demo_pair(Path(folder)), arguments).rows([together])
        if arguments.pair != "demo":
            try:
                with waiting("converting the Qwen pair (minutes, the first time)"):
                    pair = qwen_pair()
            except FileNotFoundError as error:
                if arguments.pair == "qwen":
                    raise SystemExit(f"error: {error}") from None
                print(f"the Qwen pair is left out: {error}", file=sys.stderr)
                return rows
            # One peer at a time: all at once would need 40 GB.
            by_peer = [
                [System(kind, drafts) for kind in (SPECDEC, *[SPECDEC_INT8] * (peer == LLAMA), peer)]
                for peer in peers
                for drafts in (True, False)
            ]
            rows += PairRun(SUITE, runner, pair, arguments).rows(by_peer)
    return rows
