"""Refuse the first call of a turn where the prompts before it would keep it waiting for too long.

`call_desk` asks before a call enters the gate's queue. The wait is what the prompts that run now still take, alone on
the device, by the scheduler's measurements.
"""

from __future__ import annotations

from collections.abc import Iterable

from specdec.contract.errors import ResourceExhausted
from specdec.engine.loop.job import Job
from specdec.engine.schedule.scheduler import Scheduler, is_short
from specdec.engine.sessions.calls import Call
from specdec.engine.sessions.sequence import Sequence


def require_short_backlog(
    call: Call, sequence: Sequence, running: Iterable[Job], scheduler: Scheduler, max_wait_s: float
) -> None:
    """Check that a call would not wait for longer than `max_wait_s` behind the prompts of running calls.

    Raises:
        ResourceExhausted: it would, and it may be refused (QUEUE_FULL); the error says when to try again.
    """
    if not call.may_refuse or sequence.reserved_len:
        return
    num_tokens = sum(job.num_pending for job in running if not is_short(job))
    wait_s = scheduler.predict_replay_s(num_tokens, 0) if num_tokens else 0.0
    if wait_s > max_wait_s:
        raise ResourceExhausted(
            f"prompts of {num_tokens} tokens wait on this replica, for {wait_s:.1f} s; the limit is {max_wait_s:g} s "
            "(--max-wait-s)",
            retry_after_s=wait_s - max_wait_s,
        )
