"""A worker that is lost in a step, between steps, or while a step waits for the lost part."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest

from specdec.contract.errors import Internal, Unavailable
from specdec.contract.types import ProposeRequest
from specdec.engine.base import WorkerLost
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.loop.device_loop import EngineLoop
from specdec.engine.loop.job import Job
from specdec.engine.sessions.calls import Call, identity_of
from tests.support.round_driver import make_round
from tests.support.table_worker import TableWorker

_PATIENCE_S = 20.0


class DivisibleWorker(TableWorker):
    """A table worker that can be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.note_lost: Callable[[WorkerLost], None] | None = None
        self.closed_by: list[str] = []

    def watch(self, note_lost: Callable[[WorkerLost], None]) -> None:
        self.note_lost = note_lost

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)

    def lose(self) -> None:
        """Report the loss from another thread, as the rank heartbeat does."""
        assert self.note_lost is not None
        threading.Thread(target=self.note_lost, args=(WorkerLost("rank 1 is gone"),)).start()


class OneToken:
    """A program that answers each job with the argmax token."""

    def advance(self, jobs: Sequence[Job], logits: StepLogits) -> None:
        for job, token_id in zip(jobs, logits.top_ids, strict=True):
            job.finish(token_id)


def call(session_id: str) -> Call:
    request = ProposeRequest(make_round([3, 4, 5], session_id=session_id), 1)
    return Call(request, identity_of(request), np.empty(0, dtype=np.uint32), num_logit_rows=1, max_kv_len=3)


class Rig:
    def __init__(self) -> None:
        self.worker = DivisibleWorker()
        self.loop = EngineLoop(self.worker, OneToken())

    async def require_ended(self) -> None:
        """Check that the engine has reported its end and refuses calls."""
        with pytest.raises(Internal, match="rank 1 is gone"):
            await self.loop.wait_ended()
        with pytest.raises(Unavailable):
            await self.loop.call(call("later"))
        assert self.loop.load().draining


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    async with asyncio.timeout(_PATIENCE_S):
        yield rig
    rig.worker.gate.set()
    await rig.loop.close()


async def test_calls_of_a_lost_worker_may_be_retried_on_another_replica(rig: Rig) -> None:
    await rig.loop.call(call("a"))
    num_steps = len(rig.worker.steps)
    rig.worker.fail_next = WorkerLost("rank 1 is gone")
    with pytest.raises(Unavailable) as caught:
        await rig.loop.call(call("b"))
    assert caught.value.reason == "REPLICA_UNAVAILABLE"
    await rig.require_ended()
    assert len(rig.worker.steps) == num_steps + 1  # no step is tried on a lost worker


async def test_a_worker_that_is_lost_while_idle_ends_the_engine(rig: Rig) -> None:
    await rig.loop.call(call("a"))
    rig.worker.lose()
    await rig.require_ended()


async def test_a_worker_that_is_lost_while_a_step_waits_for_it_fails_the_calls_at_once(rig: Rig) -> None:
    rig.worker.gate.clear()
    waiting = asyncio.create_task(rig.loop.call(call("a")))
    await asyncio.to_thread(rig.worker.entered.acquire)
    rig.worker.lose()
    with pytest.raises(Unavailable, match="rank 1 is gone"):
        await waiting
    await rig.require_ended()
    await rig.loop.close()  # does not wait for the step


async def test_an_engine_closes_its_worker_last_and_on_the_thread_that_ran_its_steps(rig: Rig) -> None:
    await rig.loop.call(call("a"))
    assert not rig.worker.closed_by
    await rig.loop.close()
    assert rig.worker.closed_by == ["specdec-device"]
