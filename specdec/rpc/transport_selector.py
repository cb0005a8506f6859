"""The choice of the transport for a link's calls: gRPC, or the replica's Unix socket.

Over gRPC a message wakes a thread of gRPC's core and then the event loop; over a Unix socket it wakes the event loop
alone, so a known socket is preferred. A socket's name does not say where its replica is: on another machine or in
another container the connection fails. A socket that failed once is not tried again. Used by `specdec.rpc.link`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc

from specdec.access.tls import Signature, Tls
from specdec.contract.errors import InvalidRequest, Unavailable
from specdec.rpc.channels import dial
from specdec.rpc.frame_transport import FrameTransport, GrpcTransport
from specdec.rpc.handshake import Metadata, meant_for
from specdec.rpc.unix_socket_transport import UnixSocketTransport
from specdec.rpc.unix_sockets import is_name

_CHANNEL_OPTIONS = (
    # A peer that vanished without a FIN is detected within 10 s; one that stalls for less than 5 s is not dropped.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted replica is dialled again soon.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 64 << 20),
    # Links to different replicas never share a connection, and a link made after a failure dials a new one.
    ("grpc.use_local_subchannel_pool", 1),
)


class TransportSelector:
    """Chooses and opens the transports of one link, and owns its gRPC channel. Use from one event loop."""

    def __init__(self, address: str, stream_method: str, metadata: Metadata = (), tls: Tls | None = None) -> None:
        """
        Args:
            address: HOST:PORT of the replica. Nothing is dialled yet.
            stream_method: full name of the gRPC method that frames travel on.
            metadata: sent with every gRPC call: the credential of the caller.
            tls: credentials of the gRPC channel; None: plaintext.
        """
        self.unix_socket = ""
        """The replica's Unix socket, as its `EngineInfo` states it; "": none."""
        self._address = address
        self._stream_method = stream_method
        self.tls = tls
        self.metadata = tuple(metadata)
        self._channel: grpc.aio.Channel | None = None
        self._files: Signature = ()
        """Version of the certificate files that the channel was made with."""
        self._left_channels: list[grpc.aio.Channel] = []
        self._lost_socket = ""
        self.is_closed = False

    @property
    def has_unix_socket(self) -> bool:
        """True while the replica has a Unix socket that has not failed."""
        return not self.is_closed and self.unix_socket != self._lost_socket and is_name(self.unix_socket)

    def open(self, model: str) -> FrameTransport:
        """Return a transport that has not connected yet; only the model with this fingerprint may answer, "": any.

        Raises:
            Unavailable: the link is closed.
        """
        if self.has_unix_socket:
            name = self.unix_socket
            return UnixSocketTransport(name, model, self._address, partial(self._note_lost, name))
        # Without serializers: frames are bytes here.
        call: Any = self.channel().stream_stream(self._stream_method)(metadata=(*self.metadata, *meant_for(model)))
        return GrpcTransport(call, self._address)

    def channel(self) -> grpc.aio.Channel:
        """Return the gRPC channel to the replica, dialling it at the first use.

        Raises:
            Unavailable: the link is closed, or the files of its credentials cannot be used.
        """
        if self.is_closed:
            raise Unavailable(f"{self._address}: the link is closed")
        if self._channel is None:
            self._files = () if self.tls is None else self.tls.signature()
            try:
                self._channel = dial(self._address, _CHANNEL_OPTIONS, tls=self.tls)
            except InvalidRequest as error:  # files that are being replaced; the next attempt reads them again
                raise Unavailable(f"{self._address}: {error.message}") from error
        return self._channel

    def note_refused_connection(self) -> None:
        """Make another channel for the next call if the certificate files have changed since the last one was made.

        The replica refused a connection, or its certificate was refused, so no call runs on the channel.
        """
        if self._channel is not None and self.tls is not None and self.tls.signature() != self._files:
            self._left_channels.append(self._channel)
            self._channel = None

    def refuse(self) -> None:
        """Open nothing from now on. Idempotent."""
        self.is_closed = True

    async def close(self) -> None:
        """Close the channel, and open nothing from now on. Idempotent."""
        self.refuse()
        for channel in (self._channel, *self._left_channels):
            if channel is not None:
                await channel.close()

    def _note_lost(self, name: str) -> None:
        if name == self.unix_socket:  # not an earlier one
            self._lost_socket = name
