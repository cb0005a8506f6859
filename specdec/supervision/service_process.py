"""Starts a service module as a child process that never outlives its parent (the child's side is `child`).

Called by the parent of a service: `specdec up` on its own machine, and an actor of `ray` on its node.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import specdec
from specdec.supervision.forked_process import ForkedProcess
from specdec.supervision.process_template import Command, ProcessTemplate, Streams, TemplateFailed

_CHILD = "specdec.supervision.child"

_log = logging.getLogger(__name__)

PACKAGE_ROOT = str(Path(specdec.__file__).resolve().parents[1])

#: Defaults of a service's environment. gRPC reads this variable when it is imported. Its event engine hands every
#: message through two more threads than the polling that it replaced, which takes 40 % of a small call's time here
#: (docs/history/performance.md).
SERVICE_ENVIRONMENT = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}


def start_service(
    module: str, arguments: Sequence[str], environ: Mapping[str, str], template: ProcessTemplate | None = None
) -> subprocess.Popen[str] | ForkedProcess:
    """Start `python -m MODULE ARGUMENTS` in a session of its own, so that Ctrl-C reaches the parent alone.

    The child imports the same packages as this process, whatever its working directory is: without -P that directory
    would come first in the child's path, and it may hold a folder called specdec.

    Args:
        module: the service, run as `__main__`.
        arguments: its flags.
        environ: its whole environment, except for `SERVICE_ENVIRONMENT`.
        template: has imported what the service needs, in `environment_of(environ)`; None for none.

    Returns:
        The process. Both its outputs are one pipe of lines; it ends when its stdin is closed.
    """
    own = environment_of(environ)
    if template is not None and template.fits(own):
        try:
            return _forked(template, module, arguments, own)
        except TemplateFailed as error:
            _log.warning("starting %s without the template of processes: %s", module, error)
    return subprocess.Popen(
        _command(module, arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=own,
        start_new_session=True,
        text=True,
        errors="replace",
    )


def _command(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", _CHILD, module, *arguments]


def _forked(
    template: ProcessTemplate, module: str, arguments: Sequence[str], environ: Mapping[str, str]
) -> ForkedProcess:
    """Start the same process from a template. Raises TemplateFailed."""
    shown = _command(module, arguments)
    command = Command(_CHILD, [module, *arguments], environ, shown=shown, own_session=True)
    theirs_in, ours_in = _pipe()
    ours_out, theirs_out = _pipe()
    with theirs_in, theirs_out:
        try:
            process = template.start(command, Streams(theirs_in, theirs_out, theirs_out))
        except TemplateFailed:
            ours_in.close()
            ours_out.close()
            raise
    process.stdin, process.stdout = ours_in, ours_out
    return process


def _pipe() -> tuple[IO[str], IO[str]]:
    """Return the two ends of a pipe, the one to read first."""
    reader, writer = os.pipe()
    return open(reader, errors="replace"), open(writer, "w")


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a service."""
    return {**SERVICE_ENVIRONMENT, **environ, "PYTHONPATH": python_path(environ)}


def outcome_of(exit_code: int) -> str:
    """Return how a process ended: "signal 9", or its exit code."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def python_path(environ: Mapping[str, str]) -> str:
    """Return the PYTHONPATH with which a child process imports the same packages as this process."""
    return os.pathsep.join(filter(None, (PACKAGE_ROOT, environ.get("PYTHONPATH"))))
