"""The tenant of each call: that of the caller's credentials, the one that the call names, or the coordinator's own.

A caller with a key or token belongs to its tenant. A caller with the right *service*, such as a gateway, names the
tenant of each call in the metadata. A coordinator with `--tenant-header on` and without keys believes every caller, so
only trusted gateways may reach it. From here on the tenant is part of the session's key
(`specdec.contract.tenant.SessionKey`), which the store and the replicas use too.
"""

from __future__ import annotations

from typing import Any

from specdec.access.grants import OPERATE, SERVICE, Access
from specdec.access.guards import RefusalLog, caller
from specdec.contract.errors import Forbidden, InvalidRequest
from specdec.contract.payer import KEY_ID_KEY, check_key_id, key_id_of
from specdec.contract.tenant import DEFAULT_TENANT, TENANT_KEY, check_tenant
from specdec.observability.logging import bind_task


class CallTenants:
    """Decides for which tenant a call is served."""

    def __init__(self, own: str = DEFAULT_TENANT, *, reads_header: bool = False) -> None:
        """
        Args:
            own: tenant of calls that name none and of callers without credentials.
            reads_header: callers without credentials may name another tenant.
        """
        self._own = own
        self._reads_header = reads_header
        self._refusals = RefusalLog()

    def of(self, context: Any) -> str:
        """Return the tenant of a call, and add it to all further log records of the call. Call it in the call's task.

        Raises:
            InvalidRequest: the call names no valid tenant, or more than one.
            Forbidden: the call names another tenant than the caller may call for.
        """
        try:
            tenant = self._chosen(caller(), self._named(context))
        except Forbidden as error:
            self._refusals.note(context.peer(), error)
            raise
        bind_task(tenant=tenant)
        return tenant

    def key_id_of(self, context: Any) -> str:
        """Return the id of the API key that a call is made with, or for; "" without one.

        A gateway states the key of its own caller. It is believed if it may name tenants, and on a coordinator without
        keys.

        Raises:
            InvalidRequest: what the call states is not the id of a key.
        """
        access = caller()
        named = [value for key, value in context.invocation_metadata() or () if key == KEY_ID_KEY]
        if named and (access.names_tenants or not (access.key_hash or access.tenant)):
            return check_key_id(named[-1])
        return key_id_of(access.key_hash)

    def is_own(self, tenant: str) -> bool:
        """Return whether a tenant is the coordinator's own one."""
        return tenant == self._own

    def sees_all(self, tenant: str) -> bool:
        """Return whether the caller of a call for `tenant` may see and change what all tenants share.

        Callers without credentials may do so for the coordinator's own tenant.
        """
        access = caller()
        operates = OPERATE in access.rights and (bool(access.tenant) or self.is_own(tenant))
        return operates or (SERVICE in access.rights and self.is_own(tenant))

    def _chosen(self, access: Access, named: str) -> str:
        own = access.tenant or self._own
        if not named or named == own or access.names_tenants:
            return named or own
        if access.tenant:
            raise Forbidden(f"{TENANT_KEY}: these credentials are for one tenant, not for {named}", field=TENANT_KEY)
        if not self._reads_header:
            raise Forbidden(
                f"{TENANT_KEY}: this coordinator serves no tenant but its own; start it with --tenant-header on to "
                "serve the tenants that its callers name",
                field=TENANT_KEY,
            )
        return named

    def _named(self, context: Any) -> str:
        """Return the tenant that a call names; "" if it names none."""
        names = [value for key, value in context.invocation_metadata() or () if key == TENANT_KEY]
        if len(names) > 1:
            raise InvalidRequest(f"{TENANT_KEY} must be given once, got {len(names)} times", field=TENANT_KEY)
        return check_tenant(names[0], field=TENANT_KEY) if names else ""
