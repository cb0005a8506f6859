"""A name server on loopback that answers for one name, with addresses that a test may change."""

from __future__ import annotations

import socket
import struct
import threading
from types import TracebackType
from typing import Self

_IPV4, _INTERNET, _AUTHORITATIVE = 1, 1, 0x8580


class NameServer:
    """Answers every query for an IPv4 address with `addresses`, and every other one with none."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, name="name server", daemon=True)

    def target(self, port: int) -> str:
        """gRPC target of the name with a port, resolved by this server."""
        return f"dns://127.0.0.1:{self._socket.getsockname()[1]}/coordinator.test:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                query, sender = self._socket.recvfrom(4096)
            except OSError:  # closed
                return
            end = 12  # of the header; then the name in parts of a length and its characters
            while query[end]:
                end += query[end] + 1
            (kind,) = struct.unpack(">H", query[end + 1 : end + 3])
            found = self.addresses if kind == _IPV4 else []
            answer = query[:2] + struct.pack(">5H", _AUTHORITATIVE, 1, len(found), 0, 0) + query[12 : end + 5]
            for address in found:  # the name as a reference to the query's, one second to live
                answer += b"\xc0\x0c" + struct.pack(">HHIH", _IPV4, _INTERNET, 1, 4) + socket.inet_aton(address)
            self._socket.sendto(answer, sender)
