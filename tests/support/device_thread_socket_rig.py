"""A draft service with both Unix sockets around a table model, and links to it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import Any

from draft_service.proposer import Proposer
from draft_service.servicer import DraftServicer
from specdec.contract.types import ProposeRequest
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc.client import DraftLink
from specdec.rpc.service_server import DRAFT_SERVICE, ServiceServer
from tests.support.table_worker import TableWorker
from tests.support.watched_worker import WatchedWorker


class NotedProposer(Proposer):
    """A proposer that records the threads of its calls."""

    def __init__(self, worker: WatchedWorker) -> None:
        super().__init__(worker)
        self.threads: list[str] = []

    async def propose(self, request: ProposeRequest) -> Any:
        self.threads.append(threading.current_thread().name)
        return await super().propose(request)


class Replica:
    """A draft service around a table model, with a port and both sockets."""

    def __init__(self) -> None:
        self.worker = WatchedWorker(TableWorker(vocabulary_size=24, num_blocks=256, context=512))
        self.engine = NotedProposer(self.worker)
        self.servicer = DraftServicer(self.engine, EngineMetrics("table", role="draft"))
        self.server = ServiceServer("127.0.0.1:0", service_names=(DRAFT_SERVICE,))
        self.servicer.add_to(self.server.grpc_server)

    async def __aenter__(self) -> Replica:
        await self.server.start()
        await self.engine.warm_up()
        self.engine.threads.clear()
        await self.servicer.open_unix_sockets(1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.worker.let_go()
        await asyncio.gather(self.server.stop(0), self.servicer.close_unix_sockets(0))
        await self.engine.close()
        self.engine.check_integrity()

    @property
    def device_thread_socket(self) -> str:
        return self.servicer.info().device_thread_socket


@asynccontextmanager
async def linked(replica: Replica) -> Any:
    link = DraftLink(replica.server.address)
    announce_unix_sockets(replica, link)
    try:
        yield link
    finally:
        await link.close()


def announce_unix_sockets(replica: Replica, link: DraftLink) -> None:
    """Give the link the names of the replica's sockets, as the coordinator does."""
    info = replica.servicer.info()
    link.transports.unix_socket = info.unix_socket
    link.transports.device_thread_socket = info.device_thread_socket
