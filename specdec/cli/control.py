"""The control socket of `specdec up`: other commands ask it how far a start is, for other numbers of replicas, to stop.

It is a Unix socket named after the coordinator's port, in a folder that only its user may enter. So it needs neither a
store nor a secret, and systems that share a Redis stay apart. Each connection is one request, a line of JSON, answered
by lines of JSON. The requests:

    {"wait": {}}                                     answered with {"ready": true} once the system serves
    {"draft": 3}                                     numbers of replicas by role; answered with {"counts": ...}
    {"join": {"pool": NAME, "model": PATH}}          a further draft model; answered with {"counts": ...}
    {"metrics": {}}                                  answered with {"metrics": ...}, addresses by name of service
    {"stop": {}}                                     the connection is closed when the process has ended

Until then, and at least twice a second, {"stage": TEXT} says what is being waited for. A refusal is {"error": LINE},
where LINE is an error line ("error: message (REASON)").
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from specdec.cli.control_folder import control_folder
from specdec.client.endpoints import DEFAULT_ENDPOINT
from specdec.contract.errors import Internal, InvalidRequest, SpecdecError, Unavailable, error_line, parse_error_line
from specdec.settings.addresses import join_address, split_address
from specdec.supervision.fleet import Fleet, Scaling

_MAX_REQUEST_BYTES = 4096
_REQUEST_TIMEOUT_S = 5.0
_MALFORMED = "a request is one line of JSON, a whole number for each role"
#: Longest time between two lines of an answer. A caller that has left is noticed when a line is written.
_STAGE_INTERVAL_S = 0.5
#: Pause after an accept that failed for lack of file descriptors.
_FILE_WAIT_S = 0.5
#: Silence after which the `specdec up` that answers a request counts as hung.
_SILENCE_TIMEOUT_S = 60.0
#: Age up to which a socket that does not answer may belong to a process that does not listen yet.
_STARTING_S = 60.0


class RunningSystem:
    """The state of one `specdec up` that other commands may ask for. May be used by any thread."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        """Set to end the system."""
        self.stage = "starting"
        """Stage of the start."""
        self._fleet: Fleet | None = None
        self._metrics: Callable[[], Mapping[str, str]] = dict
        self._is_ready = threading.Event()

    def set_ready(self, fleet: Fleet, metrics: Callable[[], Mapping[str, str]] = dict) -> None:
        """Report that the system serves, and take requests for other numbers of replicas from now on.

        Args:
            fleet: the services.
            metrics: returns the metrics addresses by name of service; called by any thread.
        """
        self._fleet, self._metrics = fleet, metrics
        self._is_ready.set()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the system serves; return whether it does."""
        return self._is_ready.wait(timeout_s)

    def metrics(self) -> dict[str, str]:
        """Return the metrics addresses by name of service; empty while the system starts, or without metrics."""
        return dict(self._metrics())

    @property
    def fleet(self) -> Fleet:
        """The services. Raises Unavailable while the system starts."""
        if self._fleet is None:
            raise Unavailable(f"the system is still starting: {self.stage}", reason="COORDINATOR_UNAVAILABLE")
        return self._fleet


