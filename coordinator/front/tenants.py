"""The tenant of each call: the coordinator's own one, or the one that the call's metadata names.

A coordinator with `--tenant-header on` believes every caller, so only trusted gateways may reach it. From here on the
tenant is part of the session's key (`specdec.tenant.SessionKey`), which the store and the replicas use too.
"""

from __future__ import annotations

from typing import Any

from specdec.errors import Forbidden, InvalidRequest
from specdec.observability.logging import bind_task
from specdec.tenant import DEFAULT_TENANT, TENANT_KEY, check_tenant


class CallTenants:
    """Decides for which tenant a call is served."""

    def __init__(self, own: str = DEFAULT_TENANT, *, reads_header: bool = False) -> None:
        """
        Args:
            own: tenant of calls that name none.
            reads_header: calls may name another tenant.
        """
        self._own = own
        self._reads_header = reads_header

    def of(self, context: Any) -> str:
        """Return the tenant of a call, and add it to all further log records of the call. Call it in the call's task.

        Raises:
            InvalidRequest: the call names no valid tenant, or more than one.
            Forbidden: the call names another tenant than the coordinator's own, and this coordinator serves no other.
        """
        tenant = self._named(context)
        if not (self._reads_header or self.is_own(tenant)):
            raise Forbidden(
                f"{TENANT_KEY}: this coordinator serves no tenant but its own; start it with --tenant-header on to "
                "serve the tenants that its callers name",
                field=TENANT_KEY,
            )
        bind_task(tenant=tenant)
        return tenant

    def is_own(self, tenant: str) -> bool:
        """Return whether a tenant is the coordinator's own one, which alone sees and changes what all tenants share."""
        return tenant == self._own

    def _named(self, context: Any) -> str:
        names = [value for key, value in context.invocation_metadata() or () if key == TENANT_KEY]
        if not names:
            return self._own
        if len(names) > 1:
            raise InvalidRequest(f"{TENANT_KEY} must be given once, got {len(names)} times", field=TENANT_KEY)
        return check_tenant(names[0], field=TENANT_KEY)
