"""Measure the lower bound of a round: bare message round trips.

`Echoes` runs a child, `python -m bench.systems.bare_messages`, that echoes messages over an open gRPC stream and over a
Unix socket. The suites `latency` and `orchestration` compare the services with these figures.
"""

import argparse
import asyncio
import contextlib
import json
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np

from bench.harness.line_child import LineChild
from specdec.rpc.channels import dial

_SERVICE = "specdec.bench.Echo"
_LENGTH = struct.Struct("<I")
_NUM_ECHOES = 50
#: Bytes of a request or a reply of either link in a greedy round.
_GREEDY_BYTES = 100
CARRIERS = ("grpc", "socket")


class Echoes(LineChild):
    """The child that answers."""

    def __init__(self) -> None:
        super().__init__("bench.systems.bare_messages", num_threads=1)

    def round_trip_s(self, carrier: str = "grpc", idle_s: float = 0.0) -> float:
        """Return the median round-trip time of many small messages, each sent after an idle time.

        Args:
            carrier: one of CARRIERS.
            idle_s: 0: back to back.
        """
        return asyncio.run(_time_echoes(self.greeting, carrier, idle_s))


class _Connection(Protocol):
    """Messages to an echo and back, in order."""

    def write(self, message: bytes) -> Awaitable[None]: ...

    def read(self) -> Awaitable[bytes]: ...


class _Socket:
    """A length before each message."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def write(self, message: bytes) -> None:
        self._writer.write(_LENGTH.pack(len(message)) + message)

    async def read(self) -> bytes:
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        return await self._reader.readexactly(length)


@contextlib.asynccontextmanager
async def _connected(addresses: dict[str, str], carrier: str) -> AsyncIterator[_Connection]:
    if carrier == "socket":
        reader, writer = await asyncio.open_unix_connection(addresses["socket"])
        yield _Socket(reader, writer)
        writer.close()
    else:
        async with dial(addresses["grpc"]) as channel:
            call = channel.stream_stream(f"/{_SERVICE}/Echo")()
            yield call
            call.cancel()


async def _time_echoes(addresses: dict[str, str], carrier: str, idle_s: float) -> float:
    async with _connected(addresses, carrier) as connection:
        seconds = []
        for _ in range(_NUM_ECHOES):
            await asyncio.sleep(idle_s)
            began = time.perf_counter()
            await connection.write(bytes(_GREEDY_BYTES))
            await connection.read()
            seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


async def _echo_messages(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


async def _echo_socket(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    connection = _Socket(reader, writer)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            await connection.write(await connection.read())
    writer.close()


async def _echo() -> None:
    server = grpc.aio.server()
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(_echo_messages)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        path = str(Path(folder) / "echo")
        await asyncio.start_unix_server(_echo_socket, path)
        print(json.dumps({"grpc": f"127.0.0.1:{port}", "socket": path}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def main() -> None:
    """Echo until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    parser.parse_args()
    asyncio.run(_echo())


if __name__ == "__main__":
    main()
