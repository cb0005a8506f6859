"""Suite `throughput`: many greedy streams at once on `deep(18, 0.02)` (rows 5 and 6), and Poisson arrivals.

Closed loop: 1 to 64 streams of one prompt length begin together; tokens a second of the whole batch, prefill included,
with gamma chosen by the system, against its own target-only mode and against Hugging Face's padded batch. Open loop:
requests arrive at random, and only those that meet the SLO count. Weights in float16, 2 threads.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import interleave, median_ratio
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.streams import StreamProcess, StreamRequest, StreamRun, tokens_per_s
from bench.harness.workload import NUM_NEW_TOKENS, NUM_THREADS, OwnPrompts, prompt_token_ids
from bench.systems.models import DEMO, deep
from bench.systems.ours import RunningSystem
from bench.systems.transformers import PeerProcess

SUITE = "throughput"
CASE = "deep(18, 0.02)"
AUTO, TARGET_ONLY, BATCH = "specdec", "specdec_target_only", "hf_padded_batch"
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
#: The widest batch only informs, because its pairs are few.
NUM_PAIRS, NUM_WIDEST_PAIRS, NUM_QUICK_PAIRS = 9, 3, 2
PROMPT_TOKENS = 48
PEER_CONCURRENCIES = (1, 4, 16)

ARRIVALS_PER_S = (1.0, 2.0, 4.0)
ARRIVALS_S = 20.0
ARRIVING_TOKENS = 64
SLO_TTFT_S, SLO_TPOT_S = 0.5, 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options to those of every suite."""


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; prints nothing but progress."""
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        target_dir = deep(DEMO / "target", Path(folder) / "target", num_layers=18, eps=0.02)
        prompts = prompt_token_ids(target_dir, PROMPT_TOKENS)
        with (
            RunningSystem(target_dir, DEMO / "draft") as ours,
            PeerProcess(target_dir, DEMO / "draft", NUM_THREADS) as peer,
            StreamProcess(ours.endpoint) as clients,
        ):
            suite = _Suite(clients, peer, prompts, arguments.quick)
            return [*suite.closed_loop(), *suite.open_loop()]


class _Suite:
    """Both loops over running systems."""

    def __init__(self, clients: StreamProcess, peer: PeerProcess, prompts: list[list[int]], quick: bool) -> None:
        self._clients = clients
        self._peer = peer
        self._prompts = OwnPrompts(prompts)
        self._quick = quick
        self._row = partial(Row, suite=SUITE, origin=Origin(), quick=quick)

    def closed_loop(self) -> list[Row]:
        """Rows 5 and 6, and the rates they come from."""
        concurrencies = CONCURRENCIES[:3] if self._quick else CONCURRENCIES
        return [row for concurrency in concurrencies for row in self._at(concurrency)]

    def open_loop(self) -> list[Row]:
        """Goodput: requests a second that met the SLO."""
        rates = ARRIVALS_PER_S[:1] if self._quick else ARRIVALS_PER_S
        slo = f"ttft <= {SLO_TTFT_S} s, tpot <= {SLO_TPOT_S * 1e3:g} ms"
        rows = []
        with progress("arrivals", 2 * len(rates)) as advance:
            for rate in rates:
                for name, options in _MODES.items():
                    runs = self._clients.run(self._arrivals(rate, options))
                    goodput_rps = sum(_meets_slo(run) for run in runs) / max(run.chunk_s[-1] for run in runs)
                    case = f"{CASE}, {rate:g} arrivals/s, {ARRIVING_TOKENS} tokens, {slo}"
                    rows.append(
                        self._row(
                            row=None, case=case, system=name, metric="goodput_rps", value=goodput_rps, unit="requests/s"
                        )
                    )
                    advance()
        return rows

    def _at(self, concurrency: int) -> list[Row]:
        systems = {
            name: partial(self._run_batch, concurrency=concurrency, options=options) for name, options in _MODES.items()
        }
        if concurrency in PEER_CONCURRENCIES:
            systems[BATCH] = partial(self._run_peer, concurrency=concurrency)
        num_pairs = NUM_WIDEST_PAIRS if concurrency == CONCURRENCIES[-1] else NUM_PAIRS
        num_pairs = NUM_QUICK_PAIRS if self._quick else num_pairs
        with progress(f"{concurrency} streams", (1 + num_pairs) * len(systems)) as advance:
            interleave([-1], systems, advance)
            rates = interleave(range(num_pairs), systems, advance)
        case = f"{CASE}, {concurrency} streams, greedy"
        row = partial(self._row, case=case, x=concurrency, x_name="streams")
        rows = []
        agreed = {TARGET_ONLY: (6, 0.97) if concurrency <= 32 else (None, None)}
        agreed[BATCH] = (5, 1.2) if concurrency == 16 else (None, None)
        for other in list(systems)[1:]:
            ratio, (number, required) = median_ratio(rates[AUTO], rates[other]), agreed[other]
            rows.append(
                row(
                    row=number, system=AUTO, metric="tokens_per_s_ratio", value=ratio.median, unit="x", ratio_to=other,
                    low=ratio.low, high=ratio.high, num_pairs=ratio.num_pairs, required=required,
                )
            )  # fmt: skip
        for name, measured in rates.items():
            value = float(np.median(measured))
            rows.append(row(row=None, system=name, metric="tokens_per_s", value=value, unit="tokens/s"))
        return rows

    def _run_batch(self, index: int, concurrency: int, options: dict[str, object]) -> float:
        """Tokens a second of one batch."""
        fixed = {"max_new_tokens": NUM_NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        prompts = self._prompts.batch(concurrency)
        return tokens_per_s(self._clients.run([StreamRequest(prompt, fixed | options) for prompt in prompts]))

    def _run_peer(self, index: int, concurrency: int) -> float:
        return concurrency * NUM_NEW_TOKENS / self._peer.run_batch(self._prompts.batch(concurrency), NUM_NEW_TOKENS)

    def _arrivals(self, rate: float, options: dict[str, object]) -> list[StreamRequest]:
        """Return arrival times drawn from the rate alone, so that they are equal for every system."""
        dice = np.random.default_rng(int(rate * 1000))
        seconds = ARRIVALS_S / (4 if self._quick else 1)
        offsets = np.cumsum(dice.exponential(1 / rate, max(2, int(rate * seconds))))
        fixed = {"max_new_tokens": ARRIVING_TOKENS, "temperature": 0.0, "ignore_eos": True}
        return [StreamRequest(self._prompts.next(), fixed | options, float(offset)) for offset in offsets]


_MODES: dict[str, dict[str, object]] = {AUTO: {}, TARGET_ONLY: {"mode": "off"}}


def _meets_slo(run: StreamRun) -> bool:
    return run.ttft_s <= SLO_TTFT_S and run.tpot_s <= SLO_TPOT_S
