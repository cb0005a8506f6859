"""Guards of gRPC ports: which right each method needs, which caller the running call has, and log lines of refusals.

The server's interceptor (`specdec.rpc.interceptors`) asks the guard of its port before it decodes a request, so a
refused caller costs no parsing. A method that a guard does not know needs the strictest right of its port. Health and
reflection are open: they tell no more than the protos and whether the service serves.

A refusal is logged at most once a second for each host, so that a flood of calls does not fill the log. A line has the
address of the caller and the reason, and no part of a credential.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from specdec.access.callers import Callers, bearer_of
from specdec.access.grants import GENERATE, OPERATE, SERVICE, Access
from specdec.contract.errors import Forbidden, InvalidRequest, SpecdecError, Unauthenticated

#: Shortest interval between two log lines about one host.
LOG_INTERVAL_S = 1.0

_MAX_REMEMBERED_HOSTS = 1024

_log = logging.getLogger(__name__)


class RefusalLog:
    """Logs refusals of one service."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def note(self, peer: str, error: SpecdecError) -> None:
        """Log a refusal, unless the same host's last line is too recent; `peer` is an address with a port."""
        host, now_s = peer.rpartition(":")[0], time.monotonic()
        if now_s - self._last_s.get(host, float("-inf")) < LOG_INTERVAL_S:
            return
        if len(self._last_s) >= _MAX_REMEMBERED_HOSTS:
            self._last_s.clear()
        self._last_s[host] = now_s
        _log.warning("refused a caller: %s", error.message, extra={"peer": peer, "reason": error.reason})


_OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.")
_AUTHORIZATION_KEY = "authorization"

_GET_INFO = "/specdec.v1.CoordinatorService/GetInfo"
_OPERATOR_CALLS = ("/specdec.v1.CoordinatorService/Promote", "/specdec.v1.CoordinatorService/Drain")

#: Access of a call at a port without a guard.
_UNGUARDED = Access(rights=frozenset((GENERATE, OPERATE)))

_caller: ContextVar[Access] = ContextVar("caller", default=_UNGUARDED)


def caller() -> Access:
    """Return the access of the running call's caller. Call it in the call's task."""
    return _caller.get()


class Guard:
    """Refuses calls that lack the right that their method needs."""

    def __init__(
        self, callers: Callers, *, needs: Mapping[str, tuple[str, ...]], others: tuple[str, ...], refusal: str = ""
    ) -> None:
        """
        Args:
            callers: finds the access of a caller.
            needs: rights by full method name; a caller needs one of them, and none of them will do if it is empty.
            others: rights that all other methods need, likewise.
            refusal: message for methods that no right opens.
        """
        self._callers, self._needs, self._others, self._refusal = callers, needs, others, refusal
        self._log = RefusalLog()

    def check(self, method: str, context: Any) -> None:
        """Admit a call, and note its caller for the rest of its task.

        Raises:
            Unauthenticated: the caller is unknown.
            Forbidden: it lacks the right, or the method is not answered at this port.
        """
        if method.startswith(_OPEN):
            return
        try:
            _caller.set(self._admitted(method, context))
        except (Unauthenticated, Forbidden) as error:
            self._log.note(context.peer(), error)
            raise

    def _admitted(self, method: str, context: Any) -> Access:
        access = self._callers.identify(_credential(context))
        rights = self._needs.get(method, self._others)
        if not rights:
            raise Forbidden(self._refusal)
        access.require(*rights)
        return access


def public_guard(callers: Callers, *, takes_operators: bool) -> Guard:
    """Return the guard of a coordinator's port for clients.

    Args:
        callers: the coordinator's callers.
        takes_operators: whether operator calls are answered here too.
    """
    operator = (OPERATE,) if takes_operators else ()
    return Guard(
        callers,
        needs={_GET_INFO: (GENERATE, OPERATE, SERVICE), **dict.fromkeys(_OPERATOR_CALLS, operator)},
        others=(GENERATE, SERVICE),
        refusal="operator calls are not answered at this address: send them to the coordinator's --admin address",
    )


def admin_guard(callers: Callers) -> Guard:
    """Return the guard of a coordinator's port for operators."""
    return Guard(
        callers,
        needs={_GET_INFO: (OPERATE,), **dict.fromkeys(_OPERATOR_CALLS, (OPERATE,))},
        others=(),
        refusal="this address answers operator calls alone: send other calls to the coordinator's --listen address",
    )


def replica_guard(callers: Callers) -> Guard:
    """Return the guard of a draft or target replica, which takes calls of coordinators alone."""
    return Guard(callers, needs={}, others=(SERVICE,))


def _credential(context: Any) -> str | None:
    """Return the credential of a call. Raises InvalidRequest if it is given twice."""
    values = [value for key, value in context.invocation_metadata() or () if key == _AUTHORIZATION_KEY]
    if len(values) > 1:
        raise InvalidRequest(f"{_AUTHORIZATION_KEY} must be given once, got {len(values)} times")
    return bearer_of(values[0]) if values and isinstance(values[0], str) else None
