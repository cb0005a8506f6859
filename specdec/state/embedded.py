"""A Redis without installation: `fakeredis` behind a Unix socket, in a thread of the caller's process.

`specdec up` and tests use it for several processes of one user; the socket lies in a folder that only this user may
enter. The data ends with the process, and one Python thread answers each connection. `embedded_server` decides which
commands clients may send.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specdec.state.socket_folder import make_socket_path, remove_socket


class EmbeddedRedis:
    """Serves while the context is open.

    with EmbeddedRedis() as redis:
        start_children(redis.url)
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Return unix://PATH of the open context."""
        if self._path is None:
            raise RuntimeError("the embedded Redis is not running")
        return f"unix://{self._path}"

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Raise OSError: the store's thread cannot be started a second time in this process."""
        raise OSError("the embedded store has ended")

    def __enter__(self) -> Self:
        """Start the store. Raises Unsupported if its package is not installed."""
        from specdec.state.clients import REDIS_VERSION, require_fakeredis

        wanted = f"redis-server {REDIS_VERSION[0]} or later"
        require_fakeredis(f"without {wanted}, the store of `specdec up`", f"install {wanted}")
        from specdec.state.embedded_server import EmbeddedServer

        self._path = make_socket_path()
        try:
            self._server = EmbeddedServer(self._path)
        except BaseException:
            remove_socket(self._path)
            raise
        self._thread = threading.Thread(target=self._server.serve_forever, name="embedded redis", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        if self._thread is not None:
            self._thread.join()
        if self._path is not None:
            remove_socket(self._path)
        self._path = self._server = self._thread = None
