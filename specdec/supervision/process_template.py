"""Services that share one import of their packages: a template process imports them, and forks a service on request.

    template = ProcessTemplate(["specdec.engine.loader"], environ)
    process = template.start(Command("target_service", ["--model", "..."], environ), Streams(nothing, log, log))

A replica spends nearly all of its start on the import of torch and transformers: 6 s of processor time against 0.4 s
from a template. A forked process is a child of the caller, with memory, environment, arguments and standard streams of
its own; it runs the service as `__main__` and ends as `python -m SERVICE` does. It shares the pages of what was
imported, so several replicas need less memory.

The template forks twice, and its caller adopts the second process (PR_SET_CHILD_SUBREAPER), so that it learns the exit
code from the kernel, also when the template is gone. Linux only. The template must not have threads, because a fork
copies only one, and nothing that it imports may use a GPU, because CUDA does not survive a fork.

Called by `service_process`, by `coordinator.text.text_process` for its children, and by `tests.support`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
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
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from specdec.supervision.forked_process import ForkedProcess

_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST_BYTES = 1 << 17
#: Room for the command line of a forked process, which `ps` shows in the place of the template's.
_COMMAND_BYTES = 16_384
#: First message of a template, once it has imported everything.
_READY = b"ready"
#: Time after which a template that has not imported everything is given up.
_IMPORT_S = 60.0
#: Time after which a template that does not answer a request is given up; a fork takes milliseconds.
_ANSWER_S = 3.0

#: Variables that a service reads after its imports. Others may change what an import does.
_READ_LATE = ("SPECDEC_", "PYTEST_")


class Streams(NamedTuple):
    """Files that become the standard streams of a process."""

    stdin: IO[Any]
    stdout: IO[Any]
    stderr: IO[Any]


@dataclass(frozen=True)
class Command:
    """A service: `python -m MODULE ARGUMENTS`."""

    module: str
    arguments: Sequence[str]
    environ: Mapping[str, str]
    """Its whole environment."""
    shown: Sequence[str] = ()
    """Words of its command line for `ps`; empty: python -m MODULE ARGUMENTS."""
    own_session: bool = False
    """True for a process in a session of its own, which Ctrl-C does not reach."""


class TemplateFailed(Exception):
    """The template cannot start a process; a plain one can be started instead."""


class ProcessTemplate:
    """The caller's side of a template process. It ends with this process. Any thread may use it."""

    def __init__(
        self, preloaded: Sequence[str], environ: Mapping[str, str], *, options: Sequence[str] = ("-P",)
    ) -> None:
        """Start to import in the background.

        Args:
            preloaded: modules to import.
            environ: environment of the import, which does not get variables that services read later.
            options: of the interpreter; -P keeps the working directory out of its path.
        """
        self._read_early = _read_early(environ)
        self._lock = threading.Lock()
        self._is_ready = False
        self._import_until_s = time.monotonic() + _IMPORT_S
        self._is_given_up = False
        self.has_started = False
        """True once it has started a process."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_IMPORT_S)
        command = [sys.executable, *options, "-m", __name__, str(theirs.fileno()), *preloaded, _COMMAND_BYTES * " "]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=self._read_early,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Return whether a process of this environment would have imported the same."""
        return self._read_early == _read_early(environ)

    @property
    def is_ready(self) -> bool:
        """True once the imports have ended, or the template has. One that imports for too long is ended."""
        if self._is_ready:
            return True
        with self._lock:
            if not self._is_ready:
                if time.monotonic() > self._import_until_s:
                    self._give_up()
                waiting = select.poll()  # select.select would refuse descriptors above 1024
                waiting.register(self._control, select.POLLIN)
                if waiting.poll(0):
                    with contextlib.suppress(OSError):
                        self._control.recv(64)  # its word that it is ready
                    self._is_ready = True
            return self._is_ready

    @property
    def is_alive(self) -> bool:
        """False once the template has ended or was given up."""
        return not self._is_given_up and self._process.poll() is None

    def start(self, command: Command, streams: Streams) -> ForkedProcess:
        """Start a process. Wait for the template's imports if they have not ended.

        Raises:
            TemplateFailed: the template has ended, or does not answer. It is ended then, because a late answer would be
                taken for that of the next request. A request that is too long is refused too, and the template goes on.
        """
        request = _Request(**{**asdict(command), "cwd": os.getcwd(), "parent": os.getpid()})
        content = json.dumps(asdict(request)).encode()
        if len(content) > _MAX_REQUEST_BYTES:
            raise TemplateFailed(f"arguments and environment take {len(content)} bytes, more than a template reads")
        with self._lock, _adoption:
            try:
                if not self._is_ready:
                    self._control.recv(64)
                    self._is_ready = True
                self._control.settimeout(_ANSWER_S)
                socket.send_fds(self._control, [content], [stream.fileno() for stream in streams])
                answer = self._control.recv(64)
            except OSError as error:
                self._give_up()
                raise TemplateFailed(str(error)) from error
            if not answer or not int(answer):
                self._give_up()
                raise TemplateFailed("the template of processes has ended, or its children are not adopted")
            try:
                process = ForkedProcess(int(answer))
            except OSError as error:  # no descriptor is left, or the kernel has none of processes
                os.kill(int(answer), signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(answer), 0)
                raise TemplateFailed(str(error)) from error
            self.has_started = True
            return process

    def _give_up(self) -> None:
        self._is_given_up = True
        self._process.kill()

    def close(self) -> None:
        """End the template, also while it imports; its processes go on. Idempotent."""
        atexit.unregister(self.close)
        self._process.kill()
        with self._lock:
            self._is_ready = True  # a caller that waits for the import goes on, and `start` tells it the end
            self._control.close()
            self._process.wait()


