"""The two ports of a coordinator: who may call them, and whether the coordinator can serve.

Clients call the port of `--listen`, operators that of `--admin`, which offers the same service behind a stricter guard.
Without keys, a coordinator that listens on loopback answers both at either port.

A coordinator can serve while a target replica is connected and the store answers. The health service reports it, and
Kubernetes and clients choose among coordinators by it. Calls are accepted in both states, since a missing part may
return before they time out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Protocol

from coordinator.front.servicer import CoordinatorServicer
from specdec.access.callers import Callers, Sources, open_tokens
from specdec.access.grants import GENERATE, OPERATE, Access, Limits
from specdec.access.guards import Guard, admin_guard, public_guard
from specdec.access.service_key import ServiceKey, read_service_key
from specdec.access.tls import Tls
from specdec.contract.errors import SpecdecError
from specdec.rpc.service_server import COORDINATOR_SERVICE, ServiceServer
from specdec.rpc.ticks import tick
from specdec.state.store import SessionStore


class AccessSources(Sources, Protocol):
    """The settings that name all credentials of a coordinator."""

    service_key: str


_CLIENT = Access()
_OPERATOR = Access(rights=frozenset((GENERATE, OPERATE)))


class CoordinatorAccess:
    """The access of all callers of one coordinator."""

    def __init__(self, sources: Sources, service_key: ServiceKey | None, *, is_loopback: bool) -> None:
        """
        Args:
            sources: settings that name keys and tokens.
            service_key: key of the services; None: replicas and the registry have none.
            is_loopback: whether only this machine reaches the port of clients.

        Raises:
            InvalidRequest: a file of credentials is not usable.
            Unavailable: the key set of tokens cannot be fetched.
        """
        has_keys = bool(sources.api_keys or sources.jwt_jwks)
        takes_operators = is_loopback and not has_keys
        callers = Callers(sources.api_keys, tokens=open_tokens(sources), service_key=service_key)
        self._callers = callers
        self.service_key = service_key
        anonymous = _OPERATOR if takes_operators else _CLIENT
        self.public: Guard = public_guard(
            callers if has_keys else callers.admitting(anonymous), takes_operators=takes_operators
        )
        self.admin: Guard = admin_guard(callers if has_keys else callers.admitting(_OPERATOR))

    @property
    def link_metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata of calls to replicas."""
        return self.service_key.metadata if self.service_key else ()

    def limits_of(self, tenant: str) -> Limits:
        """Return the limits of a tenant: the loosest of those of its keys."""
        return self._callers.limits_of(tenant)


def open_access(sources: AccessSources, environ: Mapping[str, str], *, is_loopback: bool) -> CoordinatorAccess:
    """Return the access of a coordinator's callers; arguments and errors as `CoordinatorAccess`."""
    return CoordinatorAccess(sources, read_service_key(sources.service_key, environ), is_loopback=is_loopback)


async def open_admin_port(
    listen: str, servicer: CoordinatorServicer, guard: Guard, ending: AsyncExitStack, *, tls: Tls | None = None
) -> str:
    """Answer operator calls at an address; return it with the port in use.

    Args:
        listen: HOST:PORT; port 0 chooses a free port.
        servicer: answers the calls that the guard admits.
        guard: guard of the port.
        ending: closes the port.
        tls: credentials of the port; None: plaintext.

    Raises:
        Unavailable: the address cannot be bound.
    """
    server = ServiceServer(listen, service_names=(COORDINATOR_SERVICE,), check_caller=guard.check, tls=tls)
    servicer.add_to(server.grpc_server)
    await server.start()
    ending.push_async_callback(server.stop, 0.0)
    await server.set_serving()
    return server.address


#: Pause between two pings of the store, and limit on the wait for an answer. The store counts as down after two missed
#: pings in a row, because a pause of this process can cause one. Both together take less time than a call waits for the
#: store, so a client whose call fails already sees this coordinator as not serving.
LOOK_INTERVAL_S = 1.0
_ANSWER_S = 1.0
_NUM_MISSED = 2

_log = logging.getLogger(__name__)


class Readiness:
    """Calls `tell` whenever readiness changes. It starts as not ready."""

    def __init__(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        self._tell = tell
        self._has_target = False
        self._has_store = True
        self._is_leaving = False
        self._was_ready = False

    async def note_targets(self, has_target: bool) -> None:
        self._has_target = has_target
        await self._tell_change()

    async def note_leaving(self, is_leaving: bool) -> None:
        """Note that the coordinator takes no new requests, or takes them again."""
        self._is_leaving = is_leaving
        await self._tell_change()

    async def watch_store(self, store: SessionStore) -> None:
        """Ping the store until cancelled. The first ping follows `LOOK_INTERVAL_S` after start-up, which pinged it."""
        num_missed = 0
        while True:
            await tick(LOOK_INTERVAL_S)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await store.ping()
            except (SpecdecError, TimeoutError) as error:
                num_missed += 1
                if num_missed == _NUM_MISSED:
                    reason = str(error) or f"no answer within {_ANSWER_S} s"
                    _log.warning("store unreachable; not serving until it answers: %s", reason)
            else:
                if num_missed >= _NUM_MISSED:
                    _log.info("store reachable again")
                num_missed = 0
            self._has_store = num_missed < _NUM_MISSED
            await self._tell_change()

    async def _tell_change(self) -> None:
        is_ready = self._has_target and self._has_store and not self._is_leaving
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            await self._tell(is_ready)
