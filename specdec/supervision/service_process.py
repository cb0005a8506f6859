"""A service module as a child process that never outlives its parent (`specdec.supervision.child` is its end of that).

Started by whoever keeps a service: `specdec up` on its own machine, an actor on its node (`rank_host`). Not here: what
becomes of what it writes, and when it is started again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import specdec

PACKAGE_ROOT = str(Path(specdec.__file__).resolve().parents[1])

#: Set for services unless the caller has its own. gRPC reads it when it is imported. Its event engine hands every
#: message through two more threads than the polling it replaced: 40 % of a small call's time here
#: (docs/history/performance.md).
SERVICE_ENVIRONMENT = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}


def start_service(module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Starts `python -m MODULE ARGUMENTS` in a session of its own: Ctrl-C reaches the parent alone.

    Whatever folder this is started from, the child imports the packages that we are: without -P its current folder
    would come first, where a folder called specdec may lie.

    Args:
        module: of the service, run as `__main__`.
        arguments: its flags.
        environ: its whole environment, but for what every service has.

    Returns:
        The process. Both its outputs are one pipe of lines; it ends when its stdin does.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "specdec.supervision.child", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**SERVICE_ENVIRONMENT, **environ, "PYTHONPATH": _python_path(environ)},
        start_new_session=True,
        text=True,
        errors="replace",
    )


def outcome_of(exit_code: int) -> str:
    """How a process ended: "signal 9", or its exit code."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def _python_path(environ: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, (PACKAGE_ROOT, environ.get("PYTHONPATH"))))
