"""Notices that a step goes on far beyond its time: a device that hangs hangs the thread that waits for it.

A thread of its own looks at the step that runs, four times a second, and measures how long it has run by its own looks:
time in which the whole process stands still, or this thread gets no turn, does not count. Once a step is beyond its
time, whoever waits for an answer is told that there will be none; once it has ended after all, calls are taken again.
The device thread's part is one attribute store where a step begins and one where it ends.

Not here: how long a step takes (`specdec.engine.schedule.step_times`), what the device thread makes of calls that
nobody waits for any more (`device_loop`; `steps` makes the watchdog), and the process that stands still as a whole,
which only others can see.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from specdec.engine.base import StepPlan
from specdec.engine.loop.delivery import Outbox, Waiter
from specdec.engine.schedule.step_times import StepLoad
from specdec.errors import Unavailable
from specdec.types import BLOCK_TOKENS

#: Between two looks.
LOOK_INTERVAL_S = 0.25

#: What a step may take: this many times its prediction, and so much more, whatever the prediction.
PATIENCE_FACTOR = 2.0
PATIENCE_S = 2.0

_log = logging.getLogger(__name__)


class Watchdog:
    """Looks at one device thread's steps, in a thread of its own, until `end`."""

    def __init__(self, predict_s: Callable[[StepLoad], float]) -> None:
        """Starts the thread.

        Args:
            predict_s: seconds that a step takes, rather too many than too few; infinite: it is not watched. Asked of
                long steps only, from the watchdog's thread.
        """
        self.plan: StepPlan | None = None
        """What runs now; set by the device thread."""
        self.is_stalled = False
        """Whether the step that runs is beyond its time."""
        self.num_steps = 0
        """That have ended; counted by the device thread."""
        self._predict_s = predict_s
        self._limit_s = float("inf")  # of the step that stalled last
        self._lost: str | None = None
        self._open: set[Waiter] = set()
        self._seen: StepPlan | None = None
        self._lasted_s = 0.0
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="specdec-watchdog", daemon=True).start()

    def end(self) -> None:
        """Stops looking. Idempotent."""
        self._ended.set()

    def give_up(self, why: str) -> None:
        """The device is gone: from now on it is stalled for good. Any thread."""
        self._lost, self.is_stalled = why, True
        self._fail_open()

    def note_turn(self) -> None:
        """The device thread has done what it had to do, a step among it or none."""
        if self.plan is not None:
            self.plan = None
            self.num_steps += 1

    def limit_s(self) -> float:
        """Seconds that what runs now may take: twice its prediction and more; infinite where nothing is predicted."""
        plan = self.plan
        return PATIENCE_S if plan is None else self._limit_of(plan)

    def require_moving(self) -> None:
        """Raises Unavailable while the device is stalled."""
        if self.is_stalled:
            raise self._stalled()

    async def answer_to(self, waiter: Waiter) -> Any:
        """Awaits what the device thread answers.

        Raises:
            Unavailable: the device is stalled, or stalls meanwhile; what was asked is carried out once it goes on.
            SpecdecError: what it answered.
        """
        # In this order: whoever is not among the open ones when the device stalls finds it stalled.
        self._open.add(waiter)
        try:
            self.require_moving()
            return await waiter.future
        finally:
            self._open.discard(waiter)

    def believed_s(self, step_s: float) -> float:
        """What a step that took `step_s` and has just ended says of those to come.

        A hang says nothing, but a device that has become slow for good must be believed some day: limit by limit.
        """
        return min(step_s, self._limit_s) if self.is_stalled else step_s

    def _run(self) -> None:
        while not self._ended.wait(LOOK_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        if self._lost is not None:
            return
        plan = self.plan
        if plan is None or plan is not self._seen:
            self._seen, self._lasted_s = plan, 0.0
            is_stalled = False
        else:
            self._lasted_s += LOOK_INTERVAL_S
            is_stalled = self.is_stalled or self._is_beyond(plan)
        if is_stalled != self.is_stalled:
            self.is_stalled = is_stalled
            self._tell()

    def _is_beyond(self, plan: StepPlan) -> bool:
        if self._lasted_s <= PATIENCE_S:
            return False
        limit_s = self._limit_of(plan)
        if self._lasted_s <= limit_s:
            return False
        self._limit_s = limit_s
        return True

    def _limit_of(self, plan: StepPlan) -> float:
        return PATIENCE_FACTOR * self._predict_s(load_of(plan)) + PATIENCE_S

    def _tell(self) -> None:
        if not self.is_stalled:
            _log.warning("the step has ended: calls are taken again")
            return
        _log.error("a step runs for more than %.1f s: the device hangs; %d calls fail", self._limit_s, len(self._open))
        self._fail_open()

    def _fail_open(self) -> None:
        outbox = Outbox()
        for waiter in list(self._open):
            outbox.put(waiter, self._stalled())
        outbox.deliver()

    def _stalled(self) -> Unavailable:
        return Unavailable(self._lost or "the device of this replica hangs")


def load_of(plan: StepPlan) -> StepLoad:
    """What a plan runs, as far as its time depends on it; `scheduler` says which slices are prefill."""
    load = StepLoad()
    for part in plan.slices:
        num_tokens = len(part.token_ids)
        if num_tokens > BLOCK_TOKENS + part.num_logit_rows:
            load = load.with_prefill(num_tokens, part.start)
        else:
            load = load._replace(
                num_tokens=load.num_tokens + num_tokens, num_context_tokens=load.num_context_tokens + part.start
            )
    return load
