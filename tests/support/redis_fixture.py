"""A real Redis for tests: a `redis-server` on a Unix socket, which ends with the test run.

Import the fixtures into a conftest: `from tests.support.redis_fixture import redis_server, redis_url`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry


class RedisServer:
    """One `redis-server` process, without persistence unless it keeps a log of its writes."""

    def __init__(
        self, directory: Path, *, keeps_log: bool = False, arguments: Sequence[str] = (), machine: Sequence[str] = ()
    ) -> None:
        """`arguments`: further arguments of the process; `machine`: prefix of the command on another machine."""
        self._keeps_log = keeps_log
        self._arguments = arguments
        self._machine = machine
        self._socket = directory / "redis.sock"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        """Start the process; return once it answers."""
        program = shutil.which("redis-server")
        if program is None:
            pytest.fail("redis-server is not installed: apt-get install redis-server")
        kept = ["--appendonly", "yes", "--appendfsync", "always"] if self._keeps_log else ["--appendonly", "no"]
        quiet = ["--save", "", *kept, "--loglevel", "warning"]
        self._process = subprocess.Popen(
            [
                *self._machine,
                program,
                "--port",
                "0",
                "--unixsocket",
                str(self._socket),
                "--dir",
                str(self._directory),
                *quiet,
                *self._arguments,
            ],
            stdout=subprocess.DEVNULL,
        )
        # The client's retries wait until the socket exists.
        with redis.Redis.from_url(self.url, retry=Retry(ConstantBackoff(0.02), 500)) as client:
            client.ping()

    def restart_without_its_last(self, num_bytes: int) -> None:
        """Crash and restart with a shorter log of writes, as after a lost page cache."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        os.truncate(self.log_path, max(0, self.log_size - num_bytes))
        self.start()

    @property
    def log_size(self) -> int:
        """Size of the log of writes, in bytes."""
        return self.log_path.stat().st_size

    @property
    def log_path(self) -> Path:
        """The log of writes."""
        (log,) = (self._directory / "appendonlydir").glob("*.incr.aof")
        return log

    def signal(self, number: int) -> None:
        """Send the process a signal: SIGSTOP makes it hang, SIGCONT lets it continue."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """End the process; its data is lost."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The server of the whole run; a test that stops or flushes a server starts its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url
