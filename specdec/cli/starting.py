"""Waits for a `specdec up` that is starting, so that commands which need it can be typed right after it."""

from __future__ import annotations

import contextlib
import socket
import time

from specdec.cli import control
from specdec.cli.control_folder import is_any_starting
from specdec.cli.progress import Waiting
from specdec.contract.errors import Unavailable
from specdec.settings.addresses import split_address

#: Time in which a `specdec up` that was started at the same moment makes its marker.
_GRACE_S = 0.5
_POLL_S = 0.05
_CONNECT_TIMEOUT_S = 1.0


def await_start(endpoint: str) -> None:
    """Return once the system at `endpoint` is not starting any more, and show on stderr what its start waits for.

    Returns at once if the system serves or is on another machine, and after a moment if nothing listens there and no
    `specdec up` is being imported: the command's own call then says so.

    Raises:
        Unavailable: the system ended before it served.
    """
    port = control.local_port(endpoint)
    if port is None:
        return
    deadline_s = time.monotonic() + _GRACE_S
    while not control.is_running(port):
        if _accepts_connections(endpoint) or (time.monotonic() >= deadline_s and not is_any_starting()):
            return
        time.sleep(_POLL_S)
    is_ready = False
    waiting: Waiting | None = None
    with contextlib.ExitStack() as opened:
        for answer in control.ask(port, {"wait": {}}):
            is_ready = "ready" in answer
            if not is_ready:  # a system that serves already shows nothing
                waiting = waiting or opened.enter_context(Waiting(what=f"waiting for specdec up at {endpoint}"))
                waiting.show(answer["stage"])
    if not is_ready:
        raise Unavailable(f"specdec up at {endpoint} ended before it was ready", reason="COORDINATOR_UNAVAILABLE")


def _accepts_connections(endpoint: str) -> bool:
    try:
        with socket.create_connection(split_address(endpoint), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
