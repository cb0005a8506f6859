"""Suite `latency`: one stream over the three processes against Hugging Face's own generation (rows 0 to 4, 13, 14).

The target is `deep(18, 0.02)` of the demo target, the draft is the demo draft, both with weights in float16, 2 threads,
gamma 4, 128 tokens with EOS ignored on every side. Systems take turns on every prompt and are idle while another is
timed; the peers run in their own process. Row 3 compares our tokens a second without prefill with
E / (gamma * t_d + t_5 + R). E comes from the stream itself; t_d, t_5 and R come from the engine alone and from message
round trips on two links, measured between streams. The demo pair's rows are in `demo_pair`.
"""

import argparse
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import interleave, median_ratio
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.workload import GAMMA, NUM_NEW_TOKENS, NUM_THREADS, prompt_token_ids
from bench.suites.latency.demo_pair import int8_rows, sampled_rows
from bench.suites.latency.round_table import table_rows
from bench.systems.bare import BareProcess
from bench.systems.bare_messages import Echoes
from bench.systems.models import DEMO, deep
from bench.systems.ours import RunningSystem, SystemRun, acceptance, emitted_per_round
from bench.systems.transformers import METHODS, PeerProcess, PeerRun

SUITE = "latency"
CASE = "deep(18, 0.02), 1 stream, greedy"
OURS, TARGET_ONLY = "specdec", "specdec_target_only"
_DECODING = "specdec, prefill left out"
_BARE = "bare engine"
NUM_QUICK_PROMPTS = 3

Runs = dict[str, list[SystemRun | PeerRun]]


@dataclass(frozen=True)
class RoundTimes:
    """Lower bounds of a round's parts, in seconds."""

    draft_s: float
    verify_s: float
    wire_s: float

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.wire_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options to those of every suite."""


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; prints nothing but progress."""
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        target_dir = deep(DEMO / "target", Path(folder) / "target", num_layers=18, eps=0.02)
        prompts = prompt_token_ids(target_dir)
        prompts = prompts[:NUM_QUICK_PROMPTS] if arguments.quick else prompts
        rows = _rows(*_measure(target_dir, prompts), arguments.quick)
        rows += table_rows(target_dir, DEMO / "draft", prompts, arguments.quick)
        rows += sampled_rows(len(prompts), arguments.quick)
        return rows + int8_rows(len(prompts), arguments.quick)


def _measure(target_dir: Path, prompts: list[list[int]]) -> tuple[Runs, list[RoundTimes]]:
    """Run every system on every prompt by turns, and time the parts of a round in the middle of each output."""
    draft_dir = DEMO / "draft"
    with (
        RunningSystem(target_dir, draft_dir) as ours,
        PeerProcess(target_dir, draft_dir, NUM_THREADS) as peer,
        BareProcess({"target": (target_dir, "float32"), "draft": (draft_dir, "float32")}, NUM_THREADS) as bare,
        Echoes() as echoes,
    ):
        bare_times: list[RoundTimes] = []

        def note_bare_times(prompt: list[int]) -> None:
            context = len(prompt) + NUM_NEW_TOKENS // 2
            verify_s, draft_step_s = bare.step_s("target", context, GAMMA + 1), bare.step_s("draft", context, 1)
            bare_times.append(RoundTimes(GAMMA * draft_step_s, verify_s, 2 * echoes.round_trip_s()))

        speculative = partial(ours.run, max_new_tokens=NUM_NEW_TOKENS, temperature=0.0, gamma=GAMMA)
        target_only = partial(ours.run, max_new_tokens=NUM_NEW_TOKENS, temperature=0.0, mode="off")
        systems = {OURS: speculative, "hf_assisted": partial(_run_peer, peer, "assisted")}
        systems |= {f"hf_{method}": partial(_run_peer, peer, method) for method in METHODS}
        # Without its BOS the prompt shares no prefix with the other run of it: neither may find its KV in the cache.
        systems[TARGET_ONLY] = lambda prompt: target_only(prompt[1:])
        warmup = [prompt[::-1] for prompt in prompts[:2]]
        with progress("latency", (len(warmup) + len(prompts)) * len(systems) + len(prompts)) as advance:
            interleave(warmup, systems, advance)
            runs = interleave(prompts, systems | {_BARE: note_bare_times}, advance)
        del runs[_BARE]
        return runs, bare_times


