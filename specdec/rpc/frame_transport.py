"""Frame transports: the contract, and the implementation over a gRPC stream.

A `ReplicaStream` owns one transport. The transport connects to the replica, hands received frames to the stream and
asks the stream for the next frame to send; calls, timeouts and decoding stay in the stream. The other implementation is
`specdec.rpc.unix_socket_transport`; `specdec.rpc.transport_selector` chooses between them.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc

from specdec.rpc import status

#: gRPC's message of a call on which a write has failed, until the status that the replica has sent is read.
_PROVISIONAL_MESSAGE = "Internal error from Core"

#: Time between two readings of such a call's status, and limit on the readings.
_STATUS_POLL_S = 0.005
_STATUS_POLLS = 400


class FrameExchange(Protocol):
    """The stream as a transport sees it. Implemented by `specdec.rpc.replica_stream.ReplicaStream`."""

    def accept_handshake(self, metadata: Any) -> None:
        """Take the replica's identity, as key and value pairs; call it once, before `receive`.

        Raises:
            Unavailable: the replica is not the one that the stream is meant for.
        """
        ...

    def receive(self, frame: bytes) -> None:
        """Take one frame of replies.

        Raises:
            DecodeError: the bytes are not a frame.
            UnexpectedReply: the frame answers a call that does not wait.
        """
        ...

    def next_frame(self) -> bytes | None:
        """Return the next frame to send, or None if no call waits to be sent."""
        ...


class FrameTransport(Protocol):
    """Carries the frames of one stream. It is used once, from one event loop."""

    is_unix_socket: bool

    async def run(self, exchange: FrameExchange) -> str:
        """Connect and carry frames in both directions until the connection ends; return why it ended.

        Errors that `exchange` raises end the connection and are raised here.
        """
        ...

    def notify(self) -> None:
        """Announce that `FrameExchange.next_frame` has something to send."""
        ...

    def abort(self) -> None:
        """Close the connection at once. Idempotent; allowed before `run`."""
        ...


class GrpcTransport:
    """Frames over one bidirectional gRPC call."""

    is_unix_socket = False

    def __init__(self, call: Any, address: str) -> None:
        """
        Args:
            call: `grpc.aio.StreamStreamCall` without serializers, so that it reads and writes bytes.
            address: HOST:PORT of the replica, for messages.
        """
        self._call = call
        self._address = address
        self._wake = asyncio.Event()

    async def run(self, exchange: FrameExchange) -> str:
        writer = asyncio.create_task(self._write(exchange))
        try:
            return await self._read(exchange)
        finally:
            writer.cancel()

    def notify(self) -> None:
        self._wake.set()

    def abort(self) -> None:
        self._call.cancel()

    async def _read(self, exchange: FrameExchange) -> str:
        has_shaken_hands = False
        try:
            while (frame := await self._call.read()) is not grpc.aio.EOF:
                if not has_shaken_hands:  # a call that fails before its first frame has a better message than metadata
                    exchange.accept_handshake(await self._call.initial_metadata())
                    has_shaken_hands = True
                exchange.receive(frame)
        except grpc.aio.AioRpcError as error:
            failure = await self._final_failure(error)
            if failure is not None:
                return status.from_rpc_error(failure, peer=self._address).message
        return f"{self._address}: the replica closed the stream"

    async def _final_failure(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError | None:
        """Return the error with the status that the replica has sent; None if it closed the stream without an error.

        A write fails if the replica has ended the call. gRPC then sets a status of its own, without a reason, and
        replaces it once it has read the replica's.
        """
        for _ in range(_STATUS_POLLS):
            if error.details() != _PROVISIONAL_MESSAGE:
                break
            await asyncio.sleep(_STATUS_POLL_S)
            try:
                await self._call.read()
            except grpc.aio.AioRpcError as newer:
                error = newer
            else:
                return None
        return error

    async def _write(self, exchange: FrameExchange) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while frame := exchange.next_frame():
                    await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader sees the same error and reports it
        finally:
            self._call.cancel()  # the end of the writer ends the stream; no effect on a stream that has ended
