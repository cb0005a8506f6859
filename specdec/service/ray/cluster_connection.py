"""Connects a process to a Ray cluster, or says in one line why it cannot.

Ray waits for minutes at an address that does not answer, and writes much to stdout and stderr. So this module first
asks the cluster for its version, and a process that connects gives up its own outputs. Ray is imported when a function
needs it, never before.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, TextIO

from specdec.contract.errors import InvalidRequest, Unavailable, Unsupported
from specdec.contract.version import install_command
from specdec.rpc.channels import dial_blocking
from specdec.settings.addresses import check_dialable
from specdec.settings.standard_streams import output_stream

#: Time in which the head of a cluster must answer.
ANSWER_TIMEOUT_S = 5.0

_REFUSALS = {
    "UNAVAILABLE": "no Ray cluster answers there",
    "DEADLINE_EXCEEDED": f"no Ray cluster answered there within {ANSWER_TIMEOUT_S:g} s",
    "UNAUTHENTICATED": "the cluster requires a token (RAY_AUTH_TOKEN, or ~/.ray/auth_token)",
}


def seclude() -> TextIO:
    """Prepare this process for Ray, before Ray is imported.

    The process changes its working directory, because Ray lets every worker import from there first: in a folder that
    other users may write to, a file named like a module would run with this user's rights.

    Returns:
        The former stdout, for this process's own lines. Everything else that is written to stdout or stderr is dropped
        from now on. Ray's own messages are in its logs on each node.
    """
    os.chdir("/")
    own = output_stream(os.dup(1))
    void = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(void, descriptor)
    os.close(void)
    return own


def import_ray() -> Any:
    """Return the package ray. Raises Unsupported if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    try:
        import ray
    except ImportError as error:
        raise Unsupported(f"--ray-address needs the package ray: run {install_command('ray')} ({error})") from error
    return ray


def connect(address: str) -> Any:
    """Connect this process to a cluster as a job of its own, with its own namespace of actor names.

    Args:
        address: HOST:PORT of the cluster's head, or auto for the cluster of this machine.

    Returns:
        The package ray, connected.

    Raises:
        InvalidRequest: the address is malformed or unknown.
        Unsupported: Ray is not installed, or the cluster has another version.
        Unavailable: the head does not answer in time, or this machine is not a node of the cluster.
    """
    if address != "auto":
        try:
            check_dialable(address)
        except ValueError as error:
            raise InvalidRequest(f"--ray-address {error}", field="ray_address") from error
    ray = import_ray()
    resolved = _resolve(address)
    _require_answer(resolved, ray.__version__, setting=f"--ray-address {address}")
    try:
        ray.init(address=resolved, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray documents no exception types
        raise Unavailable(f"--ray-address {address}: {first_sentence(error)}") from error
    return ray


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an exception of Ray, whose messages can fill pages."""
    words = " ".join(str(error).split())
    return words.partition(". ")[0][:300].rstrip(".") or type(error).__name__


def _resolve(address: str) -> str:
    from ray._private.services import canonicalize_bootstrap_address_or_die

    try:
        return str(canonicalize_bootstrap_address_or_die(address))
    except ConnectionError as error:
        raise Unavailable(f"--ray-address {address}: no Ray runs on this machine") from error
    except (ValueError, OSError) as error:  # an unknown host name
        raise InvalidRequest(f"--ray-address {address}: {first_sentence(error)}", field="ray_address") from error


def _require_answer(address: str, version: str, setting: str) -> None:
    """Raises Unavailable if no head of a cluster answers, Unsupported if its version is another one."""
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
            raise Unavailable(f"{setting}: {_REFUSALS.get(error.code().name, error.details())}") from error
    if reply.ray_version != version:
        raise Unsupported(f"{setting}: its Ray is {reply.ray_version}, ours {version}")