def _run_peer(peer: PeerProcess, method: str, prompt: list[int]) -> PeerRun:
    return peer.run(method, prompt, NUM_NEW_TOKENS, GAMMA)


def _rows(runs: Runs, bare_times: list[RoundTimes], quick: bool) -> list[Row]:
    row = partial(Row, suite=SUITE, case=CASE, origin=Origin(), quick=quick)
    rates = {name: [len(run.token_ids) / run.e2el_s for run in done] for name, done in runs.items()}
    rows = []
    ideal = [tokens / ideal.total_s for tokens, ideal in zip(_emitted_per_round(runs), bare_times, strict=True)]
    rates |= {_DECODING: [run.decode_tokens_per_s for run in runs[OURS]], "ideal": ideal}
    agreed: dict[tuple[str, str], tuple[tuple[int | None, float | None], ...]] = {
        (OURS, "hf_assisted"): ((0, 1.0), (1, 1.8)),
        (OURS, "hf_plain"): ((2, 3.0),),
        (_DECODING, "ideal"): ((3, 0.9),),
        (TARGET_ONLY, "hf_plain"): ((14, 1.5),),
        (OURS, "hf_prompt_lookup"): ((None, None),),
        (OURS, TARGET_ONLY): ((None, None),),
    }
    for (system, other), answered in agreed.items():
        ratio = median_ratio(rates[system], rates[other])
        for number, required in answered:
            rows.append(
                row(
                    row=number,
                    system=system,
                    metric="tokens_per_s_ratio",
                    value=ratio.median,
                    unit="x",
                    ratio_to=other,
                    low=ratio.low,
                    high=ratio.high,
                    num_pairs=ratio.num_pairs,
                    required=required,
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
    ours = [run for run in runs[OURS] if isinstance(run, SystemRun)]
    for position, value in enumerate(_acceptance_per_position(ours), start=1):
        at = partial(row, row=None, system=OURS, x=position, x_name="position")
        rows.append(at(metric="acceptance", value=value, unit="accepted/tested"))
    for part, value in _round_split(ours, bare_times).items():
        rows.append(row(row=None, system=part, metric="round_split_ms", value=value * 1e3, unit="ms"))
    return rows


def _acceptance_per_position(ours: list[SystemRun]) -> list[float]:
    """Share of rounds that accepted position i among those that accepted all before it."""
    accepted = np.sum([run.stats.accepted_per_position for run in ours], axis=0)  # [gamma]
    tested = [sum(run.stats.num_rounds - run.stats.num_target_only_steps for run in ours), *accepted[:-1]]
    return [float(got / of) if of else 0.0 for got, of in zip(accepted, tested, strict=True)]


def _round_split(ours: list[SystemRun], bare_times: list[RoundTimes]) -> dict[str, float]:
    """Mean seconds of a round: forward passes as the bare engine takes them, what links and services add to those, and
    the coordinator's own part (accept, commit, emit) with the stream to the client. Prefill is spread over them.
    """
    num_rounds = sum(run.stats.num_rounds for run in ours)
    draft_s, verify_s, e2el_s = (
        sum(seconds) / num_rounds
        for seconds in (
            [run.stats.draft_s for run in ours],
            [run.stats.verify_s for run in ours],
            [run.e2el_s for run in ours],
        )
    )
    bare_draft_s, bare_verify_s = (
        float(np.median(seconds))
        for seconds in ([times.draft_s for times in bare_times], [times.verify_s for times in bare_times])
    )
    return {
        "draft": bare_draft_s,
        "draft link and service": draft_s - bare_draft_s,
        "verify": bare_verify_s,
        "verify link and service": verify_s - bare_verify_s,
        "accept, commit, emit": e2el_s - draft_s - verify_s,
    }


def _emitted_per_round(runs: Runs) -> list[float]:
    """Return E, the tokens emitted per round, of each of our streams."""
    return [emitted_per_round([run]) for run in runs[OURS] if isinstance(run, SystemRun)]


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
