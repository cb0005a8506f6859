"""The file of timelines holds whole lines, and its errors fail no request."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from coordinator.round.timeline import RoundTimeline, TimelineLog
from specdec.contract.tenant import DEFAULT_TENANT, SessionKey


def test_rounds_that_do_not_fit_on_the_disk_are_lost_without_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    log = TimelineLog(Path("/dev/full"))
    for round_id in range(200):
        log.write(SessionKey(DEFAULT_TENANT, "s"), round_id, 4, RoundTimeline(began_s=1.0))
    log.flush()
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "timeline lost rounds: cannot write the file: No space left on device"
    ]


def test_no_partial_line_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    log = TimelineLog(path)
    log.write(SessionKey(DEFAULT_TENANT, "before"), 0, 4, RoundTimeline(began_s=1.0))
    log.flush()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        log.write(SessionKey(DEFAULT_TENANT, "lost"), 0, 4, RoundTimeline(began_s=1.0))
        log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.write(SessionKey(DEFAULT_TENANT, "after"), 0, 4, RoundTimeline(began_s=1.0))
    log.close()
    assert [json.loads(line)["session_id"] for line in path.read_text().splitlines()] == ["before", "after"]
