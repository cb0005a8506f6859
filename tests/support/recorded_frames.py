"""Records how many items each frame has that a link sends. Called by tests of links."""

from __future__ import annotations

import pytest

from specdec.rpc import replica_stream


def recorded_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of items of every later frame is added, in order."""
    frames: list[int] = []
    join_items = replica_stream.join_items

    def recorded(items: list[bytes]) -> bytes:
        frames.append(len(items))
        return join_items(items)

    monkeypatch.setattr(replica_stream, "join_items", recorded)
    return frames
