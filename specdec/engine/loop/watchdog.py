"""Detect a device thread that makes no progress: a step far exceeds its time limit, or the thread hangs between steps.

A separate thread polls the running step four times a second and measures its duration in polls. Time in which the whole
process is stopped, or in which this thread does not run, therefore does not count. When a step exceeds its limit, all
waiting calls fail; when it ends after all, calls are accepted again. Between two steps, the device thread has
`PATIENCE_S` for each command and each turn, and for waking up once there is work. The device thread only stores one
attribute at the begin and one at the end of a step.

`specdec.engine.schedule.step_times` predicts the duration of steps. `steps` makes the watchdog. A process that is
stopped as a whole can only be detected from outside.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from specdec.contract.errors import Unavailable
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import StepPlan
from specdec.engine.loop.delivery import Outbox, Waiter
from specdec.engine.loop.inbox import Inbox
from specdec.engine.schedule.step_times import StepLoad

#: Seconds between two polls.
LOOK_INTERVAL_S = 0.25

#: Limit of a step: PATIENCE_FACTOR times its predicted duration plus PATIENCE_S seconds.
PATIENCE_FACTOR = 2.0
PATIENCE_S = 2.0
#: Looks without any step after which they become rarer, and by which factor, so that an idle device costs little.
_QUIET_LOOKS, _REST_FACTOR = 40, 4

_log = logging.getLogger(__name__)


class Watchdog:
    """Watcher of one device thread's steps, in its own thread, until `end`."""

    def __init__(self, predict_s: Callable[[StepLoad], float], inbox: Inbox) -> None:
        """Start the thread.

        Args:
            predict_s: cautious estimate of a step's seconds; infinite: the step is not watched. Called for long steps
                only, in the watchdog's thread.
            inbox: where the device thread sleeps between two steps.
        """
        self.plan: StepPlan | None = None
        """Plan of the running step; set by the device thread."""
        self.is_stalled = False
        """True while the running step, or the work between two steps, exceeds its limit."""
        self.num_steps = 0
        """Number of steps that have ended; counted by the device thread."""
        self._predict_s = predict_s
        self._inbox = inbox
        self._limit_s = float("inf")  # limit that was exceeded last
        self._lost: str | None = None
        self._open: set[Waiter] = set()
        self._num_turns = 0
        self._seen: tuple[StepPlan | None, int] = (None, 0)
        """The running step and the device thread's progress at the last look."""
        self._lasted_s = 0.0
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="specdec-watchdog", daemon=True).start()

    def end(self) -> None:
        """Stop watching. Idempotent."""
        self._ended.set()

    def give_up(self, why: str) -> None:
        """Note that the device is lost: it stays stalled from now on. Any thread may call this."""
        self._lost, self.is_stalled = why, True
        self._fail_open()

    def note_turn(self) -> None:
        """Note the end of the device thread's turn, with or without a step."""
        self._num_turns += 1
        if self.plan is not None:
            self.plan = None
            self.num_steps += 1

    def limit_s(self) -> float:
        """Return the limit of the running step in seconds; infinite without a prediction."""
        return self._limit_of(self.plan)

    def require_moving(self) -> None:
        """Raise Unavailable while the device is stalled."""
        if self.is_stalled:
            raise self._stalled()

    async def answer_to(self, waiter: Waiter) -> Any:
        """Wait for the answer of the device thread.

        Raises:
            Unavailable: the device is stalled, or stalls meanwhile; the command still runs once it continues.
            SpecdecError: the answer is an error.
        """
        # In this order: a waiter that is added after the stall was reported finds the device stalled.
        self._open.add(waiter)
        try:
            self.require_moving()
            return await waiter.future
        finally:
            self._open.discard(waiter)

    def believed_s(self, step_s: float) -> float:
        """Return the duration to learn from a step that took `step_s` seconds and has just ended.

        A hang must not be learned, but a device that stays slow must be, so a stalled step counts with its limit.
        """
        return min(step_s, self._limit_s) if self.is_stalled else step_s

    def _run(self) -> None:
        num_quiet = num_steps = 0
        while not self._ended.wait(LOOK_INTERVAL_S * (_REST_FACTOR if num_quiet > _QUIET_LOOKS else 1)):
            is_quiet = self.num_steps == num_steps and self._is_idle()
            num_quiet, num_steps = num_quiet + 1 if is_quiet else 0, self.num_steps
            self._look()

    def _is_idle(self) -> bool:
        """Return whether the device thread has nothing to do."""
        return self.plan is None and not self._inbox.has_work

    def _look(self) -> None:
        if self._lost is not None:
            return
        plan, progress = self.plan, self._num_turns + self._inbox.progress
        has_moved = plan is not self._seen[0] or progress != self._seen[1]
        self._seen = plan, progress
        if has_moved or self._is_idle():
            self._lasted_s = 0.0
            is_stalled = False
        else:
            self._lasted_s += LOOK_INTERVAL_S
            is_stalled = self.is_stalled or self._is_beyond(plan)
        if is_stalled != self.is_stalled:
            self.is_stalled = is_stalled
            self._tell()

    def _is_beyond(self, plan: StepPlan | None) -> bool:
        if self._lasted_s <= PATIENCE_S:
            return False
        limit_s = self._limit_of(plan)
        if self._lasted_s <= limit_s:
            return False
        self._limit_s = limit_s
        return True

    def _limit_of(self, plan: StepPlan | None) -> float:
        return PATIENCE_S if plan is None else PATIENCE_FACTOR * self._predict_s(load_of(plan)) + PATIENCE_S

    def _tell(self) -> None:
        if not self.is_stalled:
            _log.warning("the stalled device moves again: accepting calls")
            return
        _log.error("device hangs: limit_s=%.1f failed_calls=%d", self._limit_s, len(self._open))
        self._fail_open()

    def _fail_open(self) -> None:
        outbox = Outbox()
        for waiter in list(self._open):
            outbox.put(waiter, self._stalled())
        outbox.deliver()

    def _stalled(self) -> Unavailable:
        return Unavailable(self._lost or "the device of this replica hangs")


def load_of(plan: StepPlan) -> StepLoad:
    """Return the load of a plan; `scheduler` defines which slices count as prefill."""
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
