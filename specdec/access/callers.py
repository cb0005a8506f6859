"""Finds the access of a caller by the credential it sent: a key, a JSON web token, the service key, or none.

The coordinator's guards (`guards`) and the gateway (`gateway.auth`) ask here. A client certificate would be one more
credential of `Callers.identify`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from specdec.access.grants import GENERATE, SERVICE, UNLIMITED, Access, Limits
from specdec.access.keys import hash_key, parse_keys
from specdec.access.service_key import ServiceKey
from specdec.access.watched_files import WatchedFile
from specdec.contract.errors import InvalidRequest, Unauthenticated
from specdec.contract.version import install_command

_SERVICE_ACCESS = Access(rights=frozenset((SERVICE,)))


class Sources(Protocol):
    """Settings that name credentials (`specdec.settings.access.AccessSettings`)."""

    api_keys: Path | None
    jwt_jwks: str
    jwt_issuer: str
    jwt_audience: str


class Tokens(Protocol):
    """Verifies JSON web tokens (`specdec.access.json_web_tokens.TokenVerifier`)."""

    def identify(self, token: str) -> Access:
        """Return the access of a token's holder. Raises Unauthenticated."""
        ...


class Callers:
    """The callers that one service knows."""

    def __init__(
        self,
        key_file: Path | None = None,
        *,
        own_keys: Mapping[str, Access] | None = None,
        tokens: Tokens | None = None,
        service_key: ServiceKey | None = None,
        anonymous: Access | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            key_file: file of keys; None: no file.
            own_keys: keys beside those of the file, by hash.
            tokens: verifies JSON web tokens; None: tokens are refused.
            service_key: key of the services; None: no such key.
            anonymous: access of a caller without a credential; None: it is refused.
            clock: seconds, for the checks of the file.

        Raises:
            InvalidRequest: the file cannot be read, is open to other users, or a line is malformed.
        """
        self._file = None if key_file is None else WatchedFile(key_file, parse_keys, field="api_keys", clock=clock)
        self._own_keys = dict(own_keys or {})
        self._tokens, self._service_key, self._anonymous = tokens, service_key, anonymous
        self._tenant_limits: tuple[Mapping[str, Access], Mapping[str, Limits]] = ({}, {})
        """Limits of tenants, with the keys that they come from."""

    def identify(self, credential: str | None) -> Access:
        """Return the access of a caller that sent a credential.

        Keys are found by their hash: how long that takes tells a caller nothing about any key.

        Raises:
            Unauthenticated: the credential is unknown, or there is none although one is needed.
        """
        if credential and self._service_key is not None and self._service_key.accepts(credential):
            return _SERVICE_ACCESS
        keys = self._keys()
        if not credential:
            if self._anonymous is not None:
                return self._anonymous
            raise Unauthenticated("an API key is needed: send the header authorization: Bearer KEY")
        access = keys.get(hash_key(credential))
        if access is not None:
            return access
        if self._tokens is not None and credential.count(".") == 2:
            return self._tokens.identify(credential)
        if self._anonymous is not None and not keys and self._tokens is None:
            return self._anonymous  # clients that always send a key reach a service that has none
        raise Unauthenticated("the API key is unknown")

    def admitting(self, anonymous: Access) -> Callers:
        """Return the same callers, with an access for those without a credential."""
        other = copy.copy(self)
        other._anonymous = anonymous
        return other

    def limits_of(self, tenant: str) -> Limits:
        """Return the limits of a tenant: the loosest of those of its keys that generate; none without such keys."""
        keys = self._keys()
        if self._tenant_limits[0] is not keys:  # keys have changed
            self._tenant_limits = (keys, _limits_by_tenant(keys))
        return self._tenant_limits[1].get(tenant, UNLIMITED)

    def _keys(self) -> Mapping[str, Access]:
        if self._file is None:
            return self._own_keys
        return {**self._file.content(), **self._own_keys} if self._own_keys else self._file.content()


def _limits_by_tenant(keys: Mapping[str, Access]) -> dict[str, Limits]:
    limits: dict[str, Limits] = {}
    for access in keys.values():
        if GENERATE not in access.rights:
            continue
        known = limits.get(access.tenant)
        limits[access.tenant] = access.limits if known is None else known.loosest(access.limits)
    return limits


def open_tokens(sources: Sources) -> Tokens | None:
    """Return the verifier of tokens that the settings name, or None.

    Raises:
        InvalidRequest: PyJWT is not installed, or the key set is not usable.
        Unavailable: the key set cannot be fetched.
    """
    if not sources.jwt_jwks:
        return None
    try:
        from specdec.access.json_web_tokens import TokenVerifier  # loads PyJWT
    except ModuleNotFoundError as error:
        missing = f"package PyJWT is not installed: run {install_command('gateway')}"
        raise InvalidRequest(f"jwt_jwks: {missing}", field="jwt_jwks") from error
    return TokenVerifier(sources.jwt_jwks, issuer=sources.jwt_issuer, audience=sources.jwt_audience)


def bearer_of(authorization: str) -> str | None:
    """Return the credential in the value of an `authorization` header, or None if it is of another kind."""
    kind, _, credential = authorization.partition(" ")
    return credential.strip() or None if kind.lower() == "bearer" else None
