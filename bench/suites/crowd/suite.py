"""Suite `crowd`: tokens a second by the number of concurrent streams, beside the ideal and other engines.

1 to 64 greedy streams begin together, without drafts (`alone`), with gamma 4 and with the system's gamma (`auto`), over
gRPC and over HTTP (`_http`). The targets are the simulated 8B and 70B models, `deep(18, 0.02)` in float32 (rows 5 and
6), SmolLM2-135M in bfloat16, which has no draft, and a simulated one with steps of 1 ms, where the coordinator is the
limit. In the ideal of a simulated target every stream is in every step. Transformers' padded batch, and vLLM and
llama.cpp without drafts, serve the files of the real models by turns with specdec; what `make peers` or `make real` has
not prepared is left out with its reason. `costs` has the other rows.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness.pairs import best_row, rate_rows, ratio_row, take_turns
from bench.harness.process_tree import cpu_s_of
from bench.harness.rows import Origin, Row
from bench.harness.workload import GAMMA, NUM_THREADS, OwnPrompts
from bench.suites.crowd import costs
from bench.suites.crowd.costs import PAIR_8B, PAIR_70B, PROGRAMS, Batch
from bench.systems import process, text_streams
from bench.systems.http_servers import GatewayServer, LlamaServer, VllmServer
from bench.systems.models import DEMO, deep
from bench.systems.process import PeerServer, Run, ServerFailure
from bench.systems.served import (
    LLAMA,
    PEERS_FOLDER,
    VLLM,
    ModelFiles,
    float32_files,
    peer_program,
    prompts_of,
    smollm2_bf16,
)
from bench.systems.simulated import ideal_crowd_tokens_per_s, write_tokenizer
from bench.systems.transformers import PeerProcess
from bench.systems.up import UpSystem
from specdec.engine.simulated.simulated_pair import SimulatedPair, simulated_pair

SUITE = "crowd"
STREAM_COUNTS, QUICK_COUNTS = (1, 2, 4, 8, 16, 32, 64), (1, 16)
HTTP_COUNTS, PADDED_COUNTS = (1, 8, 16, 32), (1, 4, 16)
#: The widest batches of the real models only inform, because their pairs are few.
NUM_PAIRS, NUM_WIDEST_PAIRS, NUM_QUICK_PAIRS = 9, 3, 2
NUM_QUICK_TOKENS = 48
ALONE, FIXED, AUTO = "specdec_alone", f"specdec_gamma_{GAMMA}", "specdec_auto"
IDEAL, BEST, _HTTP = "ideal_alone", "best fixed", "_http"
#: Speculation that each of our systems asks for.
MODES: dict[str, dict[str, object]] = {ALONE: {"mode": "off"}, FIXED: {"gamma": GAMMA}, AUTO: {}}
PADDED, VLLM_ALONE, LLAMA_ALONE = "hf_padded_batch", f"{VLLM}_alone", f"{LLAMA}_alone"
#: Systems that are compared if both run, beside each over HTTP with itself over gRPC.
COMPARED = ((AUTO, ALONE), (AUTO, PADDED), (ALONE, VLLM_ALONE), (ALONE, LLAMA_ALONE))
SIM_8B, SIM_70B, SIM_1MS = "simulated 8B", "simulated 70B", "simulated steps of 1 ms"
DEEP, SMOLLM2 = "deep(18, 0.02)", "SmolLM2-135M, bfloat16"

#: Ratio that a system must reach to another one in a case, by the number of streams.
REQUIRED: dict[tuple[str, str, str], dict[int, float]] = {
    (SIM_8B, ALONE, IDEAL): {2: 0.90, 8: 0.90, 32: 0.85},
    (SIM_70B, ALONE, IDEAL): {2: 0.95, 8: 0.95, 32: 0.95},
    (SIM_1MS, ALONE, IDEAL): {64: 6_000 / 64_000},  # tokens a second
    (SIM_8B, ALONE + _HTTP, ALONE): {32: 0.9},
    (SIM_8B, AUTO, BEST): {8: 1.0, 32: 1.0},
    (DEEP, AUTO, ALONE): dict.fromkeys(STREAM_COUNTS[:-1], 0.97),
    (DEEP, AUTO, PADDED): {16: 1.2},
    (SMOLLM2, ALONE, VLLM_ALONE): {8: 1.3, 16: 1.3},
}
#: Numbers of agreed rows, likewise.
ROW_NUMBERS = {(DEEP, AUTO, PADDED): 5, (DEEP, AUTO, ALONE): 6}
#: Most microseconds of processor time a token, and largest gap over the median one, of the simulated 8B model.
MOST_CPU_US, MOST_GAP = {ALONE: 180.0, FIXED: 300.0}, {ALONE: 2.0}


@dataclass(frozen=True)
class Target:
    """One model under a sweep."""

    case: str
    flags: Sequence[str]
    """Flags of `specdec up`."""
    prompts: OwnPrompts
    num_tokens: int
    modes: Sequence[str] = tuple(MODES)
    counts: Sequence[int] = ()
    """Numbers of streams, if they are not the suite's."""
    costed: int = 0
    """Number of streams whose costs are told."""
    simulated: SimulatedPair | None = None
    files: ModelFiles | None = None
    """Files that other engines serve."""
    dtypes: tuple[str, str] = ("", "")
    """Dtype of vLLM, and type of llama.cpp's KV cache."""


