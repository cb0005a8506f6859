"""A run as the coordinator sees it: the answers of its steps, in order, and the renewals of its limit.

`specdec.rpc.client` opens runs, each on a `specdec.rpc.replica_stream.ReplicaStream`; `coordinator/round/target_calls`
takes their steps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from specdec.contract.errors import Internal
from specdec.rpc.framing import encode_renewal
from specdec.rpc.replica_stream import RunCall


class OpenRun:
    """A run, in which the replica answers step after step. Use from one event loop."""

    def __init__(self, begin: Callable[[], RunCall]) -> None:
        """`begin` sends the run's call. It is sent again, another way, if its Unix socket cannot be reached."""
        self._begin = begin
        self._steps: deque[tuple[Any, float]] = deque()
        """Answers that were not taken yet, each with the time at which its frame had been read."""
        self._wake: asyncio.Future[None] | None = None
        self.heard_s = 0.0
        """Time at which the frame of the answer that `next` returned last had been read, by `time.monotonic`."""
        self._has_ended = False
        """True once the last answer was taken."""
        self._until = 0
        """Limit of the run; the answer has its last token."""
        self._send()

    @property
    def has_ended(self) -> bool:
        """True once `next` has returned the last answer, or raised."""
        return self._has_ended

    async def next(self) -> Any:
        """Return the answer of the next step, also if it came before.

        Raises:
            SpecdecError: the replica's error, or the stream's; the run has ended.
        """
        while not self._steps:
            if not self._pending.answer.done():
                self._wake = self._stream.event_loop.create_future()
                await self._wake
            elif self._stream.is_unreachable_socket:
                self._send()
            else:
                break
        if self._steps:
            answer, self.heard_s = self._steps.popleft()
            return answer
        self.close()
        self.heard_s = self._pending.wire.heard_s
        return self._pending.answer.result()

    def renew(self, until: int, committed_len: int) -> None:
        """Raise the limit of the run; no effect once its last answer has arrived."""
        self._until = max(self._until, until)
        if not (self._pending.answer.done() or self._stream.closed):
            renewal = encode_renewal(self._call_id, until, committed_len)
            self._pending.wire.num_bytes += len(renewal)
            self._stream.renew(renewal)

    def close(self) -> None:
        """Stop waiting for the run; its further steps are dropped. Idempotent."""
        self._has_ended = True
        self._stream.forget(self._call_id)

    def _send(self) -> None:
        self._stream, self._call_id, self._pending = self._begin()
        self._until = self._pending.request.run.until
        self._pending.on_step = self._take
        self._pending.answer.add_done_callback(self._note_end)

    def _take(self, answer: Any) -> None:
        # A step decides one token more than the session had. The last one, at the limit, has to be the answer.
        if answer.kv_len + 1 >= self._until:
            self._pending.answer.set_exception(Internal(f"a run went on beyond its limit of {self._until} tokens"))
            return
        self._steps.append((answer, self._pending.wire.heard_s))
        self._notify()

    def _note_end(self, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled():
            answer.exception()  # asyncio complains of an error that was never read
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        self._wake = None
