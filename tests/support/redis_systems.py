"""Redis as run in production, for tests: servers on TCP, a Redis Cluster, and a primary with a replica and Sentinels.

Each starts processes of the installed `redis-server` and ends them with its context.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from tests.support.stack import free_port

#: Time limit of every wait below; a machine under load takes much longer than an idle one.
PATIENCE_S = 60.0

SERVICE = "sessions"


class TcpRedis:
    """One `redis-server` on a TCP port of loopback, which keeps nothing on disk."""

    def __init__(self, directory: Path, *arguments: str, config: str = "", scheme: str = "redis") -> None:
        """
        Args:
            directory: a folder of its own.
            arguments: further arguments of the process.
            config: text of its configuration file, which Sentinels write to.
            scheme: rediss for a server whose port speaks TLS.
        """
        self.port = free_port()
        self._scheme = scheme
        self._directory = directory
        self._arguments = arguments
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.fail("redis-server is not installed: apt-get install redis-server")
        file = self._directory / "redis.conf"
        file.write_text(self._config)
        port = ["--tls-port", str(self.port), "--port", "0"] if self._scheme == "rediss" else ["--port", str(self.port)]
        kept = [] if "--sentinel" in self._arguments else ["--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [program, str(file), *port, "--bind", "127.0.0.1", "--dir", str(self._directory), *kept, *self._arguments],
            stdout=subprocess.DEVNULL,
        )

    def client(self, **options: Any) -> redis.Redis:
        """Return a client that waits until the server listens."""
        return redis.Redis(port=self.port, retry=Retry(ConstantBackoff(0.02), 2000), protocol=2, **options)

    def command(self, *parts: str | int) -> Any:
        """Return the answer of a command, as it comes."""
        with self.client() as client:
            client.response_callbacks.clear()
            return client.execute_command(*parts)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the process at once. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def tcp_redis(directory: Path, *arguments: str, config: str = "", scheme: str = "redis") -> Iterator[TcpRedis]:
    """Run a server while the context is open."""
    server = TcpRedis(directory, *arguments, config=config, scheme=scheme)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def await_true(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; a Redis that does not answer yet counts as false."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(RedisError, OSError):
            if condition():
                return
        assert time.monotonic() < deadline_s, "the Redis system did not get ready"
        time.sleep(0.02)


class RedisCluster:
    """Three primaries that share the slots, and with `has_replica` a replica of the first one."""

    def __init__(self, nodes: Sequence[TcpRedis]) -> None:
        self.nodes = nodes

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(node.address for node in self.nodes)}"

    def node_id(self, index: int) -> str:
        return str(self.nodes[index].command("CLUSTER", "MYID").decode())

    def owner_of(self, slot: int) -> int:
        """Return the index of the node that owns a slot, as the nodes state it themselves."""
        ports = [node.port for node in self.nodes]
        for first, last, owner, *_ in self.nodes[-1].command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return ports.index(owner[1])
        raise AssertionError(f"no node owns slot {slot}")


@contextlib.contextmanager
def redis_cluster(
    directory: Path, *, has_replica: bool = False, node_timeout_ms: int = 60_000
) -> Iterator[RedisCluster]:
    """Run a Redis Cluster while the context is open."""
    with ExitStack() as stack:
        nodes = []
        for index in range(4 if has_replica else 3):
            options = [
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                str(free_port()),
                "--repl-diskless-sync-delay",
                "0",
            ]
            options += ["--cluster-node-timeout", str(node_timeout_ms), "--cluster-replica-validity-factor", "0"]
            nodes.append(stack.enter_context(tcp_redis(directory / str(index), *options)))
        cluster = RedisCluster(nodes)
        bounds = [0, 5461, 10923, 16384]
        for index, node in enumerate(nodes[:3]):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            node.command("CLUSTER", "ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        for node in nodes[1:]:
            bus_port = int(node.command("CONFIG", "GET", "cluster-port")[1])
            nodes[0].command("CLUSTER", "MEET", "127.0.0.1", node.port, bus_port)
        await_true(lambda: all(len(node.command("CLUSTER", "NODES").splitlines()) == len(nodes) for node in nodes))
        if has_replica:
            await_true(lambda: nodes[3].command("CLUSTER", "REPLICATE", cluster.node_id(0)))
            await_true(lambda: b"master_link_status:up" in nodes[3].command("INFO", "replication"))
        await_true(lambda: all(b"cluster_state:ok" in node.command("CLUSTER", "INFO") for node in nodes))
        yield cluster


class SentinelSystem:
    """A primary with a replica, and three Sentinels."""

    def __init__(self, servers: Sequence[TcpRedis], sentinels: Sequence[TcpRedis]) -> None:
        self.servers = servers
        self.sentinels = sentinels

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(sentinel.address for sentinel in self.sentinels)}/{SERVICE}"

    @property
    def primary(self) -> TcpRedis:
        """The server that the first Sentinel takes for the primary."""
        port = int(self.sentinels[0].command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])
        return next(server for server in self.servers if server.port == port)

    def fail_over(self) -> None:
        """Make the replica the primary. The former primary takes writes for some seconds more."""
        former = self.primary
        await_true(lambda: self.sentinels[0].command("SENTINEL", "FAILOVER", SERVICE))
        await_true(lambda: self.primary is not former)


@contextlib.contextmanager
def sentinel_system(directory: Path, *, down_after_ms: int = 60_000) -> Iterator[SentinelSystem]:
    """Run a primary, a replica and three Sentinels while the context is open."""
    with ExitStack() as stack:
        quick = ["--repl-diskless-sync-delay", "0"]
        primary = stack.enter_context(tcp_redis(directory / "primary", *quick))
        copying = ["--replicaof", "127.0.0.1", str(primary.port)]
        replica = stack.enter_context(tcp_redis(directory / "replica", *quick, *copying))
        config = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}\n"
            f"sentinel failover-timeout {SERVICE} 10000\n"
        )
        sentinels = [
            stack.enter_context(tcp_redis(directory / f"sentinel{index}", "--sentinel", config=config))
            for index in range(3)
        ]
        await_true(lambda: b"master_link_status:up" in replica.command("INFO", "replication"))
        for sentinel in sentinels:
            await_true(lambda sentinel=sentinel: _knows_all(sentinel))  # type: ignore[misc]
        yield SentinelSystem([primary, replica], sentinels)


def _knows_all(sentinel: TcpRedis) -> bool:
    state = sentinel.command("SENTINEL", "MASTER", SERVICE)
    known = dict(zip(state[::2], state[1::2], strict=True))
    return known[b"num-slaves"] == b"1" and known[b"num-other-sentinels"] == b"2"
