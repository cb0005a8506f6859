"""A relay before the gateway that passes the beginning of an answer and holds the rest until the client leaves."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator

#: A few dozen events of a stream with their provenance; the gateway goes on for some hundred tokens and then waits.
_PASSED_BYTES = 32 * 1024
_PIECE_BYTES = 64 * 1024


class _Relay(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        host, _, port = upstream.rpartition(":")
        self.upstream = (host, int(port))


class _Connection(socketserver.BaseRequestHandler):
    """A client's connection and the one to the gateway, which end together."""

    server: _Relay

    def handle(self) -> None:
        with socket.socket() as gateway, contextlib.suppress(ConnectionError):
            # The kernel takes little for the relay, so that the gateway notices that nothing is read.
            gateway.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PASSED_BYTES)
            gateway.connect(self.server.upstream)
            passed = sys.maxsize
            while True:
                ready, _, _ = select.select([self.request, *([gateway] if passed else [])], [], [])
                source, sink, most = (self.request, gateway, _PIECE_BYTES)
                if self.request not in ready:
                    source, sink, most = (gateway, self.request, min(passed, _PIECE_BYTES))
                if not (piece := source.recv(most)):
                    return
                if source is gateway:
                    passed -= len(piece)
                elif piece.startswith(b"POST "):
                    passed = _PASSED_BYTES
                sink.sendall(piece)


@contextlib.contextmanager
def relay_of_beginnings(upstream: str) -> Iterator[str]:
    """Return the address of a relay to HOST:PORT. It passes 32 KiB of an answer to POST."""
    with _Relay(upstream) as relay:
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{relay.server_address[1]}"
        finally:
            relay.shutdown()