def _simulated(model: str, case: str, num_tokens: int, folder: Path, **more: object) -> Target:
    flags = ("--target", model, "--draft", model, "--tokenizer", str(write_tokenizer(folder / "tokenizer")))
    return Target(case, flags, costs.simulated_prompts(), num_tokens, simulated=simulated_pair(model), **more)


def _deep(folder: Path) -> Target:
    files = float32_files(deep(DEMO / "target", folder / "deep", num_layers=18, eps=0.02), folder)
    flags = ("--target", str(files.served), "--draft", str(DEMO / "draft"), "--device", "cpu", "--dtype", "float32")
    return Target(DEEP, flags, OwnPrompts(prompts_of(files.served)), 64, files=files, dtypes=("float32", "f32"))


def _smollm2(folder: Path) -> Target:
    files = smollm2_bf16(folder)
    flags = ("--target", str(files.served), "--device", "cpu")
    prompts = OwnPrompts(prompts_of(files.served))
    return Target(SMOLLM2, flags, prompts, 32, (ALONE,), files=files, dtypes=("bfloat16", "f16"))


SWEEPS: dict[str, Callable[[Path], Target]] = {
    "8b": lambda folder: _simulated(PAIR_8B, SIM_8B, 96, folder, costed=32),
    "70b": lambda folder: _simulated(PAIR_70B, SIM_70B, 64, folder),
    "1ms": lambda folder: _simulated(
        f"{PAIR_8B},step_ms=1", SIM_1MS, 192, folder, modes=(ALONE,), counts=(64,), costed=64
    ),
    "deep": _deep,
    "smollm2": _smollm2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the choice of rows and of streams, and where other engines are."""
    rows = [*SWEEPS, *costs.FIGURES]
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, help="only these models and costs")
    parser.add_argument("--streams", nargs="+", type=int, metavar="N", help="only these numbers of streams")
    parser.add_argument(
        "--peers-folder", type=Path, default=PEERS_FOLDER, metavar="DIR", help="folder that `make peers` has filled"
    )


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; print nothing but progress and what is left out."""
    row = partial(Row, suite=SUITE, origin=Origin(), quick=arguments.quick)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as name, asyncio.Runner() as runner:
        folder = Path(name)
        for figure in arguments.rows:
            if figure in costs.FIGURES:
                num_runs = NUM_QUICK_PAIRS if arguments.quick else NUM_PAIRS
                tokenizer = write_tokenizer(folder / "tokenizer")
                rows += costs.rows_of(figure, tokenizer, partial(row, simulated=True), num_runs)
                continue
            try:
                target = SWEEPS[figure](folder)
            except FileNotFoundError as error:
                print(f"{figure} is left out: {error}", file=sys.stderr)
                continue
            rows += _Sweep(runner.run, target, arguments, row).rows()
    return rows


class _Sweep:
    """The systems around one model, asked for more and more streams."""

    def __init__(self, run: Run, target: Target, arguments: argparse.Namespace, row: Callable[..., Row]) -> None:
        self._run, self._target, self._peers, self._quick = run, target, arguments.peers_folder, arguments.quick
        self._counts = arguments.streams or target.counts or (QUICK_COUNTS if self._quick else STREAM_COUNTS)
        self._num_tokens = NUM_QUICK_TOKENS if self._quick else target.num_tokens
        self._row = partial(row, case=target.case, simulated=target.simulated is not None)

    def rows(self) -> list[Row]:
        """Return the rows of all numbers of streams."""
        with ExitStack() as stack:
            self._system = stack.enter_context(UpSystem(self._target.flags))
            gateway = GatewayServer(self._system.endpoint)
            clients = text_streams.text_clients(self._run, self._system.endpoint, gateway)
            self._clients = stack.enter_context(clients)
            peers = self._start_peers(stack)
            return [row for num_streams in self._counts for row in self._at(num_streams, peers)]

    def _start_peers(self, stack: ExitStack) -> dict[str, PeerServer | PeerProcess]:
        """Start the other engines that serve the model's files; one that cannot is left out and told."""
        files, (dtype, kv_type) = self._target.files, self._target.dtypes
        if files is None:
            return {}
        most = max(self._counts)
        makers: dict[str, Callable[[Path], PeerServer]] = {
            VLLM: lambda program: VllmServer(VLLM_ALONE, program, files.served, dtype, max_streams=most),
            LLAMA: lambda program: LlamaServer(LLAMA_ALONE, program, files.gguf, None, kv_type, most),
        }
        peers: dict[str, PeerServer | PeerProcess] = {}
        for kind, make in makers.items():
            try:
                server = make(peer_program(kind, self._peers))
                self._run(server.start())
            except ServerFailure as failure:
                print(f"{kind} is left out beside {self._target.case}: {failure}", file=sys.stderr)
                continue
            stack.callback(lambda server=server: self._run(server.stop()))
            peers[server.name] = server
        if self._target.case == DEEP:
            peers[PADDED] = stack.enter_context(PeerProcess(files.served, DEMO / "draft", NUM_THREADS))
        return peers

    def _at(self, num_streams: int, peers: dict[str, PeerServer | PeerProcess]) -> list[Row]:
        """Return the rows of one number of streams."""
        systems: dict[str, Callable[[int], Batch]] = {}
        for name in self._target.modes:
            for protocol, suffix in (("grpc", ""), ("http", _HTTP)):
                if not suffix or num_streams in HTTP_COUNTS:
                    systems[name + suffix] = partial(self._ask, protocol, name, num_streams)
        for name, peer in peers.items():
            if name != PADDED or num_streams in PADDED_COUNTS:
                systems[name] = partial(self._ask_peer, peer, num_streams)
        is_widest = num_streams == STREAM_COUNTS[-1] and self._target.simulated is None
        num_pairs = NUM_QUICK_PAIRS if self._quick else NUM_WIDEST_PAIRS if is_widest else NUM_PAIRS
        label = f"{self._target.case}, {num_streams} streams"
        batches = take_turns(label, systems, range(num_pairs), [-1])
        rows = self._rate_rows(num_streams, {name: [each.rate for each in done] for name, done in batches.items()})
        if num_streams == self._target.costed or (self._quick and self._target.costed and num_streams > 1):
            limits, most_gap = (MOST_CPU_US, MOST_GAP) if self._target.case == SIM_8B else ({}, {})
            for name in filter(batches.__contains__, MOST_CPU_US):
                row = partial(self._row, case=label, system=name)
                rows += costs.batch_rows(row, batches[name], limits.get(name), most_gap.get(name))
        return rows

    def _ask(self, protocol: str, mode: str, num_streams: int, _: int) -> Batch:
        prompts = self._target.prompts.batch(num_streams)
        before_s = cpu_s_of(self._system.pid, PROGRAMS)
        streams = self._run(self._clients[protocol].run(prompts, self._num_tokens, **MODES[mode]))
        used_s = {name: now_s - before_s[name] for name, now_s in cpu_s_of(self._system.pid, PROGRAMS).items()}
        return Batch(text_streams.tokens_per_s(streams), streams, used_s)

    def _ask_peer(self, peer: PeerServer | PeerProcess, num_streams: int, _: int) -> Batch:
        prompts = self._target.prompts.batch(num_streams)
        if isinstance(peer, PeerProcess):
            return Batch(num_streams * self._num_tokens / peer.run_batch(prompts, self._num_tokens))
        return Batch(process.tokens_per_s(self._run(peer.answer(prompts, self._num_tokens))))

    def _rate_rows(self, num_streams: int, rates: dict[str, list[float]]) -> list[Row]:
        """Return all rates, and the ratios of specdec's systems to what each is compared with."""
        row = partial(self._row, x=num_streams, x_name="streams")
        rows = rate_rows(row, rates)
        pairs = [(name, name.removesuffix(_HTTP)) for name in rates if name.endswith(_HTTP)]
        for name, gamma in ((ALONE, 0), (FIXED, GAMMA)):
            if self._target.simulated is not None and name in rates:
                ideal = f"ideal_{name.removeprefix('specdec_')}"
                rate = ideal_crowd_tokens_per_s(self._target.simulated, num_streams, gamma)
                rows += rate_rows(row, {ideal: [rate]})
                rates = rates | {ideal: [rate] * len(rates[name])}
                pairs.append((name, ideal))
        pairs += [pair for pair in COMPARED if set(pair) <= set(rates)]
        rows += [ratio_row(row, rates, *pair, **self._demand(num_streams, *pair)) for pair in pairs]
        if AUTO in rates:
            ours = {name: rates[name] for name in MODES}
            rows.append(best_row(row, ours, AUTO, **self._demand(num_streams, AUTO, BEST)))
        return rows

    def _demand(self, num_streams: int, system: str, other: str) -> dict[str, float | int | None]:
        """Return what a ratio must reach, and the number of the agreed row."""
        key = (self._target.case, system, other)
        required = REQUIRED.get(key, {}).get(num_streams)
        return {"required": required, "row": None if required is None else ROW_NUMBERS.get(key)}
