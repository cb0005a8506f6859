"""Tenants: owners of sessions. Two tenants share no session and no KV block, even for equal requests.

A coordinator serves its own tenant (`--tenant`), or the tenant that each call names (`--tenant-header on`). It states
the tenant to the store and in every call of a replica. The store has it in its keys (`specdec.state.key_names`). A
replica serves many tenants: it keeps sessions under names that contain the tenant, and publishes blocks under names
that are salted with it (`specdec.core.chain`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from specdec.contract.errors import InvalidRequest

DEFAULT_TENANT = "default"

MAX_TENANT_CHARS = 64

#: gRPC metadata key with which a client of a coordinator names the tenant of a call.
TENANT_KEY = "specdec-tenant"

_TENANT = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TENANT_CHARS}}}")


class SessionKey(NamedTuple):
    """A session among those of all tenants: two tenants may use the same session id."""

    tenant: str
    session_id: str


def check_tenant(tenant: str, *, field: str = "tenant") -> str:
    """Return `tenant` if it is a valid name.

    Raises:
        InvalidRequest: it is not 1 to 64 letters, digits, `_`, `.` or `-`.
    """
    if not _TENANT.fullmatch(tenant):
        shown = ascii(tenant[: MAX_TENANT_CHARS + 1])
        raise InvalidRequest(
            f"{field}: {shown} is not 1 to {MAX_TENANT_CHARS} letters, digits, '_', '.' or '-'", field=field
        )
    return tenant


def session_on_replica(tenant: str, session_id: str, *, field: str = "session_id") -> str:
    """Return the name of a tenant's session on a replica, which holds sessions of all tenants.

    Raises:
        InvalidRequest: the id begins with "{", as the names of other tenants' sessions do.
    """
    if session_id.startswith("{"):
        raise InvalidRequest(f"{field}: must not begin with '{{'", field=field)
    return session_id if tenant == DEFAULT_TENANT else f"{{{tenant}}}{session_id}"
