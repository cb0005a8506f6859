"""A Redis that needs no installation: `fakeredis` behind a loopback port, in a thread of the caller's process.

For `specdec up` and tests, where several processes share one throwaway store. Not a database: nothing outlives the
process, and one Python thread answers each connection. Called by the command line.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

from specdec.state.connection import REDIS_VERSION


class EmbeddedRedis:
    """Serves while the context is open.

    with EmbeddedRedis() as redis:
        start_children(redis.url)
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """redis://HOST:PORT of the open context."""
        if self._server is None:
            raise RuntimeError("the embedded Redis is not running")
        host, port = self._server.server_address[:2]
        return f"redis://{host}:{port}"

    def __enter__(self) -> Self:
        from fakeredis import TcpFakeServer

        self._server = TcpFakeServer((self._host, 0), server_version=REDIS_VERSION)
        # The answers to a pipeline leave one by one: held back until the last is acknowledged, they would take 40 ms.
        self._server.RequestHandlerClass = type(
            "_PromptHandler", (self._server.RequestHandlerClass,), {"disable_nagle_algorithm": True}
        )
        # A client that never hangs up must not keep the process alive.
        self._server.daemon_threads = True
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
        self._server = self._thread = None
