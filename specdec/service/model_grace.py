"""The time for which a target that leaves still answers the turns of its model.

Only a replica of the same model can continue a turn, and of an adapter only one that has it too. The last one that
leaves, as in an update to another model, would end all turns of its model in the middle. So it stays while such turns
are open, at most for a grace time, and takes no new sessions meanwhile. Where other registered replicas serve the model
with all its adapters, the turns continue there, and it goes at once. Where no coordinator is registered, as when the
whole system stops, it waits for turns that run and not for those that were interrupted. Called by `lifecycle`;
`replica_main` builds it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import SpecdecError
from specdec.rpc.open_turns import CALLED_WITHIN_S, OpenTurns
from specdec.state.live_coordinators import COORDINATOR
from specdec.state.store import ReplicaRegistry

#: Interval at which turns and registry are looked at.
_LOOK_S = 0.25

#: Time until every coordinator has learned that a replica leaves. Until then it may choose this model for a new turn.
_KNOWN_AFTER_S = 2.5

_log = logging.getLogger(__name__)


class ModelGrace:
    """The wait of one replica for the turns of its model."""

    def __init__(
        self, registry: ReplicaRegistry, describe: Callable[[], EngineInfo], turns: OpenTurns, grace_s: float
    ) -> None:
        """
        Args:
            registry: where the other services are registered.
            describe: returns the description of this replica.
            turns: the turns that need this replica.
            grace_s: longest wait.
        """
        self._registry, self._describe, self._turns, self._grace_s = registry, describe, turns, grace_s

    async def wait(self) -> None:
        """Return once no turn needs this replica, another one serves its model, or the grace time is over."""
        began_s, has_logged, own = time.monotonic(), False, self._describe()
        while (waited_s := time.monotonic() - began_s) < self._grace_s:
            others = await self._registered(own.role)
            if own.models.keys() <= {fingerprint for other in others for fingerprint in other.models}:
                return
            num_open = await self._num_open()
            if not num_open and (not others or waited_s >= _KNOWN_AFTER_S):
                return
            if num_open and not has_logged:
                has_logged = True
                _log.info("answering the turns of this model", extra={"turns": num_open, "grace_s": self._grace_s})
            await asyncio.sleep(_LOOK_S)
        _log.warning("turns of this model have not ended", extra={"turns": await self._num_open()})

    async def _num_open(self) -> int:
        """Return the number of turns that need this replica."""
        if await self._registered(COORDINATOR):
            return self._turns.num_open(self._grace_s)
        return self._turns.num_running(CALLED_WITHIN_S)

    async def _registered(self, role: str) -> list[EngineInfo]:
        """Return the other services of a role that do not drain; none while the store cannot be reached."""
        try:
            records = await self._registry.replicas(role)
        except SpecdecError as error:
            _log.warning("cannot look for another %s: %s", role, error)
            return []
        own, engines = self._describe().incarnation, [record.engine for record in records]
        return [engine for engine in engines if not engine.draining and engine.incarnation != own]
