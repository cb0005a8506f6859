"""`specdec up` and `specdec scale` as a user runs them, with the time of each line that `up` prints.

`ours` adds models and streams; `simulated` starts the parts one by one.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self

from specdec.client import Client

_STOP_S = 120
_SPECDEC = [sys.executable, "-m", "specdec.cli"]


class UpSystem:
    """`specdec up` in a child process. Use it by `with`; it is ready once entered."""

    def __init__(self, flags: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """
        Args:
            flags: flags of `specdec up`.
            environ: variables that are added to this process's environment.
        """
        self._command = [*_SPECDEC, "up", "--listen", "127.0.0.1:0", *flags]
        # The services choose their threads: a limit that is meant for tests would hold them.
        own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._environ = own | dict(environ or {})
        self._said: list[tuple[float, str]] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environ
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready grpc="):
            self._process.wait()
            self._reader.join()
            raise RuntimeError(f"specdec up did not start: {''.join(line for _, line in self._said)[-2000:]}")
        self.endpoint = line.split()[1].removeprefix("grpc=")
        self.client = Client(self.endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    @property
    def pid(self) -> int:
        return self._process.pid

    def scale(self, *counts: str) -> None:
        """Scale the system and return once it is done."""
        command = [*_SPECDEC, "scale", *counts, "--endpoint", self.endpoint]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def replicas(self, role: str) -> set[str]:
        return set(self.sessions(role))

    def sessions(self, role: str) -> dict[str, int]:
        """Return the number of sessions that each replica of a role holds."""
        pools = [pool for pool in self.client.info().pools if pool.role == role]
        return {replica.replica_id: replica.num_sessions for pool in pools for replica in pool.replicas}

    def said_s(self, words: str) -> float:
        """Return when `up` first printed a line, in seconds."""
        return next(when for when, line in self._said if line == words + "\n")

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append((time.monotonic(), line))
