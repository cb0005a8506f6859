"""Who serves: the replica registry on Redis, and the heartbeat by which a replica stays in it.

Not here: choosing a replica (the coordinator's pools). Called by draft and target services (`Heartbeat`) and by the
coordinator (`replicas`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, fields
from types import TracebackType
from typing import Self

from specdec.errors import Unavailable
from specdec.state.connection import RedisConnection
from specdec.state.keys import replica_keys
from specdec.state.store import ReplicaRecord, ReplicaRegistry
from specdec.types import EngineInfo

ROLES = ("draft", "target")
DEFAULT_HEARTBEAT_TTL_S = 10.0

_log = logging.getLogger(__name__)


class RedisReplicaRegistry:
    """`ReplicaRegistry` on Redis. Expiry is by the server's clock; reading cleans up what has expired."""

    def __init__(self, url: str) -> None:
        """Connects lazily. Raises InvalidRequest when the URL is not redis://, rediss://, unix:// or memory://."""
        self._connection = RedisConnection(url)

    async def publish(self, record: ReplicaRecord, *, ttl_s: float) -> None:
        engine = record.engine
        args: list[str | bytes | int] = [engine.replica_id, _encode_record(record), max(1, round(ttl_s * 1000))]
        await self._connection.run_script("publish", replica_keys(engine.role), args)

    async def remove(self, replica_id: str) -> None:
        for role in ROLES:
            await self._connection.run_script("remove", replica_keys(role), [replica_id])

    async def replicas(self, role: str) -> list[ReplicaRecord]:
        """See `ReplicaRegistry.replicas`. A record that this version cannot read is left out and logged."""
        records = []
        for text in await self._connection.run_script("replicas", replica_keys(role)):
            try:
                records.append(_decode_record(text))
            except (KeyError, TypeError, ValueError) as error:
                _log.warning("left out an unreadable %s replica: %s", role, error)
        return records

    async def close(self) -> None:
        await self._connection.close()


def open_registry(url: str) -> ReplicaRegistry:
    """Opens the registry behind a URL; connects lazily. Raises InvalidRequest when the URL has another form."""
    return RedisReplicaRegistry(url)


class Heartbeat:
    """Keeps one replica in the registry while the context is open.

    Publishes at once on entry, then every third of the TTL; a registry that cannot be reached is tried again until it
    answers, so a Redis restart costs at most a third of the TTL. On exit the replica is taken out of the registry.
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
        """Publishes the first beat and begins the rest. Raises Unavailable when the registry cannot be reached."""
        await self.beat()
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


def _encode_record(record: ReplicaRecord) -> str:
    return json.dumps({"address": record.address, "engine": asdict(record.engine)}, separators=(",", ":"))


def _decode_record(text: bytes) -> ReplicaRecord:
    """Reads a record of this or a newer version: fields it does not know are left out."""
    record = json.loads(text)
    known = {field.name for field in fields(EngineInfo)}
    engine = {name: value for name, value in record["engine"].items() if name in known}
    engine["eos_token_ids"] = tuple(engine["eos_token_ids"])
    return ReplicaRecord(str(record["address"]), EngineInfo(**engine))
