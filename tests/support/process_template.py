"""Processes of services that share one import of their packages: a template imports, and forks a service on request.

    process = start_like("target_service", ["--model", "..."], environ, Streams(nothing, log, log))
    process.send_signal(signal.SIGKILL)
    process.wait()

A replica spends nearly all of its start on the import of torch and transformers: 6.3 s of processor time against 0.4 s
from here. A forked process has a pid, memory, environment, arguments and standard streams of its own; it runs the
service as `__main__`, handles signals and exits as `python -m SERVICE` does. Three things differ: its packages are
imported already, its parent is the template, and `/proc/PID/cmdline` shows the template's command. Tests of
`specdec up` and of the commands in Compose start their services in full.

Called by `tests.support.stack`, `tests.support.rank_rig` and, in the template, by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, ClassVar, NamedTuple

from specdec.service.memory import collector_at_rest

#: Modules that the process of a service imports by the time it serves; those of replicas import torch.
_REPLICA = (
    "specdec.engine.loader", "specdec.engine.loop.replica", "draft_service.__main__", "draft_service.proposer",
    "specdec.engine.parallel.follower", "specdec.engine.parallel.rank_loader", "target_service.__main__",
    "target_service.verifier", "transformers.models.llama.modeling_llama",
)  # fmt: skip
_FRONT = ("coordinator.__main__", "gateway.__main__")
_PRELOADED = {
    "draft_service": _REPLICA, "target_service": _REPLICA, "tests.support.rank_rig": _REPLICA, "coordinator": _FRONT,
    "gateway": _FRONT,
}  # fmt: skip

#: Variables that a service reads after its imports. Others may change what an import does.
_READ_LATE = ("SPECDEC_", "PYTEST_")
_MAX_REQUEST_BYTES = 1 << 17


class Streams(NamedTuple):
    """Files that become the standard streams of a process."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]


class ForkedProcess:
    """A process that a template forked, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, outcome: socket.socket) -> None:
        """
        Args:
            pid: of the process.
            outcome: receives the exit code when the process has ended.
        """
        self.pid = pid
        self.returncode: int | None = None
        self._outcome = outcome

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs.
            RuntimeError: the template ended before the process.
        """
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._outcome, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            answer = self._outcome.recv(64)
            self._outcome.close()
            if not answer:
                raise RuntimeError("the template of processes ended")
            self.returncode = int(answer)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_like(
    module: str, arguments: Sequence[str], environ: Mapping[str, str], streams: Streams
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start `python -m MODULE ARGUMENTS` from a template of its service.

    It is a plain process where no template is like it: an unknown module, or another environment for the imports.

    Args:
        module: the service.
        arguments: its flags.
        environ: its whole environment.
        streams: its stdin, stdout and stderr.
    """
    template = _Template.of(module, environ)
    if template is not None:
        return template.start(module, arguments, environ, streams)
    return start_process([sys.executable, "-m", module, *arguments], environ, streams)


def start_process(command: Sequence[str], environ: Mapping[str, str], streams: Streams) -> subprocess.Popen[bytes]:
    """Start a plain process."""
    stdin, stdout, stderr = streams
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=dict(environ))


class _Template:
    """The client's side of a template. It ends with this process."""

    _made: ClassVar[dict[tuple[str, ...], _Template]] = {}

    def __init__(self, preloaded: Sequence[str], environ: Mapping[str, str]) -> None:
        self._read_early = _read_early(environ)
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __spec__.name, str(theirs.fileno()), *preloaded]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=dict(environ), pass_fds=[theirs.fileno()]
            )
        atexit.register(self._close)

    @classmethod
    def of(cls, module: str, environ: Mapping[str, str]) -> _Template | None:
        preloaded = _PRELOADED.get(module)
        if preloaded is None or sys.platform != "linux":
            return None
        if preloaded not in cls._made:
            cls._made[preloaded] = cls(preloaded, environ)
        template = cls._made[preloaded]
        return template if template._read_early == _read_early(environ) else None

    def start(
        self, module: str, arguments: Sequence[str], environ: Mapping[str, str], streams: Streams
    ) -> ForkedProcess:
        request = {"module": module, "arguments": [*arguments], "environ": dict(environ), "cwd": os.getcwd()}
        outcome, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            descriptors = [theirs.fileno(), *(stream.fileno() for stream in streams)]
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            answer = self._control.recv(64)
        if not answer:
            raise RuntimeError(f"the template of processes ended with exit code {self._process.wait()}")
        return ForkedProcess(int(answer), outcome)

    def _close(self) -> None:
        self._control.close()
        self._process.wait()


def _read_early(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(_READ_LATE)}


@dataclass
class _Request:
    """What a forked process is to become."""

    module: str
    arguments: list[str]
    environ: dict[str, str]
    cwd: str
    descriptors: list[int] = field(default_factory=list)
    """The socket for its exit code, and its standard streams."""


def _serve(control: socket.socket) -> _Request | None:
    """Fork a process for every request. Returns the request in each forked process, and None at the end."""
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker.fileno())
    outcomes: dict[int, socket.socket] = {}
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    waiting.register(wake, select.POLLIN)
    while True:
        ready = dict(waiting.poll())
        if wake.fileno() in ready:
            wake.recv(4096)
            _report_ended(outcomes)
        if control.fileno() not in ready:
            continue
        message, descriptors, *_ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 4)
        if not message:
            return None
        request = _Request(**json.loads(message), descriptors=descriptors)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (control, wake, waker, *outcomes.values()):
                end.close()
            return request
        outcome, *streams = descriptors
        for stream in streams:
            os.close(stream)
        outcomes[pid] = socket.socket(fileno=outcome)
        control.send(str(pid).encode())


def _report_ended(outcomes: dict[int, socket.socket]) -> None:
    while outcomes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with outcomes.pop(pid) as outcome, contextlib.suppress(BrokenPipeError):
            outcome.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: _Request) -> None:
    """Run a service in this process, as `python -m` would."""
    outcome, *streams = request.descriptors
    os.close(outcome)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environ)
    sys.argv[1:] = request.arguments
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    with collector_at_rest():
        for module in sys.argv[2:]:
            importlib.import_module(module)
            if module.endswith(".__main__"):
                del sys.modules[module]  # a service runs it once more, as `__main__`
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("error: an import started a thread, which a fork would not copy")
    request = _serve(control)
    if request is not None:
        _become(request)


if __name__ == "__main__":
    _main()
