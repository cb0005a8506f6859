"""The heartbeat by which a replica stays in the registry.

Not here: the registry (`redis_store`), choosing a replica (the coordinator's pools). Called by draft and target
services.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from specdec.errors import Unavailable
from specdec.state.store import ReplicaRecord, ReplicaRegistry
from specdec.types import EngineInfo

DEFAULT_HEARTBEAT_TTL_S = 10.0

_log = logging.getLogger(__name__)


class Heartbeat:
    """Keeps one replica in the registry while the context is open.

    Publishes at once on entry, then every third of the TTL; a registry that cannot be reached is tried again until it
    answers, so a Redis restart costs at most a third of the TTL. A replica that has spent minutes on loading its model
    is not given up for one that is away just then. On exit the replica is taken out of the registry.
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        *,
        address: str,
        describe: Callable[[], EngineInfo],
        ttl_s: float = DEFAULT_HEARTBEAT_TTL_S,
    ) -> None:
        """
        Args:
            registry: stays the caller's, who closes it after this.
            address: host:port other services dial.
            describe: called for every beat, so that load and draining are as of then.
            ttl_s: how long the registry believes one beat.
        """
        self._registry = registry
        self._address = address
        self._describe = describe
        self._ttl_s = ttl_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Publishes the first beat, if that can be now, and begins the rest.

        Raises:
            InvalidRequest: the address is none that others can dial.
        """
        try:
            await self.beat()
        except Unavailable as error:
            _log.warning("not in the registry yet: %s", error)
        self._task = asyncio.create_task(self._run(), name=f"heartbeat {self._address}")

    async def beat(self) -> None:
        """Publishes now, for a change that should not wait (draining). Raises Unavailable."""
        await self._registry.publish(ReplicaRecord(self._address, self._describe()), ttl_s=self._ttl_s)

    async def close(self) -> None:
        """Stops beating and leaves the registry, which forgets by TTL if it cannot be reached. Idempotent."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        try:
            await self._registry.remove(self._describe().replica_id)
        except Unavailable as error:
            _log.warning("could not leave the registry: %s", error)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                await self.beat()
            except Unavailable as error:
                _log.warning("missed a heartbeat: %s", error)
            except Exception:
                # A replica that serves must not vanish from the registry over a fault that may pass.
                _log.exception("missed a heartbeat")
