"""Patience with steps that a test holds back by a worker's gate.

A held step looks like a hanging device. On a machine under load a test may hold it for longer than the watchdog waits,
and the held calls would fail. Import the fixture into modules that close gates and do not test hanging devices.
"""

from __future__ import annotations

import pytest

from specdec.engine.loop import watchdog


@pytest.fixture(autouse=True)
def held_steps_are_no_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the watchdog wait for as long as a test may take."""
    monkeypatch.setattr(watchdog, "PATIENCE_S", 600.0)
