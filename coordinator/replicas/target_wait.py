"""The wait for a lost target replica, so that a stream outlasts a restart of its target.

A request waits while no target replica lives, or while one of its session's model is away, at most for the setting
`target_wait_s`. Where a live target serves another model, and none of the session's model is known, it fails at once.
It also fails if a target still sends heartbeats to the registry but does not answer this coordinator: the client may
then resume at another coordinator. A client can see the wait in `GetInfo`, which lists no live target. `TargetCalls`
waits in the middle of a stream, `TurnPreparer` before the first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from coordinator.replicas.pool import ReplicaPools
from specdec.contract.errors import Unavailable

#: A target that is registered although it has not answered for this long lives, and is cut off from this coordinator.
#: The registry forgets a dead one 10 s after its last heartbeat.
UNREACHABLE_S = 15.0

#: Interval at which a wait looks at what no event tells.
_LOOK_INTERVAL_S = 1.0


async def wait_for_any_target(pools: ReplicaPools) -> None:
    """Return once a target replica lives. The wait counts from when the coordinator lost its last one.

    Raises:
        Unavailable: none came back within the setting, or none can come back.
    """
    await wait_for_target(pools, lambda: pools.is_ready, "", pools.targets_lost_at_s)


async def wait_for_target(
    pools: ReplicaPools, is_back: Callable[[], bool], model: str, lost_at_s: float, *, adapter: str = ""
) -> None:
    """Return once a session has a target replica again.

    Args:
        pools: replicas of the coordinator.
        is_back: whether the session has a target replica.
        model: fingerprint of the session's model.
        lost_at_s: time at which the session lost its target, by `time.monotonic`.
        adapter: name of the model's adapter; "" for none.

    Raises:
        Unavailable: none came back within the setting, or none can come back.
    """
    while not is_back():
        if not pools.target_wait_s:
            raise Unavailable("no target replica can be reached")
        _check_may_return(pools, model, adapter)
        left_s = lost_at_s + pools.target_wait_s - time.monotonic()
        if left_s <= 0.0:
            raise Unavailable(f"no target replica came back within {pools.target_wait_s:g} s (--target-wait-s)")
        await pools.next_target(min(left_s, _LOOK_INTERVAL_S))


def none_serves(adapter: str) -> str:
    """Return what is wrong if no target replica serves a session's model; `adapter` is the name of its adapter."""
    if adapter:
        return (
            f"no target replica serves the session's adapter {adapter} now: its server lacks it, has another one under "
            "the name, or cannot be reached"
        )
    return "no target replica that serves the session's model can be reached"


def _check_may_return(pools: ReplicaPools, model: str, adapter: str) -> None:
    """Raise Unavailable if no wait can help."""
    lost = [replica for replica in pools.targets() if not replica.takes_sessions]
    if pools.is_ready and not any(replica.serves(model) for replica in lost):
        raise Unavailable(none_serves(adapter))
    now_s = time.monotonic()
    for replica in lost:
        if not replica.is_alive and pools.is_registered(replica) and now_s - replica.lost_at_s > UNREACHABLE_S:
            raise Unavailable(
                f"target replica {replica.address} is registered but has not answered this coordinator for more than "
                f"{UNREACHABLE_S:g} s"
            )
