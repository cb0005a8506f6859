"""The state of the device loop, for metrics and load reports: calls that wait and run, prompt tokens ahead, KV blocks.

`device_loop` calls this in the thread of a scrape. It copies the lists that the device thread changes, and takes no
lock: a number may be one step old.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.contract.engine_api import EngineStats
from specdec.engine.loop.job import Job
from specdec.engine.schedule.scheduler import is_short
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.calls import Calls


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a replica."""

    kv_usage: float
    """Share of KV blocks of sessions with a call now or within the last second, 0..1."""
    num_sessions: int
    """Number of sessions with KV."""
    num_running: int
    """Number of sessions with a running or recent call."""
    draining: bool
    """True while calls are refused, because the replica is closing or its device is stalled."""
    num_steps: int
    """Number of steps that have ended."""
    step_limit_s: float
    """Longest time in which a step should end now, in seconds; 0 if unknown."""


def read_stats(calls: Calls[Job, Any], num_arrived: int, state_bytes: int, *, is_stalled: bool) -> EngineStats:
    """Return the state of the loop.

    Args:
        calls: calls that were admitted; preemptible ones, which no client waits for, are left out.
        num_arrived: number of calls that are not admitted yet.
        state_bytes: bytes of a slot for recurrent states.
        is_stalled: True while the running step far exceeds its time limit.
    """
    jobs = [job for job in list(calls.jobs.values()) if not job.call.preemptible]
    num_running = sum(job.has_run for job in jobs)
    blocks, slots = calls.sessions.blocks, calls.sessions.states or BlockManager(0)
    num_own_slots = calls.sessions.num_own_slots
    return EngineStats(
        num_waiting_calls=num_arrived + len(jobs) - num_running,
        num_running_calls=num_running,
        num_backlog_tokens=sum(job.num_pending for job in jobs if not is_short(job)),
        num_kv_blocks=blocks.num_blocks,
        num_active_kv_blocks=calls.sessions.num_active_blocks,
        num_held_kv_blocks=blocks.num_held,
        num_free_kv_blocks=blocks.num_free,
        num_kv_exhausted=calls.num_exhausted,
        num_preemptions=calls.sessions.num_preemptions,
        num_replayed_tokens=calls.sessions.num_replayed_tokens,
        num_withdrawn_snapshots=calls.sessions.num_withdrawn_snapshots,
        session_state_bytes=num_own_slots * state_bytes,
        snapshot_state_bytes=max(0, slots.num_blocks - slots.num_free - num_own_slots) * state_bytes,
        is_stalled=is_stalled,
    )
