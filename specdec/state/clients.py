"""Opens redis-py clients for the URLs of `specdec.settings.redis_url`, with their time limits, retries and TLS.

A client of Sentinels follows the primary that they name (`sentinel_pool`). A Redis Cluster has one client for each node
(`redis_cluster`). A `memory://` URL is an in-process `fakeredis`, one shared instance per process and name.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError

from specdec.contract.errors import InvalidSetting, Unsupported
from specdec.contract.version import install_command
from specdec.settings.redis_url import MEMORY, SENTINEL, RedisUrl
from specdec.state.sentinel_pool import PrimaryPool

#: Time limits of a connection attempt, of a reply, and of the wait for a free connection.
CONNECT_TIMEOUT_S = 2.0
REPLY_TIMEOUT_S = 2.0
POOL_TIMEOUT_S = 5.0
#: Time limits of a connection attempt to a node of a Redis Cluster and of its reply. They are shorter, because the
#: sessions of other nodes wait with it once, and their leases must outlive that.
NODE_TIMEOUT_S = 1.0
#: Time limits of a connection attempt to a Sentinel and of its reply; the next Sentinel is asked then.
SENTINEL_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 64
#: Every script is idempotent, so it is sent again when its reply is lost, at most this many times.
NUM_RETRIES = 3
RETRY_BASE_S = 0.02
RETRY_CAP_S = 0.3

#: Redis version that the scripts are written for; the in-memory store emulates it.
REDIS_VERSION = (7, 0)


@contextmanager
def cancellation_kept() -> Iterator[None]:
    """Raise CancelledError at the end of the block if its task was cancelled inside.

    redis-py sends a command under `asyncio.wait_for`, which on Python 3.11 drops a cancellation that arrives just when
    the command was sent; fakeredis drops most of them. A loop that is cancelled then would never end.
    """
    task = asyncio.current_task()
    assert task is not None
    num_before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > num_before:
            raise asyncio.CancelledError


@cache
def _keeping_cancellation(client_class: Any) -> Any:
    class KeepingClient(client_class):  # type: ignore[misc]
        async def execute_command(self, *args: Any, **options: Any) -> Any:
            with cancellation_kept():
                return await super().execute_command(*args, **options)

    return KeepingClient


def open_client(url: RedisUrl, original: str) -> Any:
    """Return a client that tries lost commands again. It connects at its first command.

    Args:
        url: a URL of any kind but a Redis Cluster.
        original: the text of the URL.
    """
    if url.kind == MEMORY:
        return _open_in_memory(url.path)
    retry = Retry(ExponentialBackoff(cap=RETRY_CAP_S, base=RETRY_BASE_S), NUM_RETRIES)
    options = {
        **_limits(CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S),
        "retry": retry,
        "retry_on_error": [ConnectionError, TimeoutError, BusyLoadingError],
    }
    check_tls_files(url)
    if url.kind == SENTINEL:
        return _keeping_cancellation(Redis).from_pool(_open_primary_pool(url, options))
    return _keeping_cancellation(Redis).from_pool(BlockingConnectionPool.from_url(original, **options))


def open_node(url: RedisUrl, host: str, port: int) -> Any:
    """Return a client of one node of a Redis Cluster. It tries nothing again, because the slot may have moved."""
    options = {**_limits(NODE_TIMEOUT_S, NODE_TIMEOUT_S), "retry": Retry(NoBackoff(), 0)}
    return _keeping_cancellation(Redis).from_pool(BlockingConnectionPool.from_url(url.of_server(host, port), **options))


def _limits(connect_timeout_s: float, reply_timeout_s: float) -> dict[str, Any]:
    return {
        "max_connections": MAX_CONNECTIONS,
        "timeout": POOL_TIMEOUT_S,
        "socket_connect_timeout": connect_timeout_s,
        "socket_timeout": reply_timeout_s,
        # The same protocol for every supported version of redis-py.
        "protocol": 2,
    }


def _open_primary_pool(url: RedisUrl, options: dict[str, Any]) -> PrimaryPool:
    parsed: dict[str, Any] = {**parse_url(url.of_server("localhost", 6379))}
    for name in ("host", "port", "connection_class"):
        parsed.pop(name, None)
    kind = SentinelManagedSSLConnection if url.is_tls else SentinelManagedConnection
    sentinels = [_open_sentinel(url, host, port) for host, port in url.addresses]
    return PrimaryPool(url.path, sentinels, {**options, **parsed, "connection_class": kind})


def _open_sentinel(url: RedisUrl, host: str, port: int) -> Any:
    options = {**_limits(SENTINEL_TIMEOUT_S, SENTINEL_TIMEOUT_S), "retry": Retry(NoBackoff(), 0)}
    return _keeping_cancellation(Redis).from_pool(
        BlockingConnectionPool.from_url(url.of_sentinel(host, port), **options)
    )


def check_tls_files(url: RedisUrl) -> None:
    """Check that the files of a URL can be read and that the key is the certificate's.

    Raises:
        InvalidSetting: a file cannot be used.
    """
    if not url.is_tls:
        return
    options = dict(url.options)
    certificate, key = options.get("ssl_certfile"), options.get("ssl_keyfile")
    names = _given(options, ("ssl_ca_certs",))
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if certificate is not None or key is not None:
            names = _given(options, ("ssl_certfile", "ssl_keyfile"))
            if certificate is None:
                raise ValueError("a key needs its certificate")
            # An empty password: OpenSSL would ask for one at the terminal otherwise.
            context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidSetting(f"redis_url: {names} cannot be used: {reason}", field="redis_url") from error


def _given(options: dict[str, str], names: Sequence[str]) -> str:
    return " and ".join(f"{name}={options[name]}" for name in names if name in options)


def _open_in_memory(name: str) -> Any:
    # Imported here, because a service on a real Redis does not need it.
    require_fakeredis("a memory:// store", "give --redis-url redis://HOST:PORT")
    from fakeredis import FakeAsyncRedis

    return _keeping_cancellation(FakeAsyncRedis)(server=_memory_server(name), protocol=2)


def require_fakeredis(store: str, instead: str) -> None:
    """Raise Unsupported if the package of the embedded stores is not installed.

    Args:
        store: the store that needs it, for the message.
        instead: the alternative to an installation, for the message.
    """
    if find_spec("fakeredis") is None:
        raise Unsupported(
            f"{store} needs the package fakeredis, which is not installed: {instead}, or run "
            f"{install_command('embedded')}",
            field="redis_url",
        )


@cache
def _memory_server(name: str) -> Any:
    from fakeredis import FakeServer

    return FakeServer(version=REDIS_VERSION)
