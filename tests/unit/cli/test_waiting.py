"""What a wait shows where there is no terminal: a line every few seconds, none for a short wait."""

from __future__ import annotations

import pytest

from specdec.cli.waiting import LINE_INTERVAL_S, Waiting


def test_a_line_every_few_seconds_says_what_is_waited_for_by_then(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 100.0
    with Waiting(lambda: now_s) as waiting:
        for _ in range(100):
            waiting.show(f"step {now_s:.1f}")
            now_s += LINE_INTERVAL_S / 40
    assert capsys.readouterr().err.splitlines() == [
        "starting (5 s): step 105.0",
        "starting (10 s): step 110.0",
    ]


def test_a_short_wait_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    with Waiting(lambda: now_s) as waiting:
        waiting.show("a")
        now_s += LINE_INTERVAL_S * 0.9
        waiting.show("b")
    assert capsys.readouterr().err == ""
