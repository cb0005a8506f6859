"""A temporary Redis of this process: an installed `redis-server` on a Unix socket.

    with throwaway_redis() as redis:
        start_children(redis.url)

Used by `specdec up`. It keeps nothing on disk, and ends with this process, also if the process is killed. If no
redis-server of MIN_VERSION or later is installed, or it does not start, the store is `embedded`, an extra of the
package, which gives the same answers for a millisecond of processor time a round. `socket_folder` makes the socket's
folder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from specdec.state.embedded import EmbeddedRedis
from specdec.state.socket_folder import is_answered, make_socket_path, remove_socket

MIN_VERSION = 7

_START_S = 5.0
_CHECK_INTERVAL_S = 0.01

#: Runs its arguments and kills them when its standard input ends, that is, with the process at the other end.
_KEEPER = """
exec 3<&0
"$@" </dev/null &
server=$!
{ read -r _ <&3; kill -KILL "$server"; } &
reader=$!
wait "$server"
kill "$reader"
"""


class OwnRedis:
    """Serves while the context is open."""

    def __init__(self, program: str) -> None:
        """`program`: path of a redis-server."""
        self._program = program
        self._path: Path | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return unix://PATH of the open context."""
        if self._path is None:
            raise RuntimeError("the Redis is not running")
        return f"unix://{self._path}"

    @property
    def is_alive(self) -> bool:
        return self._keeper is not None and self._keeper.poll() is None

    def start(self) -> None:
        """Start the server, for the first time or after it has ended: empty, at the same address.

        Raises:
            OSError: it does not answer within a few seconds.
        """
        assert self._path is not None
        self._end()
        self._path.unlink(missing_ok=True)
        # Its clock only finds what has expired and is not asked for; keys that are asked for expire on time without it.
        server = [self._program, "--port", "0", "--unixsocket", str(self._path), "--unixsocketperm", "700",
                  "--save", "", "--appendonly", "no", "--hz", "1", "--dir", str(self._path.parent)]  # fmt: skip
        # A session of its own, because Ctrl-C at the terminal would end it before the services that still write to it.
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "redis", *server],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        deadline_s = time.monotonic() + _START_S
        while not is_answered(self._path):
            if not self.is_alive or time.monotonic() > deadline_s:
                self._end()
                raise OSError(f"{self._program} did not start within {_START_S:g} s")
            time.sleep(_CHECK_INTERVAL_S)

    def __enter__(self) -> Self:
        self._path = make_socket_path()
        try:
            self.start()
        except BaseException:
            remove_socket(self._path)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if self._path is not None:
            remove_socket(self._path)
        self._path = None

    def _end(self) -> None:
        if self._keeper is not None and self._keeper.stdin is not None:
            with suppress(OSError):
                self._keeper.stdin.close()
            self._keeper.wait()
        self._keeper = None


def installed_redis() -> str | None:
    """Return the path of an installed redis-server of MIN_VERSION or later, or None."""
    program = shutil.which("redis-server")
    if program is None:
        return None
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_START_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r"\bv=(\d+)\.", output)
    return program if version is not None and int(version[1]) >= MIN_VERSION else None


@contextmanager
def throwaway_redis() -> Iterator[OwnRedis | EmbeddedRedis]:
    """Run an installed redis-server while the context is open, or the embedded store if there is none.

    Raises:
        Unsupported: neither is installed.
    """
    with ExitStack() as stack:
        store: OwnRedis | EmbeddedRedis | None = None
        program = installed_redis()
        if program is not None:
            with suppress(OSError):
                store = stack.enter_context(OwnRedis(program))
        yield store or stack.enter_context(EmbeddedRedis())
