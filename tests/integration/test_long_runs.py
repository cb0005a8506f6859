"""Many steps of runs on one stream: nothing is left of a step once it was taken, neither memory nor an open item."""

from __future__ import annotations

import asyncio
import gc
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.replicas.replica import TARGET
from specdec.contract.types import RunLimit, SamplingFilters, VerifyRequest
from specdec.engine.simulated.device import ModelledTime
from specdec.engine.simulated.engines import SimulatedTarget
from specdec.engine.simulated.simulated_pair import PRESETS
from specdec.rpc.client import open_link
from specdec.rpc.open_calls import WireStats
from tests.support.round_driver import make_round
from tests.support.table_services import serve_engine

#: Tokens of a session, which is released then: what it holds grows with them.
SESSION_TOKENS = 500
AHEAD = 8
PROMPT = [5, 6, 7, 8]
#: One object, as of one request: the encoded form of the last ones is kept.
GREEDY = SamplingFilters(temperature=0.0)
#: Objects that there may be more after all steps than after the first ones; the newest sessions are remembered. An
#: object kept for each call would be 625 and more.
SPARE_OBJECTS = 400
#: Blocks of memory, likewise; one kept for each step would be 5,000 and more.
SPARE_BLOCKS = 3000


async def run_session(link: Any, number: int, num_tokens: int) -> None:
    """Decide tokens of one session in runs, each renewed as a coordinator does."""
    tokens, most = list(PROMPT), len(PROMPT) + num_tokens
    run: Any = None
    while len(tokens) < most:
        until = min(len(tokens) + AHEAD, most)
        if run is None or run.has_ended:
            position = make_round(tokens, session_id=f"s{number}", round_id=len(tokens), filters=GREEDY)
            request = VerifyRequest(position, np.empty(0, np.uint32), (), run=RunLimit(until, frozenset()))
            run = link.open_run(request, WireStats())
        else:
            run.renew(until, len(tokens))
        step = await run.next()
        assert step.kv_len == len(tokens)
        tokens.append(step.decided_token_id)
    run.close()
    await link.release([f"s{number}"])


def open_items(link: Any, service: Any) -> list[int]:
    """Return the numbers of everything that a stream keeps for its calls, at both of its ends."""
    (stream,) = link._streams.values()
    calls = stream._calls
    return [len(calls._pending), len(calls._owed), len(stream._outbox), len(stream._renewals),
            len(service.engine._gate.calls.jobs), service.engine.info().num_sessions]  # fmt: skip


def size() -> tuple[int, int]:
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks()


@pytest.mark.parametrize(
    "num_steps", [5_000, pytest.param(100_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
async def test_many_steps_on_one_stream_leave_memory_and_open_items_as_they_were(num_steps: int) -> None:
    pair = replace(PRESETS["8b-0.6b"], target=ModelledTime(0.0, 0.0))
    engine = SimulatedTarget(pair, max_gamma=8)
    service = await serve_engine(TARGET, engine)
    link = open_link(TARGET, service.address)
    try:
        for number in range(4):
            await run_session(link, number, SESSION_TOKENS)
        (stream,) = link._streams.values()
        objects, blocks = size()
        for number in range(4, 4 + num_steps // SESSION_TOKENS):
            await run_session(link, number, SESSION_TOKENS)
        more_objects, more_blocks = size()
        assert list(link._streams.values()) == [stream]
        await asyncio.sleep(0)
        assert open_items(link, service) == [0] * 6
        print(f"{more_objects - objects} objects and {more_blocks - blocks} blocks more after {num_steps} steps")
        assert more_objects - objects < SPARE_OBJECTS
        assert more_blocks - blocks < SPARE_BLOCKS
    finally:
        await link.close()
        await service.kill()
