"""Captured steps without a device: what would be recorded is called again instead.

Everything of `specdec.engine.captured` but the recording itself runs then. Called by tests.
"""

from __future__ import annotations

from collections.abc import Callable


class DirectCapture:
    """A `specdec.engine.capture.Capture` that counts."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        step()  # as a recording does, to warm up

        def replay() -> None:
            self.num_replays += 1
            step()

        return replay
