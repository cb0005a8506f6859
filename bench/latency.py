"""Suite `latency`: one greedy stream over the three processes against Hugging Face's own generation (row 0).

The target is `deep(18, 0.02)` of the demo target, the draft is the demo draft, fp32, 2 threads, gamma 4, 128 tokens
with EOS ignored on every side. Systems take turns on every prompt and are idle while another is timed; the peers live
in a process of their own. Not here: many streams at once, injected delay, sampling.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from bench.models import DEMO, deep
from bench.pairs import interleave, median_ratio
from bench.peers import METHODS, PeerProcess, PeerRun
from bench.report import progress
from bench.rows import Origin, Row
from bench.system import RunningSystem, SystemRun, acceptance, emitted_per_round
from bench.workload import GAMMA, NUM_NEW_TOKENS, NUM_THREADS, prompt_token_ids

SUITE = "latency"
CASE = "deep(18, 0.02), 1 stream, greedy"
OURS, TARGET_ONLY = "specdec", "specdec_target_only"
NUM_QUICK_PROMPTS = 3

Runs = dict[str, list[SystemRun | PeerRun]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing beyond what every suite takes."""


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; prints nothing but progress."""
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        target_dir = deep(DEMO / "target", Path(folder) / "target", num_layers=18, eps=0.02)
        prompts = prompt_token_ids(target_dir)
        prompts = prompts[:NUM_QUICK_PROMPTS] if arguments.quick else prompts
        return _rows(_measure(target_dir, prompts), arguments.quick)


def _measure(target_dir: Path, prompts: list[list[int]]) -> Runs:
    """Every system on every prompt, by turns."""
    draft_dir = DEMO / "draft"
    with (
        RunningSystem(target_dir, draft_dir, NUM_THREADS) as ours,
        PeerProcess(target_dir, draft_dir, NUM_THREADS) as peer,
    ):
        speculative = partial(ours.run, max_new_tokens=NUM_NEW_TOKENS, temperature=0.0, gamma=GAMMA)
        target_only = partial(ours.run, max_new_tokens=NUM_NEW_TOKENS, temperature=0.0, mode="off")
        systems = {OURS: speculative, "hf_assisted": partial(_run_peer, peer, "assisted")}
        systems |= {f"hf_{method}": partial(_run_peer, peer, method) for method in METHODS}
        # Without its BOS the prompt shares no prefix with the other run of it: neither may find its KV in the cache.
        systems[TARGET_ONLY] = lambda prompt: target_only(prompt[1:])
        warmup = [prompt[::-1] for prompt in prompts[:2]]
        with progress("latency", (len(warmup) + len(prompts)) * len(systems)) as advance:
            interleave(warmup, systems, advance)
            return interleave(prompts, systems, advance)


def _run_peer(peer: PeerProcess, method: str, prompt: list[int]) -> PeerRun:
    return peer.run(method, prompt, NUM_NEW_TOKENS, GAMMA)


def _rows(runs: Runs, quick: bool) -> list[Row]:
    row = partial(Row, suite=SUITE, case=CASE, origin=Origin(), quick=quick)
    rates = {name: [len(run.token_ids) / run.e2el_s for run in done] for name, done in runs.items()}
    rows = []
    for other in (name for name in runs if name != OURS):
        ratio = median_ratio(rates[OURS], rates[other])
        answers = other == "hf_assisted"
        rows.append(
            row(
                row=0 if answers else None,
                system=OURS,
                metric="tokens_per_s_ratio",
                value=ratio.median,
                unit="x",
                ratio_to=other,
                low=ratio.low,
                high=ratio.high,
                num_pairs=ratio.num_pairs,
                required=1.0 if answers else None,
            )
        )
    for name, done in runs.items():
        times = {
            "tokens_per_s": (float(np.median(rates[name])), "tokens/s"),
            "ttft_ms": (float(np.median([run.ttft_s for run in done])) * 1e3, "ms"),
            "tpot_ms_p50": (float(np.median(_tpot_ms(done))), "ms"),
            "tpot_ms_p99": (float(np.quantile(_tpot_ms(done), 0.99)), "ms"),
        }
        rows += [row(row=None, system=name, metric=key, value=v, unit=unit) for key, (v, unit) in times.items()]
    for metric, value, unit in _speculation_figures(runs):
        rows.append(row(row=None, system=OURS, metric=metric, value=value, unit=unit))
    return rows


def _tpot_ms(runs: list[SystemRun | PeerRun]) -> list[float]:
    """Mean time per token after the first, per stream, in milliseconds."""
    return [(run.e2el_s - run.ttft_s) / (len(run.token_ids) - 1) * 1e3 for run in runs]


def _speculation_figures(runs: Runs) -> list[tuple[str, float, str]]:
    ours = [run for run in runs[OURS] if isinstance(run, SystemRun)]
    num_tokens = sum(len(run.token_ids) for run in ours)
    same = sum(mine.token_ids == theirs.token_ids for mine, theirs in zip(ours, runs["hf_plain"], strict=True))
    return [
        ("alpha", acceptance(ours), "accepted/tested"),
        ("tau", emitted_per_round(ours), "tokens/round"),
        ("wire_bytes_per_token", sum(run.stats.wire_bytes for run in ours) / num_tokens, "bytes"),
        ("draft_wait_share", sum(run.stats.draft_s for run in ours) / sum(run.e2el_s for run in ours), "of e2el"),
        ("verify_wait_share", sum(run.stats.verify_s for run in ours) / sum(run.e2el_s for run in ours), "of e2el"),
        ("cached_prompt_tokens", float(sum(run.num_cached_prompt_tokens for run in ours)), "tokens"),
        ("streams_equal_to_hf_plain", float(same), f"of {len(ours)}"),
    ]
