"""The heartbeat that keeps a replica or a coordinator in the registry (`redis_store`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import Unavailable
from specdec.state.store import ReplicaRecord, ReplicaRegistry

DEFAULT_HEARTBEAT_TTL_S = 10.0

_log = logging.getLogger(__name__)


class Heartbeat:
    """Keeps one replica in the registry while the context is open.

    It publishes the replica on entry and then every third of the TTL. If the registry cannot be reached, it tries again
    until it can, so a Redis restart costs at most a third of the TTL, and a replica that has loaded its model for
    minutes does not end because Redis is away at that moment. On exit the replica is removed from the registry.
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
            registry: the caller closes it after this.
            address: host:port that other services dial.
            describe: called for every beat, so that load and draining are current.
            ttl_s: time after a beat at which the entry expires.
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
        """Publish the first beat and start the others; an unavailable registry is tried again later.

        Raises:
            InvalidRequest: other services cannot dial the address.
        """
        try:
            await self.beat()
        except Unavailable as error:
            _log.warning("cannot register yet, trying again: %s", error)
        self._task = asyncio.create_task(self._run(), name=f"heartbeat {self._address}")

    async def beat(self) -> None:
        """Publish at once, for an urgent change such as draining. Raises Unavailable."""
        await self._registry.publish(ReplicaRecord(self._address, self._describe()), ttl_s=self._ttl_s)

    async def close(self) -> None:
        """Stop beating and remove the replica; if the registry is unavailable, the entry expires. Idempotent."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        try:
            await self._registry.remove(self._describe().replica_id)
        except Unavailable as error:
            _log.warning("cannot remove this replica from the registry, its entry will expire: %s", error)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                await self.beat()
            except Unavailable as error:
                _log.warning("missed a heartbeat: %s", error)
            except Exception:
                # An error that may be temporary must not remove a serving replica from the registry.
                _log.exception("missed a heartbeat")
