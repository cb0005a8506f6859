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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.process_template import ENVIRON
from tests.support.stack import START_TIMEOUT_S, free_port, is_serving

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.1
#: Longest wait for the end of a service, which first drains.
_STOP_S = 180.0


class Services:
    """Processes of one version, which find each other in a Redis."""

    def __init__(self, sources: Path, redis_url: str, logs: Path) -> None:
        self._sources, self._redis_url, self._logs = sources, redis_url, logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def start(
        self,
        module: str,
        *flags: str,
        address: str = "",
        name: str = "",
        serves: Callable[[str], bool] = is_serving,
    ) -> str:
        """Start a service and return its address once it serves.

        Args:
            module: the service, which is run by `python -m`.
            flags: its further flags.
            address: HOST:PORT to listen on; "": a free port of this machine.
            name: name for `end`, `kill` and `signal`; "": the module's.
            serves: whether the service at an address serves.
        """
        address = address or f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", module, "--listen", address, "--redis-url", self._redis_url, *flags]
        log_path = self._logs / f"{module}-{address.rpartition(':')[2]}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(command, cwd=self._sources, env=self._environ(), stdout=log, stderr=log)
        self._running[name or module] = process
        ends_s = time.monotonic() + START_TIMEOUT_S
        while not serves(address):
            alive = process.poll() is None and time.monotonic() < ends_s
            assert alive, f"{module} does not serve:\n{log_path.read_text()}"
            time.sleep(_POLL_S)
        return address

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

    def _environ(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
        return {**kept, **ENVIRON, "PYTHONPATH": str(self._sources)}
