"""Errors of both clients at endpoints where servers of other kinds listen."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import socketserver
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from specdec.client import AsyncClient, Budgets, Client
from specdec.client.failures import grpc_text
from specdec.contract.errors import SpecdecError, Unauthenticated, Unavailable, Unsupported

_PREFACE_BYTES, _FRAME_HEADER_BYTES = 24, 9
_HEADERS, _SETTINGS = 1, 4
_ACK, _END_OF_STREAM_AND_HEADERS = 1, 5


class Http1(http.server.BaseHTTPRequestHandler):
    """Answers what HTTP/1 does not know with a status line, as most servers do."""

    default_request_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Write no log."""


class Html(Http1):
    """Answers what HTTP/1 does not know with a page alone."""

    default_request_version = "HTTP/0.9"


class Http2(socketserver.StreamRequestHandler):
    """Answers every call in HTTP/2 with a header block and no gRPC, as a web server or a proxy does."""

    headers: bytes
    """The header block, from the table of RFC 7541."""

    def handle(self) -> None:
        self.rfile.read(_PREFACE_BYTES)
        self._send(_SETTINGS)
        while head := self.rfile.read(_FRAME_HEADER_BYTES):
            self.rfile.read(int.from_bytes(head[:3], "big"))
            kind, flags = head[3:5]
            if kind == _SETTINGS and not flags & _ACK:
                self._send(_SETTINGS, _ACK)
            if kind == _HEADERS:
                self._send(_HEADERS, _END_OF_STREAM_AND_HEADERS, head[5:9], self.headers)

    def _send(self, kind: int, flags: int = 0, stream: bytes = bytes(4), body: bytes = b"") -> None:
        self.wfile.write(len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream + body)


class NotFound(Http2):
    headers = b"\x8d"  # :status 404


class Unauthorised(Http2):
    headers = b"\x48\x03401"  # :status as a literal


class BadGateway(Http2):
    headers = b"\x48\x03502"


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """Write nothing about a connection that the client closed."""


@contextlib.contextmanager
def listening(handler: type[socketserver.BaseRequestHandler]) -> Iterator[str]:
    """Run a server of another kind; give its endpoint."""
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def errors_at(endpoint: str) -> list[SpecdecError]:
    """Return the errors of a generation and of another call of the blocking client, and of one of the other client."""
    with Client(endpoint, budgets=Budgets(connect_s=0)) as client:
        caught = []
        for call in (lambda: client.generate("p"), client.info):
            with pytest.raises(SpecdecError) as raised:
                call()
            caught.append(raised.value)

    async def ask() -> SpecdecError:
        async with AsyncClient(endpoint, budgets=Budgets(connect_s=0)) as client:
            with pytest.raises(SpecdecError) as raised:
                await client.info()
            return raised.value

    return [*caught, asyncio.run(ask())]


@pytest.mark.parametrize(
    ("handler", "answer", "kind", "reason"),
    [
        (Http1, "speaks HTTP/1, not gRPC", Unavailable, "COORDINATOR_UNAVAILABLE"),
        (Html, "does not answer in gRPC", Unavailable, "COORDINATOR_UNAVAILABLE"),
        (NotFound, "answered with HTTP status 404 instead of gRPC", Unsupported, "UNSUPPORTED"),
        (Unauthorised, "answered with HTTP status 401 instead of gRPC", Unauthenticated, "UNAUTHENTICATED"),
        (BadGateway, "answered with HTTP status 502 instead of gRPC", Unavailable, "COORDINATOR_UNAVAILABLE"),
    ],
)
def test_an_error_says_how_a_server_that_is_no_coordinator_answers(
    handler: type[socketserver.BaseRequestHandler], answer: str, kind: type[SpecdecError], reason: str
) -> None:
    with listening(handler) as endpoint:
        for error in errors_at(endpoint):
            assert error.message == f"the server at {endpoint} {answer}; check that the endpoint is a coordinator's"
            assert (type(error), error.reason) == (kind, reason)
            assert grpc_text(error) not in ("", error.message)


def test_an_error_says_that_a_grpc_server_lacks_the_call() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    for error in errors_at(endpoint):
        assert type(error) is Unsupported
        assert error.message == (
            f"the server at {endpoint} does not serve this call: it is another program, or another version of specdec; "
            "check that the endpoint is a coordinator's"
        )
    server.stop(None)


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.FAILED_PRECONDITION])
def test_an_error_without_words_of_specdec_names_the_status_of_grpc(code: grpc.StatusCode) -> None:
    def fail(_request: object, context: grpc.ServicerContext) -> None:
        context.abort(code, "")

    class Failing(grpc.GenericRpcHandler):
        def service(self, _call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(fail)

    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Failing()])
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    for error in errors_at(endpoint):
        assert error.message == (
            f"the server at {endpoint} ended the call with the gRPC status {code.name} and without a reason of "
            "specdec; check that the endpoint is a coordinator's"
        )
    server.stop(None)
