"""The file of timelines: whole lines, and no request that fails for it."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from coordinator.round.timeline import RoundTimeline, TimelineLog


def test_where_there_is_no_room_rounds_are_missing_and_nothing_fails(caplog: pytest.LogCaptureFixture) -> None:
    log = TimelineLog(Path("/dev/full"))
    for round_id in range(200):
        log.write("s", round_id, 4, RoundTimeline(began_s=1.0))
    log.flush()
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "timeline lost rounds: cannot write the file: No space left on device"
    ]


def test_no_half_of_a_line_stays_behind(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    log = TimelineLog(path)
    log.write("before", 0, 4, RoundTimeline(began_s=1.0))
    log.flush()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        log.write("lost", 0, 4, RoundTimeline(began_s=1.0))
        log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.write("after", 0, 4, RoundTimeline(began_s=1.0))
    log.close()
    assert [json.loads(line)["session_id"] for line in path.read_text().splitlines()] == ["before", "after"]
