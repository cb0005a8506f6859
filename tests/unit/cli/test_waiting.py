"""A wait without a terminal shows a line at once and then one every few seconds."""

from __future__ import annotations

import pytest

from specdec.cli.waiting import LINE_INTERVAL_S, Waiting


def test_a_line_at_once_and_every_few_seconds_shows_the_current_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 100.0
    with Waiting(lambda: now_s) as waiting:
        for _ in range(100):
            waiting.show(f"step {now_s:.1f}")
            now_s += LINE_INTERVAL_S / 40
    assert capsys.readouterr().err.splitlines() == [
        "starting (0 s): step 100.0",
        "starting (5 s): step 105.0",
        "starting (10 s): step 110.0",
    ]
