"""Clients that vanish in the middle of their streams: the KV blocks that were reserved for them are free at once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from specdec.contract.engine_api import EndedTurn
from specdec.contract.types import VerifyRequest
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, Rig, request
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

NO_TOKENS = np.empty(0, dtype=np.uint32)
NUM_OUTPUT = 400
#: Blocks of one stream: a prompt of 4 tokens and its output.
STREAM_BLOCKS = 26
#: The system reaches 1 s on an idle machine (`python -m bench faults`), and tests run on one with five times the load.
MOST_S = 5.0


MANY = pytest.param(500, 10_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])


@pytest.mark.parametrize(("num_clients", "num_idle"), [(8, 50), MANY])
async def test_kv_is_free_soon_after_the_last_of_many_clients_vanished(num_clients: int, num_idle: int) -> None:
    async with Rig(num_blocks=(num_clients + 1) * STREAM_BLOCKS) as rig:
        coordinator = await rig.coordinator(max_queue=num_clients + 1, max_running=num_clients + 1)
        await _leave_idle_sessions(rig, num_idle)
        begun = [asyncio.Event() for _ in range(num_clients)]
        # Many streams of a model in Python, on one event loop: drafts would only slow them down.
        mode = pb.SPECULATION_MODE_OFF if num_clients > 100 else pb.SPECULATION_MODE_REJECTION
        clients = [asyncio.create_task(_read(coordinator, index, event, mode)) for index, event in enumerate(begun)]
        pacing = asyncio.create_task(_pace_steps(rig.target.worker))
        await _all_begun(clients, begun)
        pacing.cancel()
        assert sum(not client.done() for client in clients) > num_clients // 2
        assert rig.target.engine.stats().num_active_kv_blocks >= num_clients // 2 * STREAM_BLOCKS
        for client in clients:
            client.cancel()
        vanished_s = time.monotonic()
        services = [rig.target, rig.draft]
        while any(service.engine.stats().num_active_kv_blocks for service in services):
            assert time.monotonic() < vanished_s + MOST_S
            await asyncio.sleep(0.01)
        # One more request is served at once, beside the KV of the others.
        output = await coordinator.generate(request((9, 9, 9), max_new_tokens=8))
        assert len(output.token_ids) > 0
        assert rig.target.engine.stats().num_kv_exhausted == 0
        for service in services:
            service.engine.check_integrity()


async def _leave_idle_sessions(rig: Rig, count: int) -> None:
    """Give the target sessions whose turns have ended."""
    engine: Any = rig.target.engine
    for first in range(0, count, 50):
        positions = [
            make_round(
                [2 + index % 20, 2 + index // 20 % 20, 5, 6],
                session_id=f"idle-{index}",
                output_start=4,
                max_session_tokens=20,
            )
            for index in range(first, min(first + 50, count))
        ]
        await asyncio.gather(*(engine.verify(VerifyRequest(position, NO_TOKENS, ())) for position in positions))
        await engine.end_turns([EndedTurn(position.session_id, position.epoch) for position in positions])
    assert engine.stats().num_active_kv_blocks == 0


async def _pace_steps(worker: TableWorker) -> None:
    """Let a step end every half second, until cancelled.

    Streams that have begun would otherwise keep the event loop so busy that gRPC, which gives up a call that was not
    accepted within 30 seconds, ends the last of 500 calls.
    """
    worker.gate.clear()
    try:
        while True:
            await asyncio.sleep(0.5)
            worker.gate.set()
            worker.gate.clear()
    finally:
        worker.gate.set()


async def _all_begun(clients: list[asyncio.Task[None]], begun: list[asyncio.Event]) -> None:
    """Wait until every stream has a token; raise the error of one that ends before."""
    for client, event in zip(clients, begun, strict=True):
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait({client, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not event.is_set():
            client.result()
            raise AssertionError("a stream ended without a token")


async def _read(coordinator: Coordinator, index: int, begun: asyncio.Event, mode: int) -> None:
    """Read one stream until its client vanishes."""
    prompt = (2 + index % 20, 3 + index // 20 % 20, 7, 8)
    asked = request(prompt, max_new_tokens=NUM_OUTPUT, mode=mode)
    async for response in coordinator.stub.Generate(asked):
        if response.tokens.token_ids:
            begun.set()
