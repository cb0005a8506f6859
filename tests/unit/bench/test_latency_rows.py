"""The rows that suite `latency` makes of its runs: which question each answers, and against what."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.plots import write_plots
from bench.harness.rows import Row
from bench.suites.latency import suite as latency
from bench.suites.latency.suite import OURS, TARGET_ONLY, RoundTimes
from bench.systems.ours import SystemRun
from bench.systems.transformers import PeerRun
from specdec.client.results import GenerationStats

NUM_PROMPTS = 9
STATS = GenerationStats(
    num_rounds=40,
    num_draft_tokens=160,
    num_accepted_tokens=88,
    accepted_per_position=(32, 24, 20, 12),
    num_target_only_steps=0,
    ttft_s=0.1,
    e2el_s=0.9,
    draft_s=0.2,
    verify_s=0.6,
    wire_bytes=4000,
)
OURS_RUN = SystemRun(list(range(128)), 0.1, 0.9, STATS, 0, num_first_tokens=4)


def rows() -> list[Row]:
    runs = {name: [PeerRun(list(range(128)), 0.1, 2.7)] * NUM_PROMPTS for name in ("hf_assisted", "hf_plain")}
    runs["hf_prompt_lookup"] = runs["hf_plain"]
    runs[OURS] = [OURS_RUN] * NUM_PROMPTS
    runs[TARGET_ONLY] = [replace(OURS_RUN, e2el_s=1.8)] * NUM_PROMPTS
    return latency._rows(runs, [RoundTimes(0.003, 0.014, 0.0005)] * NUM_PROMPTS, quick=False)


def test_every_agreed_row_is_there_with_its_ratio() -> None:
    answered = {row.row: row for row in rows() if row.row is not None}
    assert {number: (row.ratio_to, row.required) for number, row in answered.items()} == {
        0: ("hf_assisted", 1.0),
        1: ("hf_assisted", 1.8),
        2: ("hf_plain", 3.0),
        3: ("ideal", 0.9),
        14: ("hf_plain", 1.5),
    }
    assert answered[1].value == pytest.approx(3.0)
    assert answered[14].value == pytest.approx(1.5)
    # 124 tokens in 0.8 s against 128/40 tokens in 17.5 ms.
    assert answered[3].value == pytest.approx(155 / (3.2 / 0.0175))


def test_acceptance_is_told_by_position_and_a_round_is_split_without_rest() -> None:
    made = rows()
    acceptance = {row.x: row.value for row in made if row.metric == "acceptance"}
    assert acceptance == pytest.approx({1: 0.8, 2: 0.75, 3: 20 / 24, 4: 0.6})
    split = [row.value for row in made if row.metric == "round_split_ms"]
    assert sum(split) == pytest.approx(0.9 / 40 * 1e3)


def test_a_sweep_is_plotted_as_lines_and_the_rest_as_bars(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = {path.name for path in write_plots(rows(), tmp_path)}
    assert {
        "latency_acceptance_by_position.png",
        "latency_round_split_ms.png",
        "latency_tokens_per_s_ratio.png",
    } <= names
