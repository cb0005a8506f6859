"""Suite `latency`: one stream over the three processes against Hugging Face's own generation (rows 0 to 4, 13, 14).

The target is `deep(18, 0.02)` of the demo target, the draft is the demo draft, both with weights in float16, 2 threads,
gamma 4, 128 tokens with EOS ignored on every side. Systems take turns on every prompt and are idle while another is
timed; the peers run in their own process. Row 3 compares our tokens a second without prefill with
E / (gamma * t_d + t_5 + R). E comes from the stream itself; t_d, t_5 and R come from the engine alone and from message
round trips on two links, measured between streams. The demo
pair has rows of sampling at T = 1 with gamma auto (row 4) and of int8 (row 13).
"""

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import interleave, rate_rows, ratio_row, take_turns
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.workload import GAMMA, NUM_NEW_TOKENS, NUM_THREADS, prompt_token_ids
from bench.suites.latency.round_table import table_rows
from bench.systems.bare import BareProcess
from bench.systems.bare_messages import Echoes
from bench.systems.models import DEMO, deep_target
from bench.systems.ours import RunningSystem, SystemRun, acceptance, emitted_per_round, mean_round_s
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


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; prints nothing but progress."""
    with deep_target() as target_dir:
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
        systems = {OURS: speculative}
        for method in METHODS:
            systems[f"hf_{method}"] = partial(peer.run, method, max_new_tokens=NUM_NEW_TOKENS, gamma=GAMMA)
        # Without its BOS the prompt shares no prefix with the other run of it: neither may find its KV in the cache.
        systems[TARGET_ONLY] = lambda prompt: target_only(prompt[1:])
        warmup = [prompt[::-1] for prompt in prompts[:2]]
        with progress("latency", (len(warmup) + len(prompts)) * len(systems) + len(prompts)) as advance:
            interleave(warmup, systems, advance)
            runs = interleave(prompts, systems | {_BARE: note_bare_times}, advance)
        del runs[_BARE]
        return runs, bare_times


def _rows(runs: Runs, bare_times: list[RoundTimes], quick: bool) -> list[Row]:
    row = partial(Row, suite=SUITE, case=CASE, origin=Origin(), quick=quick)
    rates = {name: [len(run.token_ids) / run.e2el_s for run in done] for name, done in runs.items()}
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
    rows = [
        ratio_row(row, rates, *systems, row=number, required=required)
        for systems, answered in agreed.items()
        for number, required in answered
    ]
    rows += rate_rows(row, {name: rates[name] for name in runs})
    for name, done in runs.items():
        times_ms = {
            "ttft_ms": float(np.median([run.ttft_s for run in done])) * 1e3,
            "tpot_ms_p50": float(np.median(_tpot_ms(done))),
            "tpot_ms_p99": float(np.quantile(_tpot_ms(done), 0.99)),
        }
        rows += [row(system=name, metric=metric, value=value, unit="ms") for metric, value in times_ms.items()]
    for metric, value, unit in _speculation_figures(runs):
        rows.append(row(system=OURS, metric=metric, value=value, unit=unit))
    ours = [run for run in runs[OURS] if isinstance(run, SystemRun)]
    for position, value in enumerate(_acceptance_per_position(ours), start=1):
        at = partial(row, system=OURS, x=position, x_name="position")
        rows.append(at(metric="acceptance", value=value, unit="accepted/tested"))
    for part, value in _round_split(ours, bare_times).items():
        rows.append(row(system=part, metric="round_split_ms", value=value * 1e3, unit="ms"))
    return rows


def _acceptance_per_position(ours: list[SystemRun]) -> list[float]:
    """Share of rounds that accepted position i among those that accepted all before it."""
    accepted = np.sum([run.stats.accepted_per_position for run in ours], axis=0)  # [gamma]
    tested = [sum(run.stats.num_rounds - run.stats.num_target_only_steps for run in ours), *accepted[:-1]]
    return [float(got / of) if of else 0.0 for got, of in zip(accepted, tested, strict=True)]


def _round_split(ours: list[SystemRun], bare_times: list[RoundTimes]) -> dict[str, float]:
    """Return the mean seconds of a round: forward passes as the bare engine takes them, what links and services add to
    those, and the coordinator's own part (accept, commit, emit) with the stream to the client.
    """
    draft_s, verify_s, rest_s = mean_round_s(ours)
    bare_draft_s = float(np.median([times.draft_s for times in bare_times]))
    bare_verify_s = float(np.median([times.verify_s for times in bare_times]))
    return {
        "draft": bare_draft_s,
        "draft link and service": draft_s - bare_draft_s,
        "verify": bare_verify_s,
        "verify link and service": verify_s - bare_verify_s,
        "accept, commit, emit": rest_s,
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


def sampled_rows(num_prompts: int, quick: bool) -> list[Row]:
    """Row 4: our sampling without filters against assisted generation's."""
    prompts = prompt_token_ids(DEMO / "target")[:num_prompts]
    with (
        RunningSystem(DEMO / "target", DEMO / "draft") as ours,
        PeerProcess(DEMO / "target", DEMO / "draft", NUM_THREADS) as peer,
    ):

        def run_ours(index: int) -> SystemRun:
            return ours.run(
                prompts[index], max_new_tokens=NUM_NEW_TOKENS, temperature=1.0, seed=index, mode="rejection"
            )

        def run_peer(index: int) -> PeerRun:
            return peer.run("assisted", prompts[index], NUM_NEW_TOKENS, GAMMA, seed=index)

        # Warm up with texts that share no prefix with the measured ones.
        for prompt in prompts[:2]:
            ours.run(prompt[::-1], max_new_tokens=NUM_NEW_TOKENS, temperature=1.0)
            peer.run("assisted", prompt[::-1], NUM_NEW_TOKENS, GAMMA, seed=0)
        with progress("demo pair, T = 1", 2 * len(prompts)) as advance:
            runs = interleave(range(len(prompts)), {"specdec": run_ours, "hf_assisted": run_peer}, advance)
    return [_ratio_row(4, "demo pair, 1 stream, T = 1, gamma auto", runs, 1.5, quick)]


def int8_rows(num_prompts: int, quick: bool) -> list[Row]:
    """Return row 13, or no row and a printed reason where int8 is refused."""
    prompts = prompt_token_ids(DEMO / "target")[:num_prompts]
    try:
        with (
            RunningSystem(DEMO / "target", DEMO / "draft", dtype="int8") as quantised,
            RunningSystem(DEMO / "target", DEMO / "draft", dtype="float32") as plain,
        ):
            options = {"max_new_tokens": NUM_NEW_TOKENS, "temperature": 0.0, "mode": "off"}
            systems = {
                "int8": partial(quantised.run, **options),
                "float32": partial(plain.run, **options),
            }
            runs = take_turns("demo pair, int8", systems, prompts, [prompt[::-1] for prompt in prompts[:2]])
    except RuntimeError as error:
        print(f"row 13 left out: {error}", file=sys.stderr)
        return []
    return [_ratio_row(13, "demo pair, 1 stream, greedy, target-only", runs, 1.3, quick)]


def _ratio_row(number: int, case: str, runs: dict[str, list], required: float, quick: bool) -> Row:
    rates = {name: [len(run.token_ids) / run.e2el_s for run in done] for name, done in runs.items()}
    row = partial(Row, suite=SUITE, case=case, origin=Origin(), quick=quick)
    return ratio_row(row, rates, *runs, row=number, required=required)
