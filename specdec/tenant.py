"""Tenants: whose sessions these are. Two tenants share no session and no KV block, whatever they send.

A coordinator serves one tenant (`--tenant`) and names it to the store and in every call. The store keeps it in its keys
(`specdec.state.keys`); a replica, which serves many, keeps sessions under names of their own and publishes blocks under
salted ones (`specdec.core.chain`). Not here: who may be which tenant; that takes authentication.
"""

from __future__ import annotations

import re

from specdec.errors import InvalidRequest

DEFAULT_TENANT = "default"

MAX_TENANT_CHARS = 64

_TENANT = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TENANT_CHARS}}}")


def check_tenant(tenant: str, *, field: str = "tenant") -> str:
    """Returns `tenant`.

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
    """The name of a tenant's session on a replica, where sessions of all tenants lie side by side.

    Raises:
        InvalidRequest: the id begins as the names of other tenants' sessions do.
    """
    if session_id.startswith("{"):
        raise InvalidRequest(f"{field}: must not begin with '{{'", field=field)
    return session_id if tenant == DEFAULT_TENANT else f"{{{tenant}}}{session_id}"
