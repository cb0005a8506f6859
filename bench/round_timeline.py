"""Suite `latency`: how the time of one stream's round is spent, by the services' own clocks.

A separate system records its rounds (`specdec up --timeline`), so that recording slows no compared system.
`specdec.cli.timeline` defines the stages and draws the picture that this prints.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.rows import Origin, Row
from bench.system import RunningSystem
from bench.workload import GAMMA, NUM_NEW_TOKENS
from specdec.cli.timeline import drawn, pictures_of, read_rounds

SUITE = "latency"
CASE = "deep(18, 0.02), 1 stream, greedy, timed"


def timeline_rows(
    target_dir: Path, draft_dir: Path, prompts: Sequence[list[int]], folder: Path, quick: bool
) -> list[Row]:
    """Runs the prompts once more, prints the picture of the median round, and returns its stages as rows."""
    file = folder / "timeline.jsonl"
    with RunningSystem(target_dir, draft_dir, flags=("--timeline", str(file))) as ours:
        for prompt in prompts:
            ours.run(prompt, max_new_tokens=NUM_NEW_TOKENS, temperature=0.0, gamma=GAMMA)
    picture = pictures_of(read_rounds(file))[0]
    print(drawn(picture))
    row = partial(Row, suite=SUITE, row=None, case=CASE, origin=Origin(), quick=quick, unit="ms")
    return [
        row(system="specdec", metric="timed_round_ms", value=picture.round_ms),
        *(row(system=f"{stage.title}", metric="stage_ms", value=stage.ms)
          for stage in picture.stages),
    ]  # fmt: skip
