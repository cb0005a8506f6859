"""Identity of a caller: API key, tenant and trace, which both clients send as gRPC metadata with their calls."""

from __future__ import annotations

import copy
import re
from typing import Any, Self

from specdec.client.sessions import SessionSizes
from specdec.contract.api_key import API_KEY_RULE, is_api_key
from specdec.contract.errors import InvalidRequest
from specdec.contract.payer import KEY_ID_KEY, check_key_id
from specdec.contract.tenant import TENANT_KEY, check_tenant

Metadata = tuple[tuple[str, str], ...]
"""gRPC metadata: keys and values."""

_AUTHORIZATION_KEY = "authorization"

_REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")

# A W3C trace context: version, trace id, id of the caller's span, flags.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Identity:
    """Base of both clients: what a coordinator knows a caller by. Clients of several tenants share one connection."""

    _coordinators: Any
    _is_view = False

    def _identify(self, api_key: str | None, *, remembers_sessions: bool = True) -> None:
        """Set the metadata of every call. Raises InvalidRequest for a malformed key, which the message omits."""
        self._metadata = _authorization(api_key)
        self._sizes = SessionSizes(remembers=remembers_sessions)

    def for_tenant(self, tenant: str) -> Self:
        """Return a client that calls for a tenant, over this client's connection and with its settings.

        The coordinator must trust its callers (`--tenant-header on`), or the tenant must be its own; otherwise calls
        raise Forbidden. The returned client needs no closing: it ends with this one.

        Raises:
            InvalidRequest: the name is not 1 to 64 letters, digits, `_`, `.` or `-`.
        """
        view = self._with(TENANT_KEY, check_tenant(tenant))
        view._sizes = SessionSizes(remembers=self._sizes.remembers)
        return view

    def for_request(self, request_id: str) -> Self:
        """Return a client whose calls name the request that they belong to, as logs and traces of the system show it.

        The returned client needs no closing: it ends with this one.

        Raises:
            InvalidRequest: the id is not 1 to 128 of A-Z a-z 0-9 . _ : @ / + = -.
        """
        if not isinstance(request_id, str) or not _REQUEST_ID.fullmatch(request_id):
            raise InvalidRequest(
                f"request_id must be 1 to 128 of A-Z a-z 0-9 . _ : @ / + = -, got {request_id!r:.80}",
                field="request_id",
            )
        return self._with(_REQUEST_ID_KEY, request_id)

    def for_key(self, key_id: str) -> Self:
        """Return a client whose calls name the id of the API key that they are made for, as usage records show it.

        The coordinator believes callers that may name tenants, and anyone if it has no keys. For any other caller it
        takes the own key. The returned client needs no closing: it ends with this one.

        Raises:
            InvalidRequest: the id is not 16 hexadecimal digits.
        """
        return self._with(KEY_ID_KEY, check_key_id(key_id))

    def _with(self, key: str, value: str) -> Self:
        """Return a client with one entry more in the metadata of its calls."""
        view = copy.copy(self)
        view._metadata = (*(pair for pair in self._metadata if pair[0] != key), (key, value))
        view._is_view = True
        return view


def _authorization(api_key: str | None) -> Metadata:
    if api_key is None:
        return ()
    if not is_api_key(api_key):
        raise InvalidRequest(f"api_key {API_KEY_RULE}", field="api_key")
    return ((_AUTHORIZATION_KEY, f"Bearer {api_key}"),)


def trace_metadata(traceparent: str | None) -> Metadata:
    """Return the metadata of a call that continues a trace. Raises InvalidRequest for a malformed trace context."""
    if traceparent is None:
        return ()
    if not isinstance(traceparent, str) or not _TRACEPARENT.fullmatch(traceparent):
        raise InvalidRequest(
            f"traceparent must be VERSION-TRACE_ID-SPAN_ID-FLAGS in lower-case hex, got {traceparent!r:.80}",
            field="traceparent",
        )
    return (("traceparent", traceparent),)
