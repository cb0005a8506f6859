"""`specdec` as a user runs it: real processes. For tests of the command line."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

SPECDEC = [sys.executable, "-m", "specdec.cli"]
ENVIRON = {key: value for key, value in os.environ.items() if not key.startswith("SPECDEC_")} | {"OMP_NUM_THREADS": "1"}

_TEMPLATE = "specdec.supervision.process_template"

#: Lines that `up` and its children write when nothing is wrong.
_START_LINES = (
    r"starting \(\d+ s\): .*",
    r"\[\w+-\d+\] (loading |loaded weights |KV cache |self-check|threads: |warming up).*",
    r"\[\w+-\d+\] (compiling native |native kernels read |(keeping|kept|read) packed weights ).*",
    r"\[[\w-]+\] listening",
    r"stopping|stopped",
    r"\[coordinator\] (draft|target) replica \S+ at \S+ connected, .*",
)


def start_up(*flags: str, **environ: str) -> tuple[subprocess.Popen[str], str]:
    """A running `specdec up` and its endpoint."""
    up = subprocess.Popen(
        [*SPECDEC, "up", "--listen", "127.0.0.1:0", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON | environ,
    )  # fmt: skip
    assert up.stdout is not None
    line = up.stdout.readline()
    found = re.fullmatch(r"ready grpc=(127\.0\.0\.1:\d+)\n", line)
    if found is None:
        up.kill()
        pytest.fail(f"up printed {line!r}; stderr: {up.communicate()[1]}")
    return up, found[1]


def complaints(stderr: str) -> str:
    """Return what `up` wrote to stderr, without the lines that it and its children write when nothing is wrong."""
    return re.sub(rf"^({'|'.join(_START_LINES)})\n", "", stderr, flags=re.MULTILINE)


def specdec(*args: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SPECDEC, *args], input=stdin, capture_output=True, text=True, env=ENVIRON | environ)


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """The services of `up`, and not what keeps its store or the imports of its replicas."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")  # a thread is the parent of what it has started
    pids = " ".join(path.read_text() for path in tasks).split()
    return [int(pid) for pid in pids if not {"redis", _TEMPLATE} & set(_command_of(pid))]


def store_of(process: subprocess.Popen[str]) -> int:
    """The process id of the redis-server that `up` has started."""
    keepers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (keeper,) = [pid for pid in keepers if "redis" in _command_of(pid)]
    own = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    (server,) = [pid for pid in own if "redis-server" in _command_of(pid)[0]]  # it writes its own title
    return int(server)


def _command_of(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return [""]


def child_running(process: subprocess.Popen[str], module: str) -> int:
    """The process id of `up`'s child that runs a service; waits until there is one."""
    while True:
        for pid in children_of(process):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    return pid
        time.sleep(0.05)


def wait_until_gone(pids: list[int]) -> None:
    """Returns when none of the processes runs any more; the test's own time limit is the bound."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            select.select([descriptor], [], [])
            os.close(descriptor)
