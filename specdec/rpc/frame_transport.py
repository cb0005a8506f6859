"""Frame transports: the contract, and the implementation over a gRPC stream.

A `ReplicaStream` owns one transport. The transport connects to the replica, hands received frames to the stream and
asks the stream for the next frame to send; calls, timeouts and decoding stay in the stream. The other implementation is
`specdec.rpc.unix_socket_transport`; `specdec.rpc.transport_selector` chooses between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

import grpc

from specdec.rpc import status_mapping

#: gRPC's message of a call on which a write has failed.
_FAILED_WRITE_MESSAGE = "Internal error from Core"

#: Longest wait for the replica's status after a write has failed.
_STATUS_WAIT_S = 2.0


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


class _ReplicaStatus:
    """The status with which the replica ended a call.

    A write fails if the replica has ended the call. gRPC then sets a status of its own, without a reason, sometimes
    before the replica's status arrives and sometimes over it. A done callback runs at each of them.
    """

    def __init__(self, call: Any) -> None:
        self._error: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._take)

    async def wait(self, default: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Return the status as an error; `default` if it does not arrive in time."""
        await asyncio.wait([self._error], timeout=_STATUS_WAIT_S)
        return self._error.result() if self._error.done() else default

    def _take(self, call: Any) -> None:
        details = _result_of_finished(call.details())
        if self._error.done() or details == _FAILED_WRITE_MESSAGE:
            return
        self._error.set_result(
            grpc.aio.AioRpcError(
                _result_of_finished(call.code()),
                _result_of_finished(call.initial_metadata()),
                _result_of_finished(call.trailing_metadata()),
                details,
            )
        )


def _result_of_finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that does not wait, as a call's coroutines do once it has a status."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    raise RuntimeError("the call has no status yet")


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
        self._status = _ReplicaStatus(call)
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
            ended = await self._status.wait(default=error)
            if ended.code() is not grpc.StatusCode.OK:
                return status_mapping.from_rpc_error(ended, peer=self._address).message
        return f"{self._address}: the replica closed the stream"

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
