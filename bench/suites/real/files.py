"""GGUF files in specdec and in llama.cpp's server: starts, disk and memory, and tokens a second. Part of suite `real`.

A first start has an empty cache, so it packs what it keeps; `make setup` has compiled the kernels. Both servers get the
same file, prompts, threads and number of greedy tokens, and take turns. Needs `make real` and `make demo-pair`, and
`make peers` for llama.cpp.
"""

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness.pairs import rate_rows, ratio_row, take_turns
from bench.harness.process_tree import pss_bytes
from bench.harness.rows import Row
from bench.harness.workload import OwnPrompts, prompt_texts
from bench.systems.http_servers import LlamaServer
from bench.systems.process import PeerServer, ServerFailure, tokens_per_s
from bench.systems.real_models import QWEN_DRAFT, QWEN_TARGET, SMOLLM2
from bench.systems.served import LLAMA, PEERS_FOLDER, SPECDEC, peer_program
from bench.systems.specdec_server import SpecdecServer
from specdec.checkpoints.vocabulary import load_tokenizer

_NUM_PAIRS, _NUM_QUICK_PAIRS = 9, 1
_NUM_TOKENS, _NUM_QUICK_TOKENS = 64, 8
_PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Comparison:
    """One file beside llama.cpp."""

    case: str
    target: Path
    draft: Path | None
    num_streams: int
    required: float


def file_rows(make_row: Callable[..., Row], *, quick: bool) -> list[Row]:
    """Measure and return the rows. Files and servers that are not installed are left out with the reason."""
    rows: list[Row] = []
    smollm2 = SMOLLM2.path()
    rows += _start_rows(partial(make_row, case="SmolLM2-135M Q4_1"), smollm2, 10.0, 4.0)
    comparisons = [Comparison("SmolLM2-135M Q4_1, 1 stream", smollm2, None, 1, 1.0),
                   Comparison("SmolLM2-135M Q4_1, 8 streams", smollm2, None, 8, 1.5)]  # fmt: skip
    try:
        target, draft = QWEN_TARGET.path(), QWEN_DRAFT.path()
    except FileNotFoundError as error:
        print(f"the Qwen pair is left out: {error}", file=sys.stderr)
    else:
        rows += _start_rows(partial(make_row, case="Qwen2.5-Coder 1.5B Q4_K_M"), target, 30.0, 10.0)
        comparisons += [
            Comparison("Qwen2.5-Coder 1.5B Q4_K_M, 1 stream", target, None, 1, 0.85),
            Comparison("Qwen2.5-Coder 1.5B Q4_K_M with 0.5B, 1 stream", target, draft, 1, 1.4),
        ]
    try:
        program = peer_program(LLAMA, PEERS_FOLDER)
    except ServerFailure as error:
        print(f"llama.cpp is left out: {error}", file=sys.stderr)
        return rows
    with asyncio.Runner() as runner:
        for each in comparisons:
            rows += _speed_rows(partial(make_row, case=each.case), runner, each, program, quick=quick)
    return rows


def _start_rows(row: Callable[..., Row], model: Path, first_s: float, later_s: float) -> Iterator[Row]:
    """Yield the times of a first and a later start, and what the model takes of disk and memory."""
    row = partial(row, system=SPECDEC)
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as cache, asyncio.Runner() as runner:
        for metric, most_s in (("first_start_s", first_s), ("later_start_s", later_s)):
            server = SpecdecServer(SPECDEC, model, None, "auto", environ={"XDG_CACHE_HOME": cache})
            runner.run(server.start())
            yield row(metric=metric, value=server.start_s, unit="s", at_most=most_s)
            memory = pss_bytes(server.pid, "target_service")
            runner.run(server.stop())
        kept = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
    file_bytes = model.stat().st_size
    yield row(metric="cache_to_file", value=kept / file_bytes, unit="ratio", at_most=1.15)
    yield row(metric="memory_to_file", value=memory / file_bytes, unit="ratio", at_most=1.8)


def _speed_rows(
    row: Callable[..., Row], runner: asyncio.Runner, each: Comparison, program: Path, *, quick: bool
) -> Iterator[Row]:
    """Yield the tokens a second of both servers and their ratio."""
    servers: dict[str, PeerServer] = {
        SPECDEC: SpecdecServer(SPECDEC, each.target, each.draft, "auto"),
        LLAMA: LlamaServer(LLAMA, program, each.target, each.draft, "f16"),
    }
    num_tokens = _NUM_QUICK_TOKENS if quick else _NUM_TOKENS
    num_pairs = _NUM_QUICK_PAIRS if quick else _NUM_PAIRS
    tokenizer = load_tokenizer(each.target)
    prompts = OwnPrompts([tokenizer.encode(text)[:_PROMPT_TOKENS] for text in prompt_texts()])
    batches = [prompts.batch(each.num_streams) for _ in range(1 + num_pairs)]

    def rate(server: PeerServer, batch: list[list[int]]) -> float:
        answers = runner.run(server.answer(batch, num_tokens))
        runner.run(server.settle())
        return tokens_per_s(answers)

    try:
        for server in servers.values():
            runner.run(server.start())
        systems = {name: partial(rate, server) for name, server in servers.items()}
        rates = take_turns(each.case, systems, batches[1:], batches[:1])
    finally:
        for server in servers.values():
            runner.run(server.stop())
    yield ratio_row(row, rates, SPECDEC, LLAMA, required=each.required)
    yield from rate_rows(row, rates)
