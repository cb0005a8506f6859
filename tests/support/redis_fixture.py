"""A real Redis for tests: a `redis-server` of this test run on a unix socket, gone when the run ends.

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
        """`arguments`: further ones of the process; `machine`: what its command begins with on another machine."""
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
        """Starts the process and returns once it answers."""
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
        # The client's own retries are the wait for the socket to appear.
        with redis.Redis.from_url(self.url, retry=Retry(ConstantBackoff(0.02), 500)) as client:
            client.ping()

    def restart_without_its_last(self, num_bytes: int) -> None:
        """Crashes and comes back with a log of writes that many bytes shorter, as after a lost page cache."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        (log,) = (self._directory / "appendonlydir").glob("*.incr.aof")
        os.truncate(log, max(0, log.stat().st_size - num_bytes))
        self.start()

    def signal(self, number: int) -> None:
        """Sends the process a signal: SIGSTOP makes it hang, SIGCONT lets it go on."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """Ends the process; what it held is lost."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Shared by the whole run: a test that stops or flushes it makes its own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url
