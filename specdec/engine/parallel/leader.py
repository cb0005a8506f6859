"""Worker of a group's first rank, which runs every step on all ranks.

To the layers above it is a worker like any other. Every rank runs the same forward pass on its part of the model. The
first rank gathers the logits, which go back to `specdec.engine.loop.steps`, and alone draws tokens, so ranks cannot
disagree. A step that fails on any rank leaves the others waiting in the middle of it, so the whole group is lost. The
other ranks run `service.rank`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.contract.errors import SpecdecError, Unavailable
from specdec.engine.base import StepPlan, Worker, WorkerLost
from specdec.engine.cold_tier import ColdTier
from specdec.engine.parallel.group import STEP_TIMEOUT_S, RankGroup
from specdec.engine.parallel.leader_tier import LeaderTier
from specdec.engine.parallel.rank_heartbeat import RankHeartbeat
from specdec.engine.parallel.rank_messages import END, NOTHING, PartState, Words, pack_plan

#: Time between two keep-alive messages, well below a group's timeout for a silent rank.
KEEP_ALIVE_S = 10.0


@dataclass(slots=True)
class _Step:
    """The newest step."""

    began_s: float
    has_ended: Callable[[], bool]
    """Return whether the step has ended on the device; called from another thread."""


def _end_on_device(logits: torch.Tensor) -> Callable[[], bool]:
    """Return a function that tells whether the device has finished everything that is queued now."""
    if not logits.is_cuda:
        return lambda: True
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(logits.device))
    return event.query


class LeaderWorker(Worker):
    """Implements `engine.base.Worker` by a group of ranks. Call `execute` and `close` from one thread at a time."""

    def __init__(self, own: Worker, ranks: RankGroup, rank_heartbeat: RankHeartbeat) -> None:
        """
        Args:
            own: worker of this rank's part of a step.
            ranks: group whose other ranks follow from now on.
            rank_heartbeat: connections that report a lost rank.
        """
        self.shape = own.shape
        self._own = own
        self._ranks = ranks
        self._rank_heartbeat = rank_heartbeat
        self._sending = threading.Lock()  # a step, or a message between steps
        self._guard = threading.Lock()
        self._lost: WorkerLost | None = None  # guarded
        self._note_lost: Callable[[WorkerLost], None] | None = None  # guarded
        self._ended = threading.Event()
        self._newest = _Step(time.monotonic(), lambda: True)
        rank_heartbeat.watch(self._note)
        threading.Thread(target=self._keep_alive, name="keep-ranks-alive", daemon=True).start()

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Run one step on all ranks; see `engine.base.Worker.execute`."""
        with self._sending:
            if self._lost is not None:
                raise self._lost
            try:
                self._newest = step = _Step(time.monotonic(), lambda: False)
                self._ranks.send(pack_plan(plan))
                logits = self._own.execute(plan)
                step.has_ended = _end_on_device(logits)
                return logits
            except Exception as error:
                raise self._lose(error) from error

    def read_blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Return this rank's part of KV blocks; see `engine.base.Worker.read_blocks`."""
        return self._own.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Store this rank's part of KV blocks; see `engine.base.Worker.write_blocks`."""
        self._own.write_blocks(block_ids, rows)

    def divided(self, tier: ColdTier) -> ColdTier:
        """Return a tier of which every rank keeps its own part; see `engine.base.Worker.divided`."""
        return LeaderTier(tier, self._tell, self._ask)

    def watch(self, note_lost: Callable[[WorkerLost], None]) -> None:
        """Report the loss of the group; see `engine.base.Worker.watch`."""
        with self._guard:
            self._note_lost, lost = note_lost, self._lost
        if lost is not None:
            note_lost(lost)

    def close(self) -> None:
        """Make the other ranks end. Idempotent."""
        with self._sending:
            if self._ended.is_set():
                return
            self._ended.set()
            self._rank_heartbeat.close()
            if self._lost is None:
                self._say(END)
            self._own.close()

    def _tell(self, message: Words) -> None:
        """Send a message to the other ranks. Do nothing if the group is lost, which is reported elsewhere."""
        with self._sending, contextlib.suppress(WorkerLost):
            self._send(message)

    def _ask(self, message: Words) -> int:
        """Send a message to the other ranks and return their smallest answer. Raises WorkerLost."""
        with self._sending:
            self._send(message)
            try:
                return self._ranks.smallest(PartState.THERE)
            except RuntimeError as error:
                raise self._lose(error) from error

    def _send(self, message: Words) -> None:
        if self._ended.is_set():
            raise WorkerLost("the worker is closed and its ranks have ended")
        if self._lost is not None:
            raise self._lost
        try:
            self._ranks.send(message)
        except RuntimeError as error:
            raise self._lose(error) from error

    def _keep_alive(self) -> None:
        while not self._ended.wait(KEEP_ALIVE_S):
            self._check_device()
            if self._sending.acquire(timeout=KEEP_ALIVE_S):  # a step that hangs may hold it
                try:
                    if not self._ended.is_set() and self._lost is None:
                        self._say(NOTHING)
                finally:
                    self._sending.release()

    def _check_device(self) -> None:
        """Give the group up if a device hangs: sums over ranks that are part of a CUDA graph have no timeout."""
        step = self._newest
        if time.monotonic() - step.began_s < STEP_TIMEOUT_S or self._lost is not None:
            return
        try:
            if not step.has_ended():
                self._lose(Unavailable(f"a step has not ended on the devices of all ranks within {STEP_TIMEOUT_S:g} s"))
        except RuntimeError as error:
            self._lose(error)

    def _say(self, kind: int) -> None:
        try:
            self._ranks.send(np.array([kind], dtype=np.int32))
        except RuntimeError as error:
            self._lose(error)

    def _note(self, error: SpecdecError) -> None:
        self._lose(error)

    def _lose(self, error: Exception) -> WorkerLost:
        """Record that the group is lost and return the first reason, `error` or an earlier one. Any thread."""
        with self._guard:
            is_first_report = self._lost is None
            if self._lost is None:
                why = error.message if isinstance(error, SpecdecError) else f"a step failed on rank 0: {error}"
                self._lost = WorkerLost(" ".join(why.split()))
            lost, note_lost = self._lost, self._note_lost
        if is_first_report and note_lost is not None:
            note_lost(lost)
        return lost
