"""Suite `throughput`: many greedy streams at once on `deep(18, 0.02)` (rows 5 and 6).

1 to 64 streams of one prompt length begin together; tokens a second of the whole batch, prefill included,
with gamma chosen by the system, against its own target-only mode and against Hugging Face's padded batch. Weights in
float16, 2 threads.
"""

import argparse
from functools import partial

from bench.harness.pairs import rate_rows, ratio_row, take_turns
from bench.harness.rows import Origin, Row
from bench.harness.streams import StreamProcess, StreamRequest, tokens_per_s
from bench.harness.workload import NUM_NEW_TOKENS, NUM_THREADS, OwnPrompts, prompt_token_ids
from bench.systems.models import DEMO, deep_target
from bench.systems.ours import RunningSystem
from bench.systems.transformers import PeerProcess

SUITE = "throughput"
CASE = "deep(18, 0.02)"
AUTO, TARGET_ONLY, BATCH = "specdec", "specdec_target_only", "hf_padded_batch"
_MODES: dict[str, dict[str, object]] = {AUTO: {}, TARGET_ONLY: {"mode": "off"}}
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
#: The widest batch only informs, because its pairs are few.
NUM_PAIRS, NUM_WIDEST_PAIRS, NUM_QUICK_PAIRS = 9, 3, 2
PROMPT_TOKENS = 48
PEER_CONCURRENCIES = (1, 4, 16)


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; prints nothing but progress."""
    with (
        deep_target() as target_dir,
        RunningSystem(target_dir, DEMO / "draft") as ours,
        PeerProcess(target_dir, DEMO / "draft", NUM_THREADS) as peer,
        StreamProcess(ours.endpoint) as clients,
    ):
        return _Suite(clients, peer, prompt_token_ids(target_dir, PROMPT_TOKENS), arguments.quick).rows()


class _Suite:
    """Batches of streams on running systems."""

    def __init__(self, clients: StreamProcess, peer: PeerProcess, prompts: list[list[int]], quick: bool) -> None:
        self._clients = clients
        self._peer = peer
        self._prompts = OwnPrompts(prompts)
        self._quick = quick
        self._row = partial(Row, suite=SUITE, origin=Origin(), quick=quick)

    def rows(self) -> list[Row]:
        """Return rows 5 and 6, and the rates they come from."""
        concurrencies = CONCURRENCIES[:3] if self._quick else CONCURRENCIES
        return [row for concurrency in concurrencies for row in self._at(concurrency)]

    def _at(self, concurrency: int) -> list[Row]:
        systems = {
            name: partial(self._run_batch, concurrency=concurrency, options=options) for name, options in _MODES.items()
        }
        if concurrency in PEER_CONCURRENCIES:
            systems[BATCH] = partial(self._run_peer, concurrency=concurrency)
        num_pairs = NUM_WIDEST_PAIRS if concurrency == CONCURRENCIES[-1] else NUM_PAIRS
        num_pairs = NUM_QUICK_PAIRS if self._quick else num_pairs
        rates = take_turns(f"{concurrency} streams", systems, range(num_pairs), [-1])
        case = f"{CASE}, {concurrency} streams, greedy"
        row = partial(self._row, case=case, x=concurrency, x_name="streams")
        agreed = {TARGET_ONLY: (6, 0.97) if concurrency <= 32 else (None, None)}
        agreed[BATCH] = (5, 1.2) if concurrency == 16 else (None, None)
        return [
            *(
                ratio_row(row, rates, AUTO, other, row=number, required=required)
                for other, (number, required) in agreed.items()
                if other in systems
            ),
            *rate_rows(row, rates),
        ]

    def _run_batch(self, index: int, concurrency: int, options: dict[str, object]) -> float:
        """Tokens a second of one batch."""
        fixed = {"max_new_tokens": NUM_NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        prompts = self._prompts.batch(concurrency)
        return tokens_per_s(self._clients.run([StreamRequest(prompt, fixed | options) for prompt in prompts]))

    def _run_peer(self, index: int, concurrency: int) -> float:
        return concurrency * NUM_NEW_TOKENS / self._peer.run_batch(self._prompts.batch(concurrency), NUM_NEW_TOKENS)