class ControlSocket:
    """Answers requests while the context is open."""

    def __init__(self, port: int, system: RunningSystem) -> None:
        """`port` is the coordinator's."""
        self._port, self._system = port, system
        self._path: Path | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        """Open the socket.

        Raises:
            Unavailable: another `specdec up` of this user has the port (ADDRESS_IN_USE); or the socket cannot be
                opened, so that other commands will not find this system.
        """
        try:
            folder = control_folder(make=True)
            _remove_stale_sockets(folder)
            path = folder / f"{self._port}.sock"
            if _is_answered(path):
                raise address_in_use(self._port)
            path.unlink(missing_ok=True)
            self._listener.bind(str(path))
            self._listener.listen()
            self._path = path
        except OSError as error:
            self._listener.close()
            raise Unavailable(str(error)) from error
        except Unavailable:
            self._listener.close()
            raise
        threading.Thread(target=self._accept, name="control", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other systems of this user run
                self._path.parent.rmdir()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener was closed, or no file descriptor is left; then the caller waits
                if self._closing.wait(_FILE_WAIT_S):
                    return
            else:
                threading.Thread(target=self._serve, args=(connection,), name="control-request", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_REQUEST_TIMEOUT_S)
        with (
            contextlib.suppress(OSError),
            connection,
            connection.makefile("rw", encoding="utf-8", errors="replace") as file,
        ):
            request = file.readline(_MAX_REQUEST_BYTES)
            if _has_left(connection):  # its call timed out, so the request must have no effect
                return
            for answer in self._answers(request):
                file.write(json.dumps(answer) + "\n")
                file.flush()

    def _answers(self, request: str) -> Iterator[Mapping[str, Any]]:
        try:
            wanted = _parsed(request)
            if set(wanted) == {"wait"}:
                yield from self._wait()
            elif set(wanted) == {"metrics"}:
                yield {"metrics": self._system.metrics()}
            elif set(wanted) == {"stop"}:
                yield from self._stop()
            elif set(wanted) == {"join"}:
                yield from _follow(self._system.fleet.join(*_pool_and_model(wanted["join"])))
            else:
                yield from _follow(self._system.fleet.scale(_counts(wanted)))
        except SpecdecError as error:
            yield {"error": error_line(error)}

    def _wait(self) -> Iterator[Mapping[str, Any]]:
        while not self._system.wait_ready(0.0):
            yield {"stage": self._system.stage}
            self._system.wait_ready(_STAGE_INTERVAL_S)
        yield {"ready": True}

    def _stop(self) -> Iterator[Mapping[str, Any]]:
        self._system.stop.set()
        while True:  # until this process ends
            yield {"stage": "stopping"}
            time.sleep(_STAGE_INTERVAL_S)


def _follow(scaling: Scaling) -> Iterator[Mapping[str, Any]]:
    while not scaling.ended.wait(_STAGE_INTERVAL_S):
        yield {"stage": scaling.stage}
    yield {"error": error_line(scaling.failure)} if scaling.failure else {"counts": scaling.counts}


def ask(port: int, request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Send a request to the `specdec up` of a port on this machine; yield its answers, line by line.

    The last answer has `ready`, `counts` or `metrics`, unless the `specdec up` ends before.

    Raises:
        Unavailable: this user runs no `specdec up` there, or it does not answer.
        SpecdecError: it refuses the request.
    """
    try:
        path = control_folder(make=False) / f"{port}.sock"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SILENCE_TIMEOUT_S)
            connection.connect(str(path))
            with _lines_of(connection) as file:
                file.write(json.dumps(request) + "\n")
                file.flush()
                for line in file:
                    answer = json.loads(line)
                    if "error" in answer:
                        raise parse_error_line(answer["error"]) or Internal(str(answer["error"]))
                    yield answer
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise Unavailable(
            f"no specdec up of yours serves port {port} on this machine", reason="COORDINATOR_UNAVAILABLE"
        ) from error
    except (ConnectionResetError, BrokenPipeError):  # it has ended: the answers end without a final one
        return
    except TimeoutError as error:
        raise Unavailable(
            f"the specdec up of port {port} has not answered for {_SILENCE_TIMEOUT_S:g} s",
            reason="COORDINATOR_UNAVAILABLE",
        ) from error
    except OSError as error:
        raise Unavailable(f"specdec up cannot be reached: {error.strerror or error}") from error


def is_running(port: int) -> bool:
    """Return whether a `specdec up` of this user, ready or starting, answers for a port on this machine."""
    try:
        return _is_answered(control_folder(make=False) / f"{port}.sock")
    except OSError:
        return False


def require_unused(port: int) -> None:
    """Check that no `specdec up` of this user, ready or starting, has a port on this machine.

    Raises:
        Unavailable: one has (ADDRESS_IN_USE).
    """
    if is_running(port):
        raise address_in_use(port)


def address_in_use(port: int) -> Unavailable:
    """Return the error of a second `specdec up` at the port of a running one."""
    endpoint = join_address(split_address(DEFAULT_ENDPOINT)[0], port)
    return Unavailable(
        f"your specdec up at {endpoint} is still running; stop it with `{down_command(endpoint)}`, or choose another "
        "address with --listen",
        reason="ADDRESS_IN_USE",
    )


def down_command(endpoint: str) -> str:
    """Return the command that ends the `specdec up` at an endpoint of this machine."""
    return "specdec down" if endpoint == DEFAULT_ENDPOINT else f"specdec down --endpoint {endpoint}"


def local_port(endpoint: str) -> int | None:
    """Return the port of an endpoint on this machine; None for one on another machine or of another kind."""
    try:
        host, port = split_address(endpoint)
        resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = resolved[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)  # only an address of this machine can be bound
    except (OSError, ValueError):
        return None
    return port


def _lines_of(connection: socket.socket) -> TextIO:
    return connection.makefile("rw", encoding="utf-8", errors="replace")


def _parsed(request: str) -> dict[str, Any]:
    """Return the JSON object of a request. Raises InvalidRequest for anything else."""
    try:
        parsed = json.loads(request)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict) or not parsed:
        raise InvalidRequest(_MALFORMED)
    return parsed


def _counts(wanted: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of replicas. Raises InvalidRequest if one is not a whole number."""
    if any(type(number) is not int for number in wanted.values()):
        raise InvalidRequest(_MALFORMED)
    return dict(wanted)


def _pool_and_model(joining: Any) -> tuple[str, str]:
    """Return pool and model of a request to join. Raises InvalidRequest if one is missing."""
    if not isinstance(joining, dict) or set(joining) != {"pool", "model"} or not all(map(_is_text, joining.values())):
        raise InvalidRequest("a draft model joins by the name of its pool and its path")
    return joining["pool"], joining["model"]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _remove_stale_sockets(folder: Path) -> None:
    """Remove the sockets of processes that were killed, which could not remove them themselves."""
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _STARTING_S and not _is_answered(path):
                path.unlink()


def _has_left(connection: socket.socket) -> bool:
    """Return whether the other side has closed the connection, for reading too."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
