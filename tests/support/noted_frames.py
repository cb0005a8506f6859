"""How many items each frame has that leaves over a lane. Called by tests of links."""

from __future__ import annotations

import pytest

from specdec.rpc import lane_stream


def noted_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Items of each frame from now on, in order."""
    frames: list[int] = []
    join_items = lane_stream.join_items

    def noted(items: list[bytes]) -> bytes:
        frames.append(len(items))
        return join_items(items)

    monkeypatch.setattr(lane_stream, "join_items", noted)
    return frames
