"""How `specdec up` is told, by whoever runs it, to have other numbers of replicas: a Unix socket named after its port.

The socket lies in a folder that nobody else may enter, as the embedded store's does, so no store is needed, nothing has
to be kept secret, and two systems on one Redis stay apart. Each connection is one request, a line of JSON, answered by
lines of JSON: what is being waited for (`{"stage": ...}`), then the numbers reached (`{"counts": ...}`) or why not
(`{"error": "CODE REASON: message"}`). A request is numbers of replicas, `{"draft": 3}`, or a further draft model,
`{"join": {"pool": NAME, "model": PATH}}`.

Not here: what becomes of a request (`fleet`), the commands (`scale`, `join`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from specdec.errors import InvalidRequest, SpecdecError, Unavailable
from specdec.state.socket_folder import short_temporary_folder
from specdec.supervision.fleet import Fleet

_MAX_REQUEST_BYTES = 4096
_REQUEST_TIMEOUT_S = 5.0
_NO_REQUEST = "a request is one line of JSON, a whole number for each role"
#: Between two lines of a request that is under way, so that a caller who left is noticed.
_STAGE_INTERVAL_S = 0.5
#: Where accepting a caller failed, until the next attempt.
_FILE_WAIT_S = 0.5
#: Of a `specdec up` that follows a request and says nothing: it stands still.
_SILENCE_TIMEOUT_S = 60.0
#: A socket this young may be another process's that does not listen yet.
_STARTING_S = 60.0


class ControlSocket:
    """Listens while the context is open."""

    def __init__(self, port: int, fleet: Fleet) -> None:
        """`port` is the coordinator's."""
        self._port, self._fleet = port, fleet
        self._path: Path | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        """Raises Unavailable where it cannot listen: `scale` will not find it then."""
        try:
            folder = _folder(make=True)
            _clean_up_after_killed(folder)
            path = folder / f"{self._port}.sock"
            if _is_answered(path):
                raise Unavailable(f"{path} is another specdec up's")
            path.unlink(missing_ok=True)
            self._listener.bind(str(path))
            self._listener.listen()
            self._path = path
        except (OSError, Unavailable) as error:
            self._listener.close()
            raise Unavailable(str(error)) from error
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
            with contextlib.suppress(OSError):  # others of this user run
                self._path.parent.rmdir()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it was closed, or there is no file left for a caller, who waits
                if self._closing.wait(_FILE_WAIT_S):
                    return
            else:
                threading.Thread(target=self._serve, args=(connection,), name="scale", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_REQUEST_TIMEOUT_S)
        with (
            contextlib.suppress(OSError),
            connection,
            connection.makefile("rw", encoding="utf-8", errors="replace") as file,
        ):
            request = file.readline(_MAX_REQUEST_BYTES)
            if _has_left(connection):  # it was told that nobody answers here
                return
            for answer in self._answers(request):
                file.write(json.dumps(answer) + "\n")
                file.flush()

    def _answers(self, request: str) -> Iterator[Mapping[str, Any]]:
        try:
            asked = _parsed(request)
            if set(asked) == {"join"}:
                scaling = self._fleet.join(*_pool_and_model(asked["join"]))
            else:
                scaling = self._fleet.scale(_counts(asked))
        except SpecdecError as error:
            yield {"error": f"{error.code} {error.reason}: {error.message}"}
            return
        while not scaling.ended.wait(_STAGE_INTERVAL_S):
            yield {"stage": scaling.stage}
        yield {"error": scaling.failure} if scaling.failure else {"counts": scaling.counts}


def ask(port: int, request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Asks the `specdec up` of a port on this machine; what it answers, line by line.

    Raises:
        Unavailable: there is none of this user, or it ended meanwhile, or it stands still.
    """
    try:
        path = _folder(make=False) / f"{port}.sock"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SILENCE_TIMEOUT_S)
            connection.connect(str(path))
            with _lines_of(connection) as file:
                file.write(json.dumps(request) + "\n")
                file.flush()
                answer: dict[str, Any] = {}
                for line in file:
                    answer = json.loads(line)
                    yield answer
                if not answer.keys() & {"counts", "error"}:
                    raise Unavailable("specdec up has ended", reason="DRAINING")
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise Unavailable(
            f"no specdec up of yours serves port {port} on this machine", reason="COORDINATOR_UNAVAILABLE"
        ) from error
    except TimeoutError as error:
        raise Unavailable(
            f"the specdec up of port {port} stands still: it said nothing for {_SILENCE_TIMEOUT_S:g} s",
            reason="COORDINATOR_UNAVAILABLE",
        ) from error
    except OSError as error:
        raise Unavailable(f"specdec up cannot be told: {error.strerror or error}") from error


def _lines_of(connection: socket.socket) -> TextIO:
    return connection.makefile("rw", encoding="utf-8", errors="replace")


def _parsed(request: str) -> dict[str, Any]:
    """Raises InvalidRequest for what is no JSON object."""
    try:
        asked = json.loads(request)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict) or not asked:
        raise InvalidRequest(_NO_REQUEST)
    return asked


def _counts(asked: Mapping[str, Any]) -> dict[str, int]:
    """Raises InvalidRequest for what is no whole number for each role."""
    if any(type(number) is not int for number in asked.values()):
        raise InvalidRequest(_NO_REQUEST)
    return dict(asked)


def _pool_and_model(asked: Any) -> tuple[str, str]:
    """Raises InvalidRequest for what names no pool and model."""
    if not isinstance(asked, dict) or set(asked) != {"pool", "model"} or not all(map(_is_text, asked.values())):
        raise InvalidRequest("a draft model joins by the name of its pool and its path")
    return asked["pool"], asked["model"]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _folder(*, make: bool) -> Path:
    """This user's folder of such sockets.

    Raises:
        OSError: there is none, or it is not this user's alone.
    """
    name = f"specdec-up-{os.geteuid()}"
    folder = Path(short_temporary_folder(len(f"/{name}/65535.sock"))) / name
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of yours that nobody else may enter")
    return folder


def _clean_up_after_killed(folder: Path) -> None:
    """Removes the sockets of those that no longer run: no process can tidy up after its SIGKILL."""
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _STARTING_S and not _is_answered(path):
                path.unlink()


def _has_left(connection: socket.socket) -> bool:
    """Whether the other side is closed, for reading too."""
    looked_at = select.poll()
    looked_at.register(connection, 0)
    return bool(looked_at.poll(0))


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
