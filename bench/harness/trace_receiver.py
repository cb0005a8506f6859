"""A collector of traces, over OTLP and gRPC.

The suite `latency` reads what a `TraceReceiver` of this process keeps. The suite `observability` starts this module by
`LineChild`, which keeps nothing; its greeting is the URL.
"""

import argparse
import json
import sys
from concurrent import futures
from typing import Any, Self

import grpc

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


class TraceReceiver:
    """A server that answers every export. Use it by `with`."""

    def __init__(self, num_threads: int = 1, *, keeps: bool = True) -> None:
        self.requests: list[bytes] = []
        """The exports, as they came; empty if `keeps` is false."""
        self._keeps = keeps
        self._server = grpc.server(futures.ThreadPoolExecutor(num_threads))
        handler = grpc.unary_unary_rpc_method_handler(self._receive)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler})])
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def _receive(self, request: bytes, _context: Any) -> bytes:
        """Return an empty answer, which says that all spans were accepted."""
        if self._keeps:
            self.requests.append(request)
        return b""


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    with TraceReceiver(parser.parse_args().threads, keeps=False) as receiver:
        print(json.dumps(receiver.url), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
