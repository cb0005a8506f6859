"""The common base of simulated drafts and targets: the real gate and session table, and a simulated device.

A call passes the same gate (`specdec.engine.sessions.calls`) and session table (`specdec.engine.sessions.table`) as in
a real engine. Its steps are waits on `specdec.engine.simulated.device`, and its answer is computed when it begins.
`specdec.engine.simulated.engines` derives the engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from specdec.contract.engine_api import EndedTurn, EngineInfo, EngineStats
from specdec.contract.types import BLOCK_TOKENS, TokenIds
from specdec.contract.version import __version__
from specdec.engine.base import StepObserver
from specdec.engine.schedule.scheduler import Scheduler, is_short
from specdec.engine.sessions.calls import Call
from specdec.engine.sessions.event_loop_gate import EventLoopGate
from specdec.engine.sessions.sequence import Sequence
from specdec.engine.simulated.device import ModelledTime, SimulatedDevice, Timeline, Work
from specdec.engine.simulated.simulated_pair import SimulatedPair
from specdec.engine.simulated.text import EOS_TOKEN_ID, VOCABULARY_SIZE, simulated_vocabulary_fingerprint

MAX_CONTEXT_TOKENS = 131_072
DEFAULT_NUM_KV_BLOCKS = 65_536

#: Delay between an answer and less urgent work, which would hold the interpreter lock and delay the answer.
_PAUSE_S = 1e-3

NO_TOKENS: TokenIds = np.empty(0, dtype=np.uint32)


@dataclass(eq=False, slots=True)
class SimulatedJob:
    """A call in progress. Event loop only."""

    call: Call
    sequence: Sequence
    arrival_s: float
    num_cached_tokens: int = 0
    answer: Any = None
    """The answer; computed when the job begins to run."""
    new_token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    """Draft tokens that have KV once the job is done."""
    work: Work | None = None
    """Steps on the device, once the job runs."""


class SimulatedReplica:
    """Owns the gate and the device. Use it from one event loop."""

    role: ClassVar[str]
    is_stalled: ClassVar[bool] = False
    """Always False: no step is run that could hang."""

    def __init__(
        self,
        pair: SimulatedPair,
        *,
        replica_id: str = "local",
        model: str = "",
        pool: str = "default",
        max_gamma: int,
        max_run: int = 0,
        num_kv_blocks: int = DEFAULT_NUM_KV_BLOCKS,
        scheduler: Scheduler | None = None,
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """See `specdec.engine.loop.replica_engine.ReplicaOptions`.

        `scheduler` plans the steps, `observer` is notified of each, and `clock` measures when pins end.
        """
        self._pair = pair
        self._max_gamma = max_gamma
        self._gate: EventLoopGate[SimulatedJob] = EventLoopGate(
            num_kv_blocks,
            make_job=SimulatedJob,
            begin=self._begin,
            # A job that is on the device runs to its end even if its caller has gone.
            may_abandon=lambda job: job.work is None or job.call.run is not None,
            drop=self._stop,
            clock=clock,
        )
        self._observer = observer
        self._timeline = Timeline()
        self._device = SimulatedDevice(
            self._forward, self._timeline, scheduler or Scheduler(), observer, self._send_steps
        )
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._info = EngineInfo(
            version=__version__,
            role=self.role,
            pool=pool,
            replica_id=replica_id,
            model=model,
            model_fingerprint=f"simulated-{self.role}",
            vocabulary_fingerprint=simulated_vocabulary_fingerprint(),
            vocabulary_size=VOCABULARY_SIZE,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            eos_token_ids=(EOS_TOKEN_ID,),
            max_gamma=max_gamma,
            num_kv_blocks=num_kv_blocks,
            kv_block_tokens=BLOCK_TOKENS,
            kv_usage=0.0,
            num_sessions=0,
            draining=False,
            dtype="none",
            device="simulated",
            max_run=max_run,
        )

    @property
    def _forward(self) -> ModelledTime:
        raise NotImplementedError

    def info(self) -> EngineInfo:
        """Return the replica's description with its current load."""
        return replace(
            self._info,
            kv_usage=self._gate.sessions.num_active_blocks / self._gate.blocks.num_blocks,
            num_sessions=self._gate.sessions.num_with_kv,
            num_running=self._gate.sessions.num_running,
            draining=self._gate.is_closing,
        )

    def stats(self) -> EngineStats:
        """Return the state and the counts; see `Engine.stats`."""
        calls, blocks, sessions = self._gate.calls, self._gate.blocks, self._gate.sessions
        works = [job.work for job in list(calls.jobs.values())]
        num_running = sum(work is not None and work.began_s is not None for work in works)
        return EngineStats(
            num_waiting_calls=len(works) - num_running,
            num_running_calls=num_running,
            num_backlog_tokens=sum(work.num_pending for work in works if work is not None and not is_short(work)),
            num_kv_blocks=blocks.num_blocks,
            num_active_kv_blocks=sessions.num_active_blocks,
            num_held_kv_blocks=blocks.num_held,
            num_free_kv_blocks=blocks.num_free,
            num_kv_exhausted=calls.num_exhausted,
            num_preemptions=sessions.num_preemptions,
        )

    async def warm_up(self) -> None:
        """Do nothing: there is nothing to warm up."""

    async def release(self, session_ids: list[str]) -> None:
        """Free the KV of sessions; calls in flight on them miss. Idempotent."""
        for session_id in session_ids:
            self._device.forget(session_id)
        self._gate.release(session_ids)

    async def end_turns(self, turns: list[EndedTurn]) -> None:
        """Abandon the calls of turns and give back the KV blocks reserved for them. Idempotent."""
        for turn in turns:
            self._device.forget(turn.session_id)
        self._gate.end_turns(turns)

    async def close(self) -> None:
        """Finish the calls in flight, then free everything. Idempotent."""
        await self._gate.drain()
        await asyncio.to_thread(self._timeline.end)
        self._gate.end()

    async def wait_ended(self) -> None:
        """Return once the engine has been closed."""
        await self._gate.wait_ended()

    def check_integrity(self) -> None:
        """Check the session table's invariants. Raises RuntimeError if one is violated."""
        self._gate.sessions.check_integrity()

    def _begin(self, job: SimulatedJob, now_s: float) -> None:
        """Compute a job's answer and submit its work, which leaves the coordinator at `now_s`."""
        raise NotImplementedError

    def _submit(self, job: SimulatedJob, now_s: float, *, after: Callable[[], None] | None = None, **work: Any) -> None:
        """Submit a job to the device; `work` are fields of `Work`.

        `after` is called on the device's thread once the answer is on its way.
        """
        event_loop = self._event_loop = asyncio.get_running_loop()

        def finish(now_s: float) -> None:
            answered = partial(event_loop.call_soon_threadsafe, self._complete, job)
            self._timeline.at(now_s + self._pair.link_delay_s, lambda _: answered())
            if after is not None:
                self._timeline.at(now_s + self._pair.link_delay_s + _PAUSE_S, lambda _: after())

        position = job.call.position
        job.work = Work(
            position.session_id,
            context_tokens=position.committed_len,
            finish=finish,
            kv_len=job.sequence.kv_len,
            job=None if job.call.run is None else job,
            **work,
        )
        self._device.submit(job.work, now_s + self._pair.link_delay_s)

    def _send_steps(self, works: list[Work], now_s: float) -> None:
        """Send the answers of runs that go on; called on the device's thread."""
        event_loop = self._event_loop
        assert event_loop is not None
        steps = [(work.job, work.step_s, work.step_tokens) for work in works]
        self._timeline.at(
            now_s + self._pair.link_delay_s, lambda _: event_loop.call_soon_threadsafe(self._complete_steps, steps)
        )

    def _complete_steps(self, steps: list[tuple[SimulatedJob, float, int]]) -> None:
        for job, step_s, step_tokens in steps:
            if self._gate.is_current(job):
                self._complete_step(job, step_s, step_tokens)

    def _complete_step(self, job: SimulatedJob, step_s: float, step_tokens: int) -> None:
        """Answer a step of a current run that goes on."""
        raise NotImplementedError

    def _stop(self, job: SimulatedJob) -> None:
        """Let the run of an ended job end on the device too."""
        if job.call.run is not None and job.work is not None:
            self._device.set_end(job.work, 0, time.monotonic())

    def _complete(self, job: SimulatedJob) -> None:
        sequence = job.sequence
        if not self._gate.is_current(job):
            return
        sequence.append(job.new_token_ids)
        sequence.kv_len = len(sequence)
        self._gate.sessions.publish(sequence, job.call.position.committed_len)
        if self._observer is not None and job.work is not None and job.work.began_s is not None:
            self._observer.observe_queue(max(0.0, job.work.began_s - job.arrival_s - self._pair.link_delay_s))
        self._gate.finish(job, replace(job.answer, kv_len=sequence.kv_len, **self._times(job)))

    def _times(self, job: SimulatedJob) -> dict[str, Any]:
        """Return the answer's fields about its own time."""
        return {"forward_s": time.monotonic() - job.arrival_s}
