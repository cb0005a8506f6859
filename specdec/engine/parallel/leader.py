"""The worker of a group's first rank: what it is asked to run, all ranks run.

To those above it is a worker like any other. Every rank runs the same forward pass on its part of the model; the logits
come together here and go back to `specdec.engine.loop.steps`; here alone tokens are drawn, so ranks cannot disagree. A
step that fails on any rank leaves the others in the middle of it: the group is lost, never a single step. Not here:
what the other ranks do (`engine.parallel.follower`), and which process is which rank (`specdec.service.rank`).
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

from specdec.engine.base import StepPlan, Worker, WorkerLost
from specdec.engine.cold_tier import ColdTier
from specdec.engine.parallel.group import STEP_TIMEOUT_S, RankGroup
from specdec.engine.parallel.leader_tier import LeaderTier
from specdec.engine.parallel.messages import END, NOTHING, PartState, Words, pack_plan
from specdec.engine.parallel.rank_heartbeat import RankHeartbeat
from specdec.errors import SpecdecError, Unavailable

#: Between two messages that say nothing; well below the time after which a group gives a silent rank up.
KEEP_ALIVE_S = 10.0


@dataclass(slots=True)
class _Step:
    """The newest step."""

    began_s: float
    has_ended: Callable[[], bool]
    """On the device; asked from another thread."""


def _end_on_device(logits: torch.Tensor) -> Callable[[], bool]:
    """Whether the device has got as far as what was asked of it up to now."""
    if not logits.is_cuda:
        return lambda: True
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(logits.device))
    return event.query


class LeaderWorker(Worker):
    """Implements `engine.base.Worker` by a group of ranks. `execute` and `close` from one thread at a time."""

    def __init__(self, own: Worker, ranks: RankGroup, rank_heartbeat: RankHeartbeat) -> None:
        """
        Args:
            own: runs this rank's part of a step.
            ranks: the others, who follow from now on.
            rank_heartbeat: says when one of them is gone.
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
        """Runs one step on all ranks; see `engine.base.Worker.execute`."""
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
        """This rank's part of KV blocks; see `engine.base.Worker.read_blocks`."""
        return self._own.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """This rank's part of KV blocks; see `engine.base.Worker.write_blocks`."""
        self._own.write_blocks(block_ids, rows)

    def divided(self, tier: ColdTier) -> ColdTier:
        """See `engine.base.Worker.divided`."""
        return LeaderTier(tier, self._tell, self._ask)

    def watch(self, note_lost: Callable[[WorkerLost], None]) -> None:
        """See `engine.base.Worker.watch`."""
        with self._guard:
            self._note_lost, lost = note_lost, self._lost
        if lost is not None:
            note_lost(lost)

    def close(self) -> None:
        """Tells the other ranks to end. Idempotent."""
        with self._sending:
            if self._ended.is_set():
                return
            self._ended.set()
            self._rank_heartbeat.close()
            if self._lost is None:
                self._say(END)
            self._own.close()

    def _tell(self, message: Words) -> None:
        """Gives the other ranks a message; once the group is lost, nobody: that is found out otherwise."""
        with self._sending, contextlib.suppress(WorkerLost):
            self._send(message)

    def _ask(self, message: Words) -> int:
        """The least of the other ranks' answers. Raises WorkerLost."""
        with self._sending:
            self._send(message)
            try:
                return self._ranks.smallest(PartState.THERE)
            except RuntimeError as error:
                raise self._lose(error) from error

    def _send(self, message: Words) -> None:
        if self._ended.is_set():
            raise WorkerLost("the ranks have been told to end")
        if self._lost is not None:
            raise self._lost
        try:
            self._ranks.send(message)
        except RuntimeError as error:
            raise self._lose(error) from error

    def _keep_alive(self) -> None:
        while not self._ended.wait(KEEP_ALIVE_S):
            self._look_at_device()
            if self._sending.acquire(timeout=KEEP_ALIVE_S):  # a step that hangs may hold it
                try:
                    if not self._ended.is_set() and self._lost is None:
                        self._say(NOTHING)
                finally:
                    self._sending.release()

    def _look_at_device(self) -> None:
        """Gives the group up where a device hangs: nobody else watches sums over ranks that are part of a recording."""
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
        """The group is gone, because of `error` or of what was known before. Any thread."""
        with self._guard:
            is_news = self._lost is None
            if self._lost is None:
                why = error.message if isinstance(error, SpecdecError) else f"a step failed on rank 0: {error}"
                self._lost = WorkerLost(" ".join(why.split()))
            lost, note_lost = self._lost, self._note_lost
        if is_news and note_lost is not None:
            note_lost(lost)
        return lost
