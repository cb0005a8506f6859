"""Measure what a second target and draft add under a steady load, and what removing the first ones costs.

`specdec up` around simulated engines, scaled by `specdec scale` while eight streams ask for one output after the other,
each in a new session. The target verifies one session a step, as a large compute-bound model does, so eight
streams are more than it can serve. Only tokens of outputs count that ended without an error and equal those from before
the first change. Part of the suite `elastic`, which calls this.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import rate_rows, ratio_row
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.steady_load import SteadyLoad
from bench.systems.up import UpSystem

PAIR = "simulated:70b-1b,predraft=off"
GAMMA = 4
NUM_STREAMS = 8
#: An output takes about two seconds before the change, so sessions are placed anew at that pace.
NUM_TOKENS = 48
#: Seconds of the agreed figures: until goodput rises, until new sessions arrive.
GAIN_BY_S, TAKEN_BY_S = 10.0, 2.0
NUM_WINDOWS, NUM_QUICK_WINDOWS = 12, 4
_WINDOW_S = 1.0
_WARM_S = 4.0


def measure_pools(tokenizer_dir: Path, row: Callable[..., Row], quick: bool) -> list[Row]:
    """All rows.

    Args:
        tokenizer_dir: see `write_tokenizer`.
        row: makes a row of the suite.
        quick: fewer windows.
    """
    num_windows = NUM_QUICK_WINDOWS if quick else NUM_WINDOWS
    models = ["--target", PAIR, "--draft", PAIR, "--tokenizer", str(tokenizer_dir)]
    # A verification's five tokens fill a step.
    environ = {"SPECDEC_TARGET__MAX_STEP_TOKENS": str(GAMMA + 1)}
    with (
        UpSystem(models, environ) as system,
        SteadyLoad(system.endpoint, NUM_STREAMS, NUM_TOKENS, gamma=GAMMA) as load,
        progress("pools", 4) as advance,
    ):
        time.sleep(_WARM_S)
        before = _rates(load, num_windows)
        advance()
        first = system.replicas("target")
        asked_s = time.monotonic()
        system.scale("target=2", "draft=2")
        taken_s = _first_session_s(system, first)
        advance()
        time.sleep(max(0.0, asked_s + GAIN_BY_S - time.monotonic()))
        after = _rates(load, num_windows)
        advance()
        system.scale("target=1", "draft=1")
        time.sleep(_WARM_S)
        left = system.replicas("target") & first
        advance()
    rates = {"one pair": before, "two pairs": after}
    serving_s = max(system.said_s(f"[{name}] serving") for name in ("target-1", "draft-1"))
    case = f"70B/1B, one verification a step, {NUM_STREAMS} streams, 1 to 2 pairs"
    row = partial(row, case=case, system="specdec up")
    return [
        ratio_row(
            row, rates, "two pairs", "one pair", metric="goodput_tokens_per_s_ratio", system="specdec up", required=1.9,
            note=f"from {GAIN_BY_S:g} s after the command on",
        ),
        *rate_rows(row, rates),
        row(metric="serving_after_command", value=serving_s - asked_s, unit="s"),
        row(metric="new_session_after_serving", value=max(0.0, taken_s - serving_s), unit="s", at_most=TAKEN_BY_S),
        row(metric="errors_and_other_outputs", value=float(len(load.faults)), unit="outputs", at_most=0.0),
        row(metric="first_pair_left_behind", value=float(len(left)), unit="replicas", at_most=0.0),
        row(metric="outputs", value=float(sum(load.outputs_ended)), unit="outputs"),
    ]  # fmt: skip


def _rates(load: SteadyLoad, num_windows: int) -> list[float]:
    """Tokens a second in windows from now on."""
    began_s = time.monotonic()
    time.sleep(num_windows * _WINDOW_S)
    edges = [began_s + index * _WINDOW_S for index in range(num_windows + 1)]
    chunks = list(load.chunks)
    counts, _ = np.histogram([when for when, _, _ in chunks], edges, weights=[count for _, _, count in chunks])
    return [float(count) / _WINDOW_S for count in counts]


def _first_session_s(system: UpSystem, first: set[str]) -> float:
    """Return when a target that was added is first seen to hold a session, in seconds."""
    while not any(number for name, number in system.sessions("target").items() if name not in first):
        time.sleep(0.02)
    return time.monotonic()
