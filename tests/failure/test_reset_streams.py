"""Streams that a proxy resets in the middle, with each HTTP/2 code: between client and coordinator, and behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import pytest

from specdec.client import AsyncClient, Budgets, Client
from specdec.contract.errors import SpecdecError, Unavailable
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig

#: Every error code of RFC 9113, section 7.
HTTP2_CODES = {
    0x0: "NO_ERROR",
    0x1: "PROTOCOL_ERROR",
    0x2: "INTERNAL_ERROR",
    0x3: "FLOW_CONTROL_ERROR",
    0x4: "SETTINGS_TIMEOUT",
    0x5: "STREAM_CLOSED",
    0x6: "FRAME_SIZE_ERROR",
    0x7: "REFUSED_STREAM",
    0x8: "CANCEL",
    0x9: "COMPRESSION_ERROR",
    0xA: "CONNECT_ERROR",
    0xB: "ENHANCE_YOUR_CALM",
    0xC: "INADEQUATE_SECURITY",
    0xD: "HTTP_1_1_REQUIRED",
}

_CANCEL = 0x8
_PREFACE_BYTES, _HEAD_BYTES = 24, 9
_DATA, _RST_STREAM = 0x0, 0x3


class ResettingProxy:
    """A TCP listener in front of one server that speaks HTTP/2 without TLS. It passes everything on unchanged.

    After a reset it still passes the stream's frames on: they belong to the connection's flow control and header
    compression, and both ends ignore them otherwise.
    """

    def __init__(self, upstream: str, *, after_frames: int = 3) -> None:
        """
        Args:
            upstream: HOST:PORT of the server.
            after_frames: number of frames with data from the server after which a stream is reset. The answer of a
                call that is no stream has one.
        """
        self._upstream = upstream
        self._after_frames = after_frames
        self._code: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""
        """HOST:PORT that clients connect to."""
        self.num_resets = 0

    def reset_with(self, code: int | None) -> None:
        """Reset streams with this code from now on; None: none."""
        self._code = code
        self.num_resets = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._upstream.rpartition(":")
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        pumps = [
            asyncio.create_task(self._pass_requests(reader, upstream_writer)),
            asyncio.create_task(self._pass_answers(upstream_reader, writer, upstream_writer)),
        ]
        self._tasks.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            writer.close()
            upstream_writer.close()
            self._tasks.difference_update(pumps)

    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            writer.write(await reader.readexactly(_PREFACE_BYTES))
            while True:
                writer.write(await _read_frame(reader))

    async def _pass_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: asyncio.StreamWriter
    ) -> None:
        num_frames: Counter[int] = Counter()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                frame = await _read_frame(reader)
                writer.write(frame)
                stream = int.from_bytes(frame[5:_HEAD_BYTES], "big")
                if frame[3] == _DATA and len(frame) > _HEAD_BYTES:
                    num_frames[stream] += 1
                    if self._code is not None and num_frames[stream] == self._after_frames:
                        writer.write(_reset(stream, self._code))
                        upstream.write(_reset(stream, _CANCEL))
                        self.num_resets += 1


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(_HEAD_BYTES)
    return head + await reader.readexactly(int.from_bytes(head[:3], "big"))


def _reset(stream: int, code: int) -> bytes:
    body = code.to_bytes(4, "big")
    return len(body).to_bytes(3, "big") + bytes([_RST_STREAM, 0]) + stream.to_bytes(4, "big") + body


#: More than two for each of the frames after which a stream is reset.
NUM_TOKENS = 28

#: As long as a loaded machine may take.
PATIENT = Budgets(connect_s=60.0, resume_s=120.0)


def options(number: int) -> dict[str, object]:
    """Return a request of its own for each number; greedy ones and coupled ones have one text each."""
    coupled = {"temperature": 1.0, "seed": number, "mode": "coupled"}
    return {
        "prompt_token_ids": [PROMPT[0] + number % 8, *PROMPT[1:]],
        "max_new_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "gamma": 1,
        **(coupled if number % 2 else {"temperature": 0.0}),
    }


async def texts(client: AsyncClient, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    return [(await client.generate(**options(number))).token_ids for number in numbers]


@asynccontextmanager
async def watched(coordinator: Coordinator) -> AsyncIterator[None]:
    """Poll the coordinator's replicas, as a process does."""
    watching = asyncio.create_task(coordinator.pools.watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])


async def test_both_clients_resume_a_stream_that_is_reset_with_any_http2_code() -> None:
    """Each code has a proxy and a client of its own, side by side."""
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        async with AsyncClient(coordinator.server.address) as direct:
            expected = await texts(direct, list(HTTP2_CODES))

        async def resumed(code: int) -> None:
            async with (
                ResettingProxy(coordinator.server.address, after_frames=10) as proxy,
                AsyncClient(proxy.address, budgets=PATIENT) as client,
            ):
                proxy.reset_with(code)
                assert (await client.generate(**options(code))).token_ids == expected[code]
                assert proxy.num_resets > 0
                if code not in (0x2, 0xC):
                    return
                proxy.reset_with(code)
                with Client(proxy.address, budgets=PATIENT) as blocking:
                    output = await asyncio.to_thread(blocking.generate, **options(code))
                assert output.token_ids == expected[code]
                assert proxy.num_resets > 0

        await asyncio.gather(*map(resumed, HTTP2_CODES))


@pytest.mark.parametrize("role", ["target", pytest.param("draft", marks=pytest.mark.full)])
async def test_generations_continue_when_the_stream_to_a_replica_is_reset_with_any_http2_code(role: str) -> None:
    async with Rig() as rig:
        direct = await rig.coordinator()
        async with AsyncClient(direct.server.address) as client:
            expected = await texts(client, list(HTTP2_CODES))
        (service,) = rig.of_role(role)
        async with ResettingProxy(service.address, after_frames=10) as proxy:
            behind = await rig.coordinator(addresses={service.address: proxy.address}, target_wait_s=600.0)
            async with watched(behind), AsyncClient(behind.server.address, budgets=PATIENT) as client:
                for code, text in zip(HTTP2_CODES, expected, strict=True):
                    proxy.reset_with(code)
                    output = await client.generate(**options(code))
                    assert output.token_ids == text
                    assert proxy.num_resets > 0


async def test_a_stream_that_is_always_reset_before_its_first_token_ends_with_a_clear_error() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        async with (
            ResettingProxy(coordinator.server.address, after_frames=1) as proxy,
            AsyncClient(proxy.address, budgets=Budgets(connect_s=0.5, resume_s=0.5)) as client,
        ):
            proxy.reset_with(0x2)
            with pytest.raises(SpecdecError) as caught:
                await client.generate(**options(0))
        assert (type(caught.value), caught.value.reason) == (Unavailable, "COORDINATOR_UNAVAILABLE")
        assert "was reset on its way, with HTTP/2 code 2" in caught.value.message
        assert proxy.num_resets > 1
