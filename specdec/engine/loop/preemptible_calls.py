"""Calls that yield: they run while no other call is in work or expected, and end where one comes.

So a call that somebody waits for waits at most for the step that runs when it comes, and that step is no longer than
one that it may meet anyway (`steps` plans it as if somebody were expected). What a yielding call would need of the KV
pool is taken from its reserve alone: no session loses KV for it.

Not here: what such a call asks (`draft_service.scoring`). Called by `device_loop` on the device thread.
"""

from __future__ import annotations

from typing import Any

from specdec.engine.sessions.block_manager import blocks_for
from specdec.engine.sessions.calls import Call, Calls
from specdec.errors import ResourceExhausted

#: One part in this many of the KV pool is left to those who are waited for.
_SPARE_SHARE = 4


class PreemptibleCalls:
    """Lets yielding calls in, and ends them. Device thread only."""

    def __init__(self, calls: Calls[Any, Any]) -> None:
        self._calls = calls

    def require_idle(self, call: Call, num_expected: int) -> None:
        """Refuses a yielding call while the replica has other work.

        Args:
            call: that yields.
            num_expected: sessions that may call at any moment.

        Raises:
            ResourceExhausted: it has (REPLICA_BUSY).
        """
        blocks = self._calls.sessions.blocks
        spare = blocks.num_available - blocks_for(call.max_kv_len)
        if self._calls.jobs or num_expected or spare < blocks.num_blocks // _SPARE_SHARE:
            raise _busy()

    def preempt(self) -> None:
        """Ends the yielding calls where another one has come."""
        jobs = list(self._calls.jobs.values())
        yielding = [job for job in jobs if job.call.preemptible]
        if len(yielding) < len(jobs):
            for job in yielding:
                self._calls.end(job, _busy())


def _busy() -> ResourceExhausted:
    return ResourceExhausted("this replica is needed by others", reason="REPLICA_BUSY")