def shared_template(
    preloaded: tuple[str, ...], environ: Mapping[str, str], *, options: tuple[str, ...] = ("-P",)
) -> ProcessTemplate | None:
    """Return this process's own template of these modules, made at the first call and again after it has ended.

    None where a plain process must be started: not on Linux, for an environment that is not the template's, or once a
    template has ended without having started anything.

    Args:
        preloaded: modules to import.
        environ: environment of the process to start.
        options: of the interpreter, see `ProcessTemplate`.
    """
    if sys.platform != "linux":
        return None
    with _shared_lock:
        template = _shared.get((preloaded, options))
        if template is not None and not template.is_alive:
            template.close()
            if not template.has_started:
                return None
        if template is None or not template.is_alive:
            template = _shared[preloaded, options] = ProcessTemplate(preloaded, environ, options=options)
    return template if template.fits(environ) else None


_shared: dict[tuple[tuple[str, ...], tuple[str, ...]], ProcessTemplate] = {}
_shared_lock = threading.Lock()


class _Adoption:
    """Makes this process the parent of orphans among its descendants while any thread is within the context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0

    def __enter__(self) -> None:
        self._add(1)

    def __exit__(self, *_: object) -> None:
        self._add(-1)

    def _add(self, change: int) -> None:
        with self._lock:
            self._num_within += change
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(self._num_within > 0), 0, 0, 0)


#: One for all templates: the kernel keeps one answer for the whole process.
_adoption = _Adoption()


def _read_early(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(_READ_LATE)}


@dataclass
class _Request:
    """Message to the template: the service to fork."""

    module: str
    arguments: list[str]
    environ: dict[str, str]
    shown: list[str]
    own_session: bool
    cwd: str
    parent: int
    """Process that adopts it."""
    descriptors: list[int] = field(default_factory=list)
    """Its standard streams."""


def _serve(control: socket.socket) -> _Request | None:
    """Fork a process for every request. Return the request in each forked process, and None at the end."""
    while True:
        message, descriptors, *_ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 3)
        if not message:
            return None
        request = _Request(**{**json.loads(message), "descriptors": descriptors})
        between = os.fork()
        if between == 0:
            between = os.getpid()
            try:
                if os.fork() != 0:
                    os._exit(0)
            except OSError:  # a limit of processes
                control.send(b"0")
                os._exit(0)
            _await_adoption(between)
            is_adopted = os.getppid() == request.parent
            control.send(str(os.getpid() if is_adopted else 0).encode())
            control.close()
            if not is_adopted:
                os._exit(0)
            return request
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored
            os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _await_adoption(parent: int) -> None:
    """Return once `parent`, which is about to exit, is not the parent of this process any more."""
    while os.getppid() == parent:
        os.sched_yield()


def _become(request: _Request) -> None:
    """Run a service in this process, as `python -m` would."""
    if request.own_session:
        os.setsid()
    for number, stream in enumerate(request.descriptors):
        os.dup2(stream, number)
        os.close(stream)
    if os.getcwd() != request.cwd:  # a folder that this process is in already may be one that it cannot enter
        os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environ)
    sys.argv[1:] = request.arguments
    _show_command(request.shown or [sys.executable, "-m", request.module, *request.arguments])
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _show_command(words: Sequence[str]) -> None:
    """Write words over the command line of this process, which ends with `_COMMAND_BYTES` of room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end (proc(5))
    if end > begin:
        content = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
        ctypes.memmove(begin, content.ljust(end - begin, b"\0"), end - begin)


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # it takes a third of the time of the imports
    for module in sys.argv[2:-1]:
        importlib.import_module(module)
        if module.endswith(".__main__"):
            del sys.modules[module]  # a service runs it once more, as `__main__`
    gc.freeze()
    gc.enable()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("error: an import started a thread, which a fork would not copy")
    try:
        control.send(_READY)
    except OSError:
        return  # the caller has ended
    request = _serve(control)
    if request is not None:
        _become(request)


if __name__ == "__main__":
    _main()
