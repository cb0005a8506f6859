"""A wait without a terminal shows a line at once and one for each change, at most one every few seconds."""

from __future__ import annotations

import logging

import pytest

from specdec.cli.progress import LINE_INTERVAL_S, LastMessage, Waiting
from specdec.engine.model.start_progress import logging_shares


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


def test_what_does_not_change_is_one_line_however_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    with Waiting(lambda: now_s) as waiting:
        for stage in ["checking a"] * 200 + ["checking a: 10%"] * 200 + ["checking a: 20%"] * 200:
            waiting.show(stage)
            now_s += 1.0
    assert capsys.readouterr().err.splitlines() == [
        "starting (0 s): checking a",
        "starting (200 s): checking a: 10%",
        "starting (400 s): checking a: 20%",
    ]


def test_what_other_lines_say_already_is_not_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    with Waiting(lambda: now_s) as waiting:
        for number in range(20):
            waiting.show(f"target-0: step {number}, replicas: importing", line="replicas: importing" if number else "")
            now_s += LINE_INTERVAL_S
    assert capsys.readouterr().err == f"starting ({LINE_INTERVAL_S:.0f} s): replicas: importing\n"


def test_the_last_message_of_a_logger_is_held_while_the_context_is_open() -> None:
    logger = logging.getLogger("specdec.checkpoints.of_this_test")
    with LastMessage("specdec.checkpoints") as held:
        assert held.text == ""
        logger.info("converting %s", "m.gguf")
        assert held.text == "converting m.gguf"
    logger.info("later")
    assert held.text == "converting m.gguf"


def test_a_long_load_of_weights_is_a_line_for_each_tenth_and_a_quick_one_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for seconds_each, lines in ((0.001, 0), (1.0, 9)):
        caplog.clear()
        shares: list[float] = []
        now = [100.0]
        note = logging_shares(shares.append, lambda now=now: now[0])
        with caplog.at_level("INFO", logger="specdec.engine.model.start_progress"):
            for number in range(1, 101):
                note(number / 100)
                now[0] += seconds_each
        assert len(shares) == 100
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == lines
        assert told[:1] == (["loading weights: 10%"] if lines else [])
