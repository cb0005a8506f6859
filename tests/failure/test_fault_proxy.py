"""The TCP proxy of the fault tests: each fault does what its name says, and without one nothing is changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.fault_proxy import FaultProxy

DATA = bytes(range(256)) * 64


@asynccontextmanager
async def echo() -> AsyncIterator[str]:
    """Run a server that sends back what it receives; give its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_data_passes_unchanged_also_delayed_and_throttled() -> None:
    async with echo() as server, FaultProxy(server) as proxy:
        loop = asyncio.get_running_loop()
        reader, writer = await connect(proxy.address)
        for delay_s, bytes_per_s in ((0.0, 0.0), (0.05, 0.0), (0.0, len(DATA) / 0.05)):
            proxy.faults.delay_s, proxy.faults.bytes_per_s = delay_s, bytes_per_s
            began_s = loop.time()
            writer.write(DATA)
            assert await reader.readexactly(len(DATA)) == DATA
            assert loop.time() - began_s >= (0.1 if delay_s or bytes_per_s else 0.0)
        writer.close()


async def test_a_cut_resets_connections_and_new_ones_pass() -> None:
    async with echo() as server, FaultProxy(server) as proxy:
        reader, writer = await connect(proxy.address)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        reader, writer = await connect(proxy.address)
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"
        writer.close()
        assert proxy.num_cuts == 1


async def test_dropped_data_is_delivered_later_and_a_half_open_connection_delivers_nothing() -> None:
    async with echo() as server, FaultProxy(server) as proxy:
        reader, writer = await connect(proxy.address)
        proxy.drop()
        writer.write(b"a")
        reading = asyncio.create_task(reader.readexactly(1))
        await asyncio.wait({reading}, timeout=0.1)
        assert not reading.done()
        proxy.deliver()
        assert await reading == b"a"
        proxy.leave_half_open()
        writer.write(b"b")
        reading = asyncio.create_task(reader.readexactly(1))
        await asyncio.wait({reading}, timeout=0.1)
        assert not reading.done()
        assert proxy.num_open == 1
        writer.close()
        with pytest.raises(asyncio.IncompleteReadError):
            await reading


async def test_the_same_seed_cuts_after_the_same_pieces() -> None:
    async def pieces_until_cut(seed: int) -> int:
        async with echo() as server, FaultProxy(server, seed=seed) as proxy:
            proxy.faults.cut_share = 0.05
            reader, writer = await connect(proxy.address)
            num_pieces = 0
            try:
                while True:
                    writer.write(b"a")
                    await reader.readexactly(1)
                    num_pieces += 1
            except (ConnectionError, asyncio.IncompleteReadError):
                return num_pieces

    counts = [await pieces_until_cut(seed) for seed in (1, 1, 2, 3)]
    assert counts[0] == counts[1]
    assert len(set(counts)) > 1


async def test_a_server_that_does_not_listen_is_a_reset() -> None:
    async with FaultProxy("127.0.0.1:1") as proxy:
        reader, _ = await connect(proxy.address)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
