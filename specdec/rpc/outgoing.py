"""Collect what a replica writes on one stream: replies of calls, and steps of runs between two replies.

`specdec.rpc.frames` and `specdec.rpc.unix_socket_server` own one each; the `servicer` of the target adds the steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from specdec.rpc.framing import FRAME_BYTES, MAX_FRAME_ITEMS
from specdec.rpc.stages import note_sent

#: Raises the limit of a run: the largest number of tokens of its session, and the committed one.
Renew = Callable[[int, int], None]


class FrameParts(NamedTuple):
    """The contents of the next frame. Steps are older than replies."""

    steps: list[tuple[int, Any]]
    """Call ids and answers of the steps of runs."""
    replies: list[Any]


class Outgoing:
    """Unwritten replies and steps, and the runs of a stream. Use from one event loop."""

    def __init__(self, wake: Callable[[], None], model: str = "") -> None:
        """`wake` is called when there is something to write; `model` is that of the stream."""
        self.wake = wake
        self.model = model
        """Fingerprint of the model that answers the stream's calls."""
        self.runs: dict[int, Renew] = {}
        """The open runs of the stream by call id."""
        self._steps: list[tuple[int, Any]] = []
        self._replies: deque[tuple[Any, float]] = deque()

    def __bool__(self) -> bool:
        return bool(self._steps or self._replies)

    @property
    def num_replies(self) -> int:
        return len(self._replies)

    def put_step(self, call_id: int, answer: Any) -> None:
        """Add the answer of a run's step."""
        self._steps.append((call_id, answer))
        self.wake()

    def put_reply(self, reply: Any, received_s: float) -> None:
        """Add a reply, with the time at which the frame of its request had been read."""
        self._replies.append((reply, received_s))

    def renew(self, call_id: int, until: int, committed_len: int) -> None:
        """Raise the limit of a run; no effect on a call that is not one, or has ended."""
        if (renew := self.runs.get(call_id)) is not None:
            renew(until, committed_len)

    def take(self) -> FrameParts:
        """Take the parts of the next frame."""
        steps, self._steps = self._steps[:MAX_FRAME_ITEMS], self._steps[MAX_FRAME_ITEMS:]
        replies: list[Any] = []
        size, now_s = 0, time.monotonic()
        while self._replies and not self._steps and len(replies) + len(steps) < MAX_FRAME_ITEMS:
            reply, received_s = self._replies[0]
            size += reply.ByteSize()
            if replies and size > FRAME_BYTES:
                break
            self._replies.popleft()
            note_sent(reply, now_s - received_s)
            replies.append(reply)
        return FrameParts(steps, replies)
