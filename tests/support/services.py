"""Processes of one version of the services, which find each other in a Redis.

    with Services(ROOT, redis_url, logs) as services:
        services.start("target_service", "--model", "simulated:8b-0.6b")

Called by tests of several versions, and of faults that need processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.process_template import ENVIRON, ForkedProcess, Streams, start_like
from tests.support.stack import START_TIMEOUT_S, free_port, is_serving

ROOT = Path(__file__).resolve().parents[2]
Serves = Callable[[str], bool]
"""Returns whether the service at an address serves."""

_POLL_S = 0.1
#: Longest wait for the end of a service, which first drains.
_STOP_S = 180.0


class Services:
    """Processes of one version, which find each other in a Redis."""

    def __init__(self, sources: Path, redis_url: str, logs: Path) -> None:
        self._sources, self._redis_url, self._logs = sources, redis_url, logs
        self._running: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def start(self, module: str, *flags: str, address: str = "", name: str = "", serves: Serves = is_serving) -> str:
        """Start a service and return its address once it serves; arguments as of `begin` and `wait_for`."""
        address = self.begin(module, *flags, address=address, name=name)
        self.wait_for(name or module, address, serves)
        return address

    def begin(self, module: str, *flags: str, address: str = "", name: str = "") -> str:
        """Start a service and return its address at once.

        Args:
            module: the service, which is run by `python -m`.
            flags: its further flags.
            address: HOST:PORT to listen on; "": a free port of this machine.
            name: name for the other calls; "": the module's.
        """
        address = address or f"127.0.0.1:{free_port()}"
        arguments = ["--listen", address, "--redis-url", self._redis_url, *flags]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("SPECDEC_")} | ENVIRON
        with open(os.devnull, "rb") as nothing, self._log_path(name or module).open("ab") as log:
            if self._sources == ROOT:
                process = start_like(module, arguments, environ, Streams(nothing, log, log))
            else:
                command = [sys.executable, "-m", module, *arguments]
                environ["PYTHONPATH"] = str(self._sources)
                process = subprocess.Popen(
                    command, cwd=self._sources, env=environ, stdin=nothing, stdout=log, stderr=log
                )
        self._running[name or module] = process
        return address

    def wait_for(self, name: str, address: str, serves: Serves = is_serving) -> None:
        """Wait until a service serves; `serves` tells it for an address."""
        ends_s = time.monotonic() + START_TIMEOUT_S
        while not serves(address):
            is_alive = self._running[name].poll() is None and time.monotonic() < ends_s
            assert is_alive, f"{name} does not serve:\n{self._log_path(name).read_text()}"
            time.sleep(_POLL_S)

    def _log_path(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def signal(self, name: str, number: int) -> None:
        """Send a service a signal: SIGSTOP makes it hang, SIGCONT lets it continue."""
        self._running[name].send_signal(number)

    def kill(self, name: str) -> None:
        """End a service without grace."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def end(self, *names: str) -> None:
        """Let services drain, and wait for their ends."""
        ending = [self._running.pop(name) for name in names]
        for process in ending:
            process.terminate()
        for process in ending:
            assert process.wait(_STOP_S) == 0
