"""Detection of target replicas that are stalled as a whole, so that their sessions move to another replica.

A verification has no deadline, because the prefill of a long prompt may take minutes. A replica notices a hanging
device by itself, from the time of its steps (`specdec.engine.loop.watchdog`), and fails its calls. Three cases remain:
a stopped process, a lost machine, and a replica that describes itself but answers no call. So a replica with an
unanswered call is requested to describe itself, which takes its event loop no time, whatever its device does. If no
answer comes, or no step ends there within the replica's own limit, the calls are broken off, and each of their sessions
continues on another replica. Without another replica they wait until the link's keepalive gives up.

`watch_targets` runs beside `ReplicaPools.watch`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import TargetReplica
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import Unavailable

#: Interval between two looks at the pending calls. A replica is checked for a call that was pending at the look before.
LOOK_INTERVAL_S = 0.5

#: Longest time that a replica may take to describe itself, in parts, so that a pause of this process costs one part.
ANSWER_TIMEOUT_S = 1.5
_NUM_PARTS = 6


class _Stall(NamedTuple):
    """The time since which a call is the oldest of its replica while no step has ended there."""

    call: Any
    num_steps: int
    since_s: float


async def watch_targets(pools: ReplicaPools) -> None:
    """Watch the pending calls of all targets forever."""
    checks: dict[TargetReplica, asyncio.Task[None]] = {}
    seen: dict[TargetReplica, Any] = {}
    stalls: dict[TargetReplica, _Stall] = {}
    try:
        while True:
            await pools.activity.pause(LOOK_INTERVAL_S)
            for replica in [replica for replica, task in checks.items() if task.done()]:
                checks.pop(replica).result()
            oldest = {replica: replica.link.oldest_pending for replica in pools.targets()}
            for replica, call in oldest.items():
                if call is not None and call is seen.get(replica) and replica not in checks:
                    checks[replica] = asyncio.create_task(_check(replica, call, pools, stalls))
            seen = oldest
            for replica in [replica for replica, stall in stalls.items() if oldest.get(replica) is not stall.call]:
                del stalls[replica]
    finally:
        for task in checks.values():
            task.cancel()
        await asyncio.gather(*checks.values(), return_exceptions=True)


async def _check(replica: TargetReplica, call: Any, pools: ReplicaPools, stalls: dict[TargetReplica, _Stall]) -> None:
    """Break the replica's calls off if it is stalled and another replica can serve its sessions."""
    answer = asyncio.create_task(replica.link.info())
    try:
        for _ in range(_NUM_PARTS):
            await asyncio.wait({answer}, timeout=ANSWER_TIMEOUT_S / _NUM_PARTS)
        reason = _fault(answer)
        stall = "" if reason else _stall_of(replica, call, answer.result(), stalls)
    finally:
        answer.cancel()
    if (reason or stall) and _has_other(replica, pools):
        error = Unavailable(f"{replica.address}: {reason or stall}")
        (replica.stall if stall else replica.fail)(error)
        replica.link.break_off(error.message)


def _fault(answer: asyncio.Task[Any]) -> str:
    if not answer.done():
        return f"the replica is stalled: it did not describe itself within {ANSWER_TIMEOUT_S:g} s"
    error = answer.exception()
    return "" if error is None else f"the replica failed to describe itself: {error}"


def _stall_of(replica: TargetReplica, call: Any, info: EngineInfo, stalls: dict[TargetReplica, _Stall]) -> str:
    """Return what is wrong with a replica that answers, or ""; remember since when no step has ended there."""
    stall, now_s = stalls.get(replica), time.monotonic()
    if stall is None or stall.call is not call or stall.num_steps != info.num_steps:
        stall = stalls[replica] = _Stall(call, info.num_steps, now_s)
    stalled_s = now_s - stall.since_s
    if not info.step_limit_s or stalled_s <= info.step_limit_s:
        return ""
    return (
        f"the replica's calls are stalled: no step has ended there for {stalled_s:.0f} s, "
        f"its own limit is {info.step_limit_s:.0f} s"
    )


def _has_other(replica: TargetReplica, pools: ReplicaPools) -> bool:
    """Return whether another target can serve the sessions of `replica`."""
    return any(
        other is not replica
        and other.takes_sessions
        and other.info is not None
        and replica.info is not None
        and other.info.model_fingerprint == replica.info.model_fingerprint
        for other in pools.targets()
    )
