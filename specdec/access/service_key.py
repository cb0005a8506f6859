"""The service key, which the services of one system share: it opens replicas to coordinators, and signs the registry.

Coordinators send it to replicas, and gateways to coordinators, as `authorization: Bearer KEY`. Records of the registry
are signed with it (`specdec.state.replica_records`), so that write access to Redis alone makes no coordinator dial an
address.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from specdec.access.watched_files import read_credentials
from specdec.contract.errors import InvalidRequest

_FIELD = "service_key"
_ENVIRONMENT = "env:"
_KEY = re.compile(r"[!-~]{16,4096}")
#: Prefix of what is signed: a signature of this use is none of another.
_RECORD = b"specdec registry record\n"


class ServiceKey:
    """One or several keys: the first one is used, each is accepted, so that keys can be replaced without a pause."""

    def __init__(self, *keys: str) -> None:
        """Raises InvalidRequest for a malformed key; the message omits it."""
        if not keys or not all(_KEY.fullmatch(key) for key in keys):
            raise InvalidRequest(
                f"{_FIELD}: a service key must be 16 to 4096 printable ASCII characters without spaces", field=_FIELD
            )
        self._keys = tuple(key.encode() for key in keys)

    @property
    def bearer(self) -> str:
        """The key to send."""
        return self._keys[0].decode()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata of a call between services."""
        return (("authorization", f"Bearer {self.bearer}"),)

    def accepts(self, bearer: str) -> bool:
        """Return whether a caller sent one of the keys; the time of the answer does not depend on the keys."""
        sent = hashlib.sha256(bearer.encode(errors="replace")).digest()
        matches = [hmac.compare_digest(sent, hashlib.sha256(key).digest()) for key in self._keys]
        return any(matches)

    def sign(self, record: bytes) -> str:
        """Return the signature of a registry record."""
        return _signature(self._keys[0], record)

    def verify(self, record: bytes, signature: str) -> bool:
        """Return whether one of the keys has signed a registry record."""
        sent = signature.encode(errors="replace")
        return any(hmac.compare_digest(sent, _signature(key, record).encode()) for key in self._keys)


def read_service_key(source: str, environ: Mapping[str, str]) -> ServiceKey | None:
    """Return the service key that a setting names, or None for "".

    Args:
        source: a file with one key a line, or `env:NAME` for an environment variable.
        environ: environment of the process.

    Raises:
        InvalidRequest: the file cannot be read or is open to other users, the variable is not set, or a key is
            malformed. The message has no part of a key.
    """
    if not source:
        return None
    if source.startswith(_ENVIRONMENT):
        name = source.removeprefix(_ENVIRONMENT)
        if not environ.get(name):
            raise InvalidRequest(f"{_FIELD}: the environment variable {name} is not set", field=_FIELD)
        return ServiceKey(environ[name])
    text, _ = read_credentials(Path(source), field=_FIELD)
    return ServiceKey(*text.split())


def _signature(key: bytes, record: bytes) -> str:
    return hmac.new(key, _RECORD + record, hashlib.sha256).hexdigest()
