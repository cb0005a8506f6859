"""A connection to a Ray cluster, and in one line why there is none.

Ray itself waits for minutes at an address where nobody answers, and writes to stdout and stderr what its users rarely
want. So the cluster is asked first whether it lives and which version it is, and a process that connects gives up its
own outputs. Imports ray when called, never before. Not here: what is placed (`placement`).
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, TextIO

from specdec.errors import InvalidRequest, Unavailable, Unsupported
from specdec.rpc.channels import dial_blocking
from specdec.settings.addresses import check_dialable

#: How long a cluster may take to say that it lives.
ANSWER_TIMEOUT_S = 5.0

_REFUSALS = {
    "UNAVAILABLE": "no Ray cluster answers there",
    "DEADLINE_EXCEEDED": f"no Ray cluster answered there within {ANSWER_TIMEOUT_S:g} s",
    "UNAUTHENTICATED": "the cluster wants a token (RAY_AUTH_TOKEN, or ~/.ray/auth_token)",
}


def seclude() -> TextIO:
    """Prepares this process for Ray, before that is imported.

    It leaves its folder, which Ray would have every worker import from first: in a folder that others may write to, a
    file named like a module would run as whoever started this.

    Returns:
        What was stdout, for this process's own lines. Whatever else is written to stdout or stderr is dropped from now
        on; what Ray has to say of itself is in its own logs, on each node.
    """
    os.chdir("/")
    own = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
    void = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(void, descriptor)
    os.close(void)
    return own


def import_ray() -> Any:
    """The package. Raises Unsupported where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told that it is used
    try:
        import ray
    except ImportError as error:
        raise Unsupported(f"--ray-address needs the package ray (pip install 'specdec[ray]'): {error}") from error
    return ray


def connect(address: str) -> Any:
    """Connects this process to a cluster as one of its jobs, in which the names of actors are its own.

    Args:
        address: HOST:PORT of its head, or auto: the one that runs on this machine.

    Returns:
        The package, connected.

    Raises:
        InvalidRequest: that is no address.
        Unsupported: Ray is not installed, or the cluster has another version.
        Unavailable: nobody answers there in time, or this machine is none of its nodes.
    """
    if address != "auto":
        try:
            check_dialable(address)
        except ValueError as error:
            raise InvalidRequest(f"--ray-address {error}", field="ray_address") from error
    ray = import_ray()
    resolved = _resolve(address)
    _require_answer(resolved, ray.__version__, told=f"--ray-address {address}")
    try:
        ray.init(address=resolved, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises whatever it likes
        raise Unavailable(f"--ray-address {address}: {first_sentence(error)}") from error
    return ray


def first_sentence(error: BaseException) -> str:
    """Of an error of Ray's, whose messages are pages."""
    words = " ".join(str(error).split())
    return words.partition(". ")[0][:300].rstrip(".") or type(error).__name__


def _resolve(address: str) -> str:
    from ray._private.services import canonicalize_bootstrap_address_or_die

    try:
        return str(canonicalize_bootstrap_address_or_die(address))
    except ConnectionError as error:
        raise Unavailable(f"--ray-address {address}: no Ray runs on this machine") from error
    except (ValueError, OSError) as error:  # a name that nobody knows
        raise InvalidRequest(f"--ray-address {address}: {first_sentence(error)}", field="ray_address") from error


def _require_answer(address: str, version: str, told: str) -> None:
    """Raises Unavailable where no cluster's head answers, Unsupported where one of another version does."""
    import grpc
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    tokens = import_module("ray._raylet").AuthenticationTokenLoader.instance()
    token = tokens.get_token_for_http_header(ignore_auth_mode=True)
    with dial_blocking(address) as channel:
        head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        ask = gcs_service_pb2.CheckAliveRequest()
        try:
            reply = head.CheckAlive(ask, timeout=ANSWER_TIMEOUT_S, metadata=tuple(token.items()))
        except grpc.RpcError as error:
            raise Unavailable(f"{told}: {_REFUSALS.get(error.code().name, error.details())}") from error
    if reply.ray_version != version:
        raise Unsupported(f"{told}: its Ray is {reply.ray_version}, ours {version}")
