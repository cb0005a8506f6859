"""The services of the last release, from the repository's history, to run beside today's.

    with Services(unpack(last_release(), folder), redis_url, logs) as old:
        old.start("coordinator", "--tokenizer", tokenizer)

The last release is the newest tag `v*`, or in a clone without tags the newest commit `Release X.Y.Z`. Its sources are
unpacked into a folder and run with the packages of this environment.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.support.process_template import ENVIRON
from tests.support.stack import START_TIMEOUT_S, free_port, is_serving

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("specdec", "coordinator", "draft_service", "target_service", "gateway")
_NEWEST_TAG = ("describe", "--tags", "--abbrev=0", "--match", "v*")
_NEWEST_RELEASE = ("log", "-1", "--format=%H", "--extended-regexp", "--grep=^Release [0-9]+[.][0-9]+[.][0-9]+$")
_POLL_S = 0.1
#: Longest wait for the end of a service, which first drains.
_STOP_S = 180.0


def last_release() -> str:
    """Return the tag or commit of the last release; skip the test in a clone without history."""
    for command in (_NEWEST_TAG, _NEWEST_RELEASE):
        found = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.strip()
    pytest.skip("this clone has neither a tag nor the commit of a release")


def unpack(release: str, folder: Path) -> Path:
    """Write the sources of a release into a folder, and return it."""
    archive = subprocess.run(["git", "archive", release, *PACKAGES], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


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

    def start(self, module: str, *flags: str, address: str = "") -> str:
        """Start a service and return its address once it serves."""
        address = address or f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", module, "--listen", address, "--redis-url", self._redis_url, *flags]
        log_path = self._logs / f"{module}-{address.rpartition(':')[2]}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(command, cwd=self._sources, env=self._environ(), stdout=log, stderr=log)
        self._running[module] = process
        ends_s = time.monotonic() + START_TIMEOUT_S
        while not is_serving(address):
            alive = process.poll() is None and time.monotonic() < ends_s
            assert alive, f"{module} does not serve:\n{log_path.read_text()}"
            time.sleep(_POLL_S)
        return address

    def end(self, *modules: str) -> None:
        """Let services drain, and wait for their ends."""
        ending = [self._running.pop(module) for module in modules]
        for process in ending:
            process.terminate()
        for process in ending:
            assert process.wait(_STOP_S) == 0

    def _environ(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
        return {**kept, **ENVIRON, "PYTHONPATH": str(self._sources)}
