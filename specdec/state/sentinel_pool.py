"""Connections to the primary of a service, which Redis Sentinels name. Built by `clients`.

Every connection asks the Sentinels when it connects. They are also asked once a second, because a primary that was
replaced takes writes for seconds more, until the Sentinels make it a replica, and such writes are lost.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool
from redis.exceptions import ConnectionError, RedisError

from specdec.settings.addresses import join_address

#: Pause between two questions for the primary. A lease outlives it, so an owner of sessions moves to the new primary
#: before another one can take them there.
FOLLOW_S = 1.0


class ServiceUnknown(RedisError):
    """No Sentinel monitors the service."""


class PrimaryPool(BlockingConnectionPool):
    """A pool for redis-py's `SentinelManagedConnection`, which calls `get_master_address` to connect."""

    is_master = True
    check_connection = False

    def __init__(self, service: str, sentinels: Sequence[Any], options: dict[str, Any]) -> None:
        """
        Args:
            service: name that the Sentinels monitor the primary under.
            sentinels: clients of the Sentinels; the pool closes them.
            options: options of the connections to the primary.
        """
        super().__init__(**options)
        self.connection_kwargs["connection_pool"] = weakref.proxy(self)
        self._service = service
        self._sentinels = list(sentinels)
        self._primary: tuple[str, int] | None = None
        self._following: asyncio.Task[None] | None = None

    async def get_master_address(self) -> tuple[str, int]:
        """Return host and port of the primary."""
        self._primary = await self._ask_sentinels()
        if self._following is None:
            self._following = asyncio.create_task(self._follow(), name="follow primary")
        return self._primary

    async def ensure_connection(self, connection: Any) -> None:
        """Connect a connection that was taken from the pool, anew if it is to a former primary."""
        if self._primary is not None and (connection.host, connection.port) != self._primary:
            await connection.disconnect()
        await super().ensure_connection(connection)

    async def aclose(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await super().aclose()
        for sentinel in self._sentinels:
            await sentinel.aclose()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                self._primary = await self._ask_sentinels()
            except (RedisError, OSError):
                continue  # the next connection tells why

    async def _ask_sentinels(self) -> tuple[str, int]:
        """Ask the Sentinels in turn, beginning with the one that answered last."""
        is_unknown, failures = False, []
        for sentinel in list(self._sentinels):
            try:
                answer = await sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
            except (RedisError, OSError) as error:
                failures.append(f"{_place(sentinel)}: {error}")
                continue
            if answer is None:
                is_unknown = True
                continue
            self._sentinels.remove(sentinel)
            self._sentinels.insert(0, sentinel)
            return answer[0].decode(), int(answer[1])
        if is_unknown:
            raise ServiceUnknown(f"no Sentinel monitors a primary of the name {self._service!r}")
        raise ConnectionError(f"no Sentinel answers: {'; '.join(failures)}")


def _place(sentinel: Any) -> str:
    options = sentinel.connection_pool.connection_kwargs
    return join_address(options["host"], options["port"])
