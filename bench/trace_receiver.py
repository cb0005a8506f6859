"""A collector of traces in a child process: takes what comes over OTLP (gRPC), and keeps nothing.

The suite `observability` starts it by `LineChild`; its greeting is the URL.
"""

import argparse
import json
import sys
from concurrent import futures
from typing import Any

import grpc

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    server = grpc.server(futures.ThreadPoolExecutor(parser.parse_args().threads))
    handler = grpc.unary_unary_rpc_method_handler(_take)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(json.dumps(f"http://127.0.0.1:{port}"), flush=True)
    sys.stdin.read()
    server.stop(None).wait()


def _take(_request: bytes, _context: Any) -> bytes:
    """Return an empty answer, by which a collector says that it took everything."""
    return b""


if __name__ == "__main__":
    main()
