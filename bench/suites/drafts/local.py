"""Rows 33 and 34 of suite `drafts`: a target that drafts with its own first layers.

Row 33 compares one trip with two: the remote draft is a checkpoint of the same first layers, so that both draft the
same tokens by the same arithmetic, and only the place differs. Its ideal is the time of a round's steps alone, draft
steps and verification, run in a separate process. Row 34 is the gain of early exit over no draft. The target is
`deep(18, 0.02)`, greedy, one stream. Called by `drafts`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.pairs import ratio_row, take_turns
from bench.harness.rows import Origin, Row
from bench.harness.workload import NUM_NEW_TOKENS, NUM_THREADS, prompt_token_ids
from bench.systems.bare import BareProcess
from bench.systems.models import DEMO, first_layers
from bench.systems.ours import RunningSystem, SystemRun, acceptance, emitted_per_round

SUITE = "drafts"
CASE = "deep(18, 0.02), greedy, 1 stream"
LOCAL, REMOTE, TARGET_ONLY, IDEAL = "early_exit", "first_layers_remote", "target_only", "steps alone"
NUM_LAYERS = 3
GAMMA = 4
NUM_QUICK_PROMPTS = 3
ADAPTER = DEMO / "early_exit"
#: Context length of a round of the ideal, about the middle of an output.
CONTEXT_TOKENS = 256
#: A round that was measured as faster than its steps alone counts as this much above them.
LEAST_S = 1e-6


def measure(folder: Path, target_dir: Path, quick: bool) -> list[Row]:
    """Runs all three systems, and the steps alone.

    Args:
        folder: for checkpoints.
        target_dir: the deep target.
        quick: a few prompts only.
    """
    first_dir = first_layers(target_dir, folder / "first", NUM_LAYERS)
    prompts = prompt_token_ids(target_dir)
    prompts = prompts[: NUM_QUICK_PROMPTS + 1] if quick else prompts
    adapter = f":{ADAPTER}" if ADAPTER.is_dir() else ""
    # Row 33 runs without an adapter, which both sides share; row 34 adds it.
    local = (f"{LOCAL}=early-exit:{NUM_LAYERS}", f"adapted=early-exit:{NUM_LAYERS}{adapter}")
    with (
        RunningSystem(target_dir, None, lookup=local) as ours,
        RunningSystem(target_dir, first_dir) as remote,
        RunningSystem(target_dir, None) as alone,
        BareProcess({"target": (target_dir, "auto"), "first": (first_dir, "auto")}, NUM_THREADS) as bare,
    ):
        options = {"max_new_tokens": NUM_NEW_TOKENS, "temperature": 0.0}
        systems: dict[str, Callable[[list[int]], Any]] = {
            LOCAL: partial(ours.run, gamma=GAMMA, draft_pool=LOCAL, **options),
            REMOTE: partial(remote.run, gamma=GAMMA, **options),
            "adapted": partial(ours.run, draft_pool="adapted", **options),
            TARGET_ONLY: partial(alone.run, mode="off", **options),
            # Measured close in time to the others, because the speed of a shared machine drifts.
            IDEAL: lambda _: _ideal_round_s(bare),
        }
        runs = take_turns("early exit", systems, prompts[1:], prompts[:1])
    row = partial(Row, suite=SUITE, origin=Origin(), quick=quick)
    return [*_trip_rows(row, runs), *_gain_rows(row, runs, bool(adapter))]


def _ideal_round_s(bare: BareProcess) -> float:
    """Return the seconds of a round's steps alone."""
    draft_s = bare.step_s("first", CONTEXT_TOKENS, 1)
    return GAMMA * draft_s + bare.step_s("target", CONTEXT_TOKENS, GAMMA + 1)


def _trip_rows(row: Callable[..., Row], runs: dict[str, list[Any]]) -> list[Row]:
    """Row 33."""
    row = partial(row, case=f"{CASE}, {NUM_LAYERS} layers, gamma {GAMMA}")
    ideals_s = runs[IDEAL]
    round_s = {name: [_steady_round_s(run) for run in runs[name]] for name in (LOCAL, REMOTE)}
    above_s = {
        name: [max(seconds - ideal_s, LEAST_S) for seconds, ideal_s in zip(measured, ideals_s, strict=True)]
        for name, measured in round_s.items()
    }
    rows = [
        ratio_row(row, above_s, LOCAL, REMOTE, row=33, metric="round_above_ideal_ratio", at_most=0.6),
        row(system=IDEAL, metric="ideal_round_ms", value=float(np.median(ideals_s)) * 1e3, unit="ms"),
    ]
    for name, measured in round_s.items():
        trips = [1 + (name == REMOTE) * (1 - run.stats.num_target_only_steps / run.stats.num_rounds)
                 for run in runs[name]]  # fmt: skip
        rows += [
            row(system=name, metric="round_ms", value=float(np.median(measured)) * 1e3, unit="ms"),
            row(system=name, metric="trips_per_round", value=float(np.mean(trips)), unit=""),
            row(system=name, metric="alpha", value=acceptance(runs[name]), unit=""),
        ]
    return rows


def _gain_rows(row: Callable[..., Row], runs: dict[str, list[Any]], has_adapter: bool) -> list[Row]:
    """Row 34."""
    row = partial(row, case=f"{CASE}, {NUM_LAYERS} layers{' with adapter' if has_adapter else ''}")
    rates = {name: [len(run.token_ids) / run.e2el_s for run in runs[name]] for name in ("adapted", TARGET_ONLY)}
    same = [ours.token_ids == own.token_ids for ours, own in zip(runs["adapted"], runs[TARGET_ONLY], strict=True)]
    figures = {
        "alpha": acceptance(runs["adapted"]),
        "tau": emitted_per_round(runs["adapted"]),
        "texts_equal_to_target_only": float(np.mean(same)),
    }
    return [
        ratio_row(
            row, rates, "adapted", TARGET_ONLY, system=LOCAL, row=34 if has_adapter else None,
            required=1.3 if has_adapter else None,
        ),
        *(row(system=LOCAL, metric=metric, value=value, unit="") for metric, value in figures.items()),
    ]  # fmt: skip


def _steady_round_s(run: SystemRun) -> float:
    """Return the seconds a round, without the first one."""
    return (run.e2el_s - run.ttft_s) / (run.stats.num_rounds - 1)
