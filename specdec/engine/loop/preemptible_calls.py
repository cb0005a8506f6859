"""Preemptible calls: they run while no other call runs or is expected, and end when one arrives.

A normal call therefore waits at most for the running step, which `steps` plans as short as if a call were expected. A
preemptible call takes KV blocks from the spare part of the pool alone, so no session loses KV for it.

`draft_service.drafting` makes such calls. Called by `device_loop` and `call_desk` on the device thread.
"""

from __future__ import annotations

from typing import Any

from specdec.contract.errors import ResourceExhausted
from specdec.engine.sessions.block_manager import blocks_for
from specdec.engine.sessions.calls import Call, Calls

#: 1 / _SPARE_SHARE of the KV pool is reserved for normal calls.
_SPARE_SHARE = 4


class PreemptibleCalls:
    """Admission and end of preemptible calls. Device thread only."""

    def __init__(self, calls: Calls[Any, Any]) -> None:
        self._calls = calls

    def require_idle(self, call: Call, num_expected: int) -> None:
        """Refuse a preemptible call while the replica has other work.

        Args:
            call: the preemptible call.
            num_expected: number of sessions that may call at any moment.

        Raises:
            ResourceExhausted: other calls run or are expected, or KV blocks are short (REPLICA_BUSY).
        """
        blocks = self._calls.sessions.blocks
        spare = blocks.num_available - blocks_for(call.max_kv_len)
        if self._calls.jobs or num_expected or spare < blocks.num_blocks // _SPARE_SHARE:
            raise _busy()

    def preempt(self) -> None:
        """End the preemptible calls if another call has arrived."""
        jobs = list(self._calls.jobs.values())
        yielding = [job for job in jobs if job.call.preemptible]
        if len(yielding) < len(jobs):
            for job in yielding:
                self._calls.end(job, _busy())


def _busy() -> ResourceExhausted:
    return ResourceExhausted("this replica is busy with other calls", reason="REPLICA_BUSY")
