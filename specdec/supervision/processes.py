"""A service as a child process of `specdec up`: start, watch, stop. Independent of which service it is."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

from specdec.supervision.process_template import ProcessTemplate
from specdec.supervision.service_process import outcome_of, start_service
from specdec.supervision.services import STOP_GRACE_S, Service

#: Time to read the last lines of a child that has ended. A grandchild may hold the pipe open for longer.
_LAST_LINES_S = 5.0
#: A service listens seconds after its port was chosen. By then a connection may have taken any port of the system's
#: ephemeral range, which begins at 32,768 on Linux and at 49,152 elsewhere.
_PORTS = range(20_000, 30_000)


def free_ports(count: int) -> list[int]:
    """Return different free loopback TCP ports outside the system's ephemeral range."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            port = random.SystemRandom().choice(_PORTS)
            try:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                ports.append(port)
    return ports


class Child(Service):
    """One service as a child process."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        shown_level: str = "warning",
        template: ProcessTemplate | None = None,
    ) -> None:
        """Start `python -m MODULE ARGUMENTS`. It ends when this process ends, by SIGKILL too.

        Args:
            name: name of the service.
            module: its module.
            arguments: its flags.
            environ: its whole environment.
            shown_level: see `Service`.
            template: has imported what the module needs; None for none.
        """
        super().__init__(name, shown_level=shown_level)
        self.arguments = tuple(arguments)
        self._module, self._environ, self._template = module, environ, template
        self._process = start_service(module, arguments, environ, template)
        self._reader = threading.Thread(target=self._read, name=f"{name}-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def again(self) -> Child:
        return Child(
            self.name,
            self._module,
            self.arguments,
            self._environ,
            shown_level=self._shown_level,
            template=self._template,
        )

    def ending(self) -> str:
        """Return "signal 9" or the exit code, and the reason if the child ended before `relay()`."""
        outcome = outcome_of(self._process.wait())
        self._reader.join(_LAST_LINES_S)  # relay its last lines before reporting its end
        return outcome if outcome.startswith("signal") else self._with_reason(outcome)

    def last_words(self) -> str:
        """Return the last line that says why the child ended, or its exit code."""
        self._process.wait()
        self._reader.join(_LAST_LINES_S)
        return self._held_words() or f"exit code {self._process.returncode}"

    def ask_to_stop(self) -> None:
        """Send SIGTERM: the child drains and ends."""
        self._process.terminate()

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        self.ask_to_stop()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_LAST_LINES_S)
        # A file that a thread reads cannot be closed. The reader ends with the grandchild that holds the pipe.
        pipes = (self._process.stdin, None if self._reader.is_alive() else self._process.stdout)
        for pipe in pipes:
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None  # it was opened above
        for line in self._process.stdout:
            self._hear(line)
