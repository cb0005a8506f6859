"""Starts a service module as a child process that never outlives its parent (the child's side is `child`).

Called by the parent of a service: `specdec up` on its own machine, and an actor of `specdec.cluster` on its node.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import specdec

PACKAGE_ROOT = str(Path(specdec.__file__).resolve().parents[1])

#: Defaults of a service's environment. gRPC reads this variable when it is imported. Its event engine hands every
#: message through two more threads than the polling that it replaced, which takes 40 % of a small call's time here
#: (docs/history/performance.md).
SERVICE_ENVIRONMENT = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}


def start_service(module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start `python -m MODULE ARGUMENTS` in a session of its own, so that Ctrl-C reaches the parent alone.

    The child imports the same packages as this process, whatever its working directory is: without -P that directory
    would come first in the child's path, and it may hold a folder called specdec.

    Args:
        module: the service, run as `__main__`.
        arguments: its flags.
        environ: its whole environment, except for `SERVICE_ENVIRONMENT`.

    Returns:
        The process. Both its outputs are one pipe of lines; it ends when its stdin is closed.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "specdec.supervision.child", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**SERVICE_ENVIRONMENT, **environ, "PYTHONPATH": python_path(environ)},
        start_new_session=True,
        text=True,
        errors="replace",
    )


def outcome_of(exit_code: int) -> str:
    """Return how a process ended: "signal 9", or its exit code."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def python_path(environ: Mapping[str, str]) -> str:
    """Return the PYTHONPATH with which a child process imports the same packages as this process."""
    return os.pathsep.join(filter(None, (PACKAGE_ROOT, environ.get("PYTHONPATH"))))
