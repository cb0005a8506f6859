"""Suite `wire`: serialised bytes of both links at a real model's vocabulary (rows 11 and 15).

gamma 4, T = 1, V = 151,936, Zipf-like distributions so flat that every support has its 64 entries, no compression. The
count includes every request and reply item of both links in both directions, as the coordinator counts it.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.streams import StreamProcess, StreamRequest, StreamRun
from bench.systems.simulated import ProcessSystem, ReplicaCommand, write_tokenizer

SUITE = "wire"
GAMMA = 4
#: Noise of the target's log probabilities around the draft's, by the acceptance it gives.
NOISE_OF_ALPHA = {0.80: 0.34, 0.75: 0.51}
TOLERANCE = 0.02
NUM_STREAMS, NUM_QUICK_STREAMS = 8, 1
NUM_TOKENS = 300


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; prints nothing but progress.

    Raises:
        RuntimeError: the distributions did not give their intended acceptance.
    """
    num_streams = NUM_QUICK_STREAMS if arguments.quick else NUM_STREAMS
    rows = []
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        tokenizer_dir = write_tokenizer(Path(folder))
        with progress("wire", num_streams * len(NOISE_OF_ALPHA)) as advance:
            for alpha, noise in NOISE_OF_ALPHA.items():
                replicas = [
                    ReplicaCommand("target", "bench.systems.zipf", ("target", "--noise", str(noise))),
                    ReplicaCommand("draft", "bench.systems.zipf", ("draft", "--noise", "0")),
                ]
                runs = []
                with ProcessSystem(tokenizer_dir, replicas) as system, StreamProcess(system.endpoint) as client:
                    for seed in range(num_streams):
                        runs += client.run([_request(seed)])
                        advance()
                rows += _rows(runs, alpha, arguments.quick)
    return rows


def _request(seed: int) -> StreamRequest:
    options = {"max_new_tokens": NUM_TOKENS, "temperature": 1.0, "seed": seed, "gamma": GAMMA, "ignore_eos": True}
    return StreamRequest([5, 6, 7], options | {"mode": "rejection"})


def _rows(runs: list[StreamRun], alpha: float, quick: bool) -> list[Row]:
    num_rounds = sum(run.stats["num_rounds"] for run in runs)
    num_bytes = sum(run.stats["wire_bytes"] for run in runs)
    num_accepted = sum(run.stats["num_accepted_tokens"] for run in runs)
    num_full = sum(run.stats["accepted_per_position"][GAMMA - 1] for run in runs)
    measured_alpha = num_accepted / (num_accepted + num_rounds - num_full)
    if abs(measured_alpha - alpha) > TOLERANCE and not quick:
        raise RuntimeError(f"alpha is {measured_alpha:.3f} where {alpha} ± {TOLERANCE} was configured")
    case = f"V = 151,936, gamma {GAMMA}, T = 1, 64 entries, alpha {alpha}"
    row = partial(Row, suite=SUITE, case=case, system="both links", origin=Origin(), quick=quick)
    per_token = num_bytes / sum(run.num_tokens for run in runs)
    round_limit, token_limit = (
        ({"row": 11, "at_most": 2_900}, {}) if alpha == 0.80 else ({}, {"row": 15, "at_most": 1_024})
    )
    return [
        row(metric="bytes_per_round", value=num_bytes / num_rounds, unit="bytes", **round_limit),
        row(metric="bytes_per_token", value=per_token, unit="bytes", **token_limit),
        row(metric="alpha", value=measured_alpha, unit="accepted/tested"),
    ]
