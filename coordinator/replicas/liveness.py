"""Target replicas that stand still as a whole are left without waiting for them.

A verification has no deadline: a long prompt is prefilled for minutes, and honestly. A device that hangs is noticed by
its own replica, which knows what its steps take (`specdec.engine.loop.watchdog`) and fails its calls. What is left is a
process that is stopped, a machine that is gone, and a replica that is well but for its calls. So a replica with a call
that stays unanswered is asked what it is, which takes its event loop no time whatever its device does; if no answer
comes, or no step ends there within the limit that it gives itself, its calls are broken off, and each of their sessions
goes on at another replica. Without another one they wait, until the link's keepalive gives up.

Not here: connecting and reviving replicas (`pool`), where a session goes (`placement`). Runs beside the pools' watch.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import TargetReplica
from specdec.errors import Unavailable
from specdec.types import EngineInfo

#: Between two looks at which calls are pending. One that was pending at the look before has its replica asked.
LOOK_INTERVAL_S = 0.5

#: How long a replica may take to say what it is, in parts, so that a pause of this process costs it one of them.
ANSWER_TIMEOUT_S = 1.5
_NUM_PARTS = 6


class _Standing(NamedTuple):
    """Since when a call is the oldest of its replica, and no step has ended there."""

    call: Any
    num_steps: int
    since_s: float


async def watch_targets(pools: ReplicaPools) -> None:
    """Looks for ever at the calls that are pending."""
    asking: dict[TargetReplica, asyncio.Task[None]] = {}
    seen: dict[TargetReplica, Any] = {}
    standing: dict[TargetReplica, _Standing] = {}
    try:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            for replica in [replica for replica, task in asking.items() if task.done()]:
                asking.pop(replica).result()
            oldest = {replica: replica.link.oldest_pending for replica in pools.targets()}
            for replica, call in oldest.items():
                if call is not None and call is seen.get(replica) and replica not in asking:
                    asking[replica] = asyncio.create_task(_ask(replica, call, pools, standing))
            seen = oldest
            for replica in [replica for replica, stands in standing.items() if oldest.get(replica) is not stands.call]:
                del standing[replica]
    finally:
        for task in asking.values():
            task.cancel()
        await asyncio.gather(*asking.values(), return_exceptions=True)


async def _ask(
    replica: TargetReplica, call: Any, pools: ReplicaPools, standing: dict[TargetReplica, _Standing]
) -> None:
    """Breaks the replica's calls off unless it answers and moves, or nobody else can take them."""
    answer = asyncio.create_task(replica.link.info())
    try:
        for _ in range(_NUM_PARTS):
            await asyncio.wait({answer}, timeout=ANSWER_TIMEOUT_S / _NUM_PARTS)
        reason = _fault(answer)
        stands_still = "" if reason else _standstill(replica, call, answer.result(), standing)
    finally:
        answer.cancel()
    if (reason or stands_still) and _has_other(replica, pools):
        error = Unavailable(f"{replica.address}: {reason or stands_still}")
        (replica.stall if stands_still else replica.fail)(error)
        replica.link.break_off(error.message)


def _fault(answer: asyncio.Task[Any]) -> str:
    if not answer.done():
        return f"the replica stands still: it did not say what it is within {ANSWER_TIMEOUT_S:g} s"
    error = answer.exception()
    return "" if error is None else f"the replica did not say what it is: {error}"


def _standstill(replica: TargetReplica, call: Any, info: EngineInfo, standing: dict[TargetReplica, _Standing]) -> str:
    """What is wrong with a replica that answers, or ""; remembers since when no step has ended there."""
    stands, now_s = standing.get(replica), time.monotonic()
    if stands is None or stands.call is not call or stands.num_steps != info.num_steps:
        stands = standing[replica] = _Standing(call, info.num_steps, now_s)
    stood_s = now_s - stands.since_s
    if not info.step_limit_s or stood_s <= info.step_limit_s:
        return ""
    return (
        f"the replica's calls stand still: no step has ended there for {stood_s:.0f} s, "
        f"its own limit is {info.step_limit_s:.0f} s"
    )


def _has_other(replica: TargetReplica, pools: ReplicaPools) -> bool:
    """Whether a session of `replica` would find a target elsewhere."""
    return any(
        other is not replica
        and other.takes_sessions
        and other.info is not None
        and replica.info is not None
        and other.info.model_fingerprint == replica.info.model_fingerprint
        for other in pools.targets()
    )
