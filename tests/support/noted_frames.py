"""How many items each frame has that leaves over a lane. Called by tests of links."""

from __future__ import annotations

import pytest

from specdec.rpc import unix_socket_stream


def noted_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Items of each frame from now on, in order."""
    frames: list[int] = []
    join_items = unix_socket_stream.join_items

    def noted(items: list[bytes]) -> bytes:
        frames.append(len(items))
        return join_items(items)

    monkeypatch.setattr(unix_socket_stream, "join_items", noted)
    return frames
