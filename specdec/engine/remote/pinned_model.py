"""A model of a server, by the name under which the server knows it: one model as long as the replica lives.

A server that restarts may serve another model, or another adapter, under the same name. It breaks its connections when
it ends, so every answer of the next process arrives over a new connection. An answer is therefore kept back until the
server has identified the model again (`Identify`), by an identification that began after the first answer over the same
connection had come. A load balancer between the two would hide a restart.

Called by the targets and drafts whose engine is reached over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from specdec.contract.errors import Internal, Unavailable
from specdec.engine.remote.http_connection import Connection, Refused, json_of

#: Attempts to identify a model that seems to have changed: a busy engine may round another way once.
_NUM_ATTEMPTS = 3

#: Statuses that say nothing about the request: another replica, or a later call, may get an answer.
_TRANSIENT = (401, 403, 408, 425, 429)

_NOT_FOUND = 404

Identify = Callable[[], Awaitable[str]]
"""Returns a fingerprint of the model that the server serves now, by calls of `Connection.ask`."""

_log = logging.getLogger(__name__)


class PinnedModel:
    """A model that has been identified. Make one with `pin`; use from one event loop."""

    def __init__(self, connection: Connection, name: str, fingerprint: str, identify: Identify) -> None:
        """`name` is that of the model at the server."""
        self.connection = connection
        self.name = name
        self.fingerprint = fingerprint
        self._identify = identify
        self._identifying = asyncio.Lock()
        self._identified_s = float("-inf")
        """Time at which the last identification began."""
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def has_changed(self) -> bool:
        """True once the server serves another model under the name, or none."""
        return self._changed.done()

    async def wait_changed(self) -> None:
        """Raise Internal once the server serves another model."""
        await asyncio.shield(self._changed)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request to the model and return the JSON of its answer; another model's answer is refused.

        Raises:
            Internal: the server serves another model now, or the answer is not JSON.
            Refused: the server refuses this request, and serves the model.
            Unavailable: no answer, or a status that says nothing about the request.
        """
        url = self.connection.url
        try:
            response = await self.connection.send(path, {"model": self.name, **body})
        except Refused as refusal:
            _log.info("the engine refused: url=%s status=%d message=%s", url, refusal.status, refusal.message)
            if refusal.status in _TRANSIENT:
                raise Unavailable(f"the engine's server answered with status {refusal.status}") from refusal
            if refusal.status == _NOT_FOUND:  # the server may know the model by another name after a restart
                await self.require_unchanged()
            raise
        await self._require_unchanged(self.connection.since_s(response))
        return json_of(response, url)

    async def require_unchanged(self) -> None:
        """Identify the model now. Raises Internal if it is another one, and Unavailable without an answer."""
        await self._require_unchanged(time.monotonic())

    async def _require_unchanged(self, since_s: float) -> None:
        """Return once an identification that began after a time has found the model; raise Internal else."""
        if self._identified_s >= since_s and not self._changed.done():
            return
        async with self._identifying:
            if self._changed.done():
                self._changed.result()
            if self._identified_s >= since_s:
                return
            for _ in range(_NUM_ATTEMPTS):
                began_s = time.monotonic()
                if await _identified(self._identify) == self.fingerprint:
                    self._identified_s = began_s
                    return
            error = Internal(f"{self.connection.url} serves another model now; restart this replica to serve it")
            _log.error("the engine's model has changed: url=%s model=%s", self.connection.url, self.name)
            self._changed.set_exception(error)
            self._changed.exception()  # asyncio complains of an error that was never read
            raise error


async def pin(connection: Connection, name: str, identify: Identify) -> PinnedModel:
    """Let a server identify a model now and over each new connection. Raises as `identify`."""
    return PinnedModel(connection, name, await identify(), identify)


async def _identified(identify: Identify) -> str:
    """Return the fingerprint of the model that the server serves; "" if it does not know the pinned name."""
    try:
        return await identify()
    except Refused:
        return ""
