"""Measure the lower bound of a round: bare message round trips and one call of the store.

`Echoes` runs a child that echoes messages over an open gRPC stream and over a Unix socket. `BareRounds` runs a child
that does for each round only what no coordinator can leave out (messages to two echoes, one Redis call) and reports its
own processor time. The suites `latency` and `orchestration` compare the services with these figures.
`python -m bench.systems.bare_messages` runs either child.
"""

import argparse
import asyncio
import contextlib
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
import redis.asyncio

from bench.harness.line_child import LineChild
from specdec.rpc.channels import dial

_SERVICE = "specdec.bench.Echo"
_ECHO, _TAKE = f"/{_SERVICE}/Echo", f"/{_SERVICE}/Take"
_LENGTH = struct.Struct("<I")
_NUM_ECHOES = 50
#: Bytes of a request or a reply of either link in a greedy round.
_GREEDY_BYTES = 100
#: Approximate bytes of a request or a reply at T = 1 with supports of 64 tokens, as suite `wire` measures them.
_SAMPLED_BYTES = 700
_CHUNK_BYTES = 60
#: Approximate bytes that a round's commit sends to the store.
_COMMIT = (
    "redis.call('APPEND', KEYS[1], ARGV[1]) redis.call('HSET', KEYS[2], 'len', ARGV[2], 'epoch', ARGV[3]) "
    "redis.call('PEXPIRE', KEYS[1], 60000) redis.call('PEXPIRE', KEYS[2], 60000) return redis.call('TIME')"
)

CARRIERS = ("grpc", "socket")


class Echoes(LineChild):
    """The child that answers."""

    def __init__(self) -> None:
        super().__init__("bench.systems.bare_messages", "echo", num_threads=1)

    def round_trip_s(self, carrier: str = "grpc", idle_s: float = 0.0) -> float:
        """Return the median round-trip time of many small messages, each sent after an idle time.

        Args:
            carrier: one of CARRIERS.
            idle_s: 0: back to back.
        """
        return asyncio.run(_time_echoes(self.greeting, carrier, idle_s))


class BareRounds(LineChild):
    """The child that asks."""

    def __init__(self, echoes: Echoes, redis_url: str) -> None:
        super().__init__("bench.systems.bare_messages", "rounds", num_threads=1)
        self._asked = {"addresses": echoes.greeting, "redis_url": redis_url}

    def cpu_s(self, carrier: str, num_streams: int, num_rounds: int) -> float:
        """Processor seconds a round: to the draft and back, to the target and back, a commit, a chunk to the client.

        Args:
            carrier: one of CARRIERS.
            num_streams: at once, over one connection to each side.
            num_rounds: of each stream.
        """
        return float(self.ask(self._asked | {"carrier": carrier, "num_streams": num_streams, "num_rounds": num_rounds}))


class _Connection(Protocol):
    """Messages to an echo and back, in order."""

    async def write(self, message: bytes) -> None: ...

    async def read(self) -> bytes: ...


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


class _Stream:
    """A gRPC stream, which takes one message at a time."""

    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        self._call = call
        self._is_free = asyncio.Lock()

    async def write(self, message: bytes) -> None:
        async with self._is_free:
            await self._call.write(message)

    async def read(self) -> bytes:
        return await self._call.read()


@contextlib.asynccontextmanager
async def _connected(addresses: dict[str, str], carrier: str) -> AsyncIterator[_Connection]:
    if carrier == "socket":
        reader, writer = await asyncio.open_unix_connection(addresses["socket"])
        yield _Socket(reader, writer)
        writer.close()
    else:
        async with dial(addresses["grpc"]) as channel:
            call = channel.stream_stream(_ECHO)()
            yield _Stream(call)
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


class _Link:
    """One connection for all streams: answers come in the order of what was asked."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._waiting: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    async def there_and_back(self) -> None:
        answered = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait(answered)
        await self._connection.write(bytes(_SAMPLED_BYTES))
        await answered

    async def _read(self) -> None:
        while True:
            answered = await self._waiting.get()
            await self._connection.read()
            answered.set_result(None)

    def close(self) -> None:
        self._reading.cancel()


async def _cpu_s(addresses: dict[str, str], redis_url: str, carrier: str, num_streams: int, num_rounds: int) -> float:
    async with (
        _connected(addresses, carrier) as to_draft,
        _connected(addresses, carrier) as to_target,
        dial(addresses["grpc"]) as to_clients,
        redis.asyncio.Redis.from_url(redis_url) as store,
    ):
        draft, target, commit = _Link(to_draft), _Link(to_target), store.register_script(_COMMIT)

        async def run_stream(index: int) -> None:
            keys = [f"{{bare-{index}}}:tokens", f"{{bare-{index}}}:state"]
            client = to_clients.stream_unary(_TAKE)()
            for number in range(num_rounds):
                await draft.there_and_back()
                await target.there_and_back()
                await commit(keys, [bytes(16), number, 1])
                await client.write(bytes(_CHUNK_BYTES))
            await client.done_writing()
            await client

        await asyncio.gather(*(run_stream(index) for index in range(num_streams)))  # what is cold is paid for here
        began = time.process_time()
        await asyncio.gather(*(run_stream(index) for index in range(num_streams)))
        used_s = time.process_time() - began
        draft.close()
        target.close()
    return used_s / (num_streams * num_rounds)


async def _echo_messages(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


async def _take_messages(messages: AsyncIterator[bytes], context: Any) -> bytes:
    async for _ in messages:
        pass
    return b""


async def _echo_socket(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    connection = _Socket(reader, writer)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            await connection.write(await connection.read())
    writer.close()


async def _echo(answer: Callable[[], Awaitable[str]]) -> None:
    server = grpc.aio.server()
    handlers = {
        "Echo": grpc.stream_stream_rpc_method_handler(_echo_messages),
        "Take": grpc.stream_unary_rpc_method_handler(_take_messages),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        path = str(Path(folder) / "echo")
        await asyncio.start_unix_server(_echo_socket, path)
        print(json.dumps({"grpc": f"127.0.0.1:{port}", "socket": path}), flush=True)
        await answer()
    await server.stop(None)


async def _ask_rounds(answer: Callable[[], Awaitable[str]]) -> None:
    print(json.dumps(os.getpid()), flush=True)
    while line := await answer():
        print(await _cpu_s(**json.loads(line)), flush=True)


def main() -> None:
    """Echo, or answer one request a line, until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("child", choices=["echo", "rounds"])
    parser.add_argument("--threads", type=int, required=True)
    run = {"echo": _echo, "rounds": _ask_rounds}[parser.parse_args().child]
    asyncio.run(run(lambda: asyncio.to_thread(sys.stdin.readline)))


if __name__ == "__main__":
    main()
