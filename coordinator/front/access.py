"""Access to a coordinator: its callers, the guards of its two ports, and the credential that it sends to replicas.

Clients call the port of `--listen`, operators that of `--admin`. Without keys, a coordinator that listens on loopback
answers both at either port.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from specdec.access.callers import Callers, Sources, open_tokens
from specdec.access.grants import GENERATE, OPERATE, Access, Limits
from specdec.access.guards import Guard, admin_guard, public_guard
from specdec.access.service_key import ServiceKey, read_service_key


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
