"""A worker whose steps a test can wait for and hold up.

A draft replica with one session runs a call's steps with one slice each; a step of several slices is one of branches.
Called by tests of pre-drafting.
"""

from __future__ import annotations

import asyncio
import threading

import torch

from specdec.engine.base import StepPlan, Worker

_PATIENCE_S = 60.0


class WatchedWorker(Worker):
    """Implements `specdec.engine.base.Worker` by another one."""

    def __init__(self, worker: Worker) -> None:
        self.shape = worker.shape
        self.worker = worker
        self.plans: list[StepPlan] = []
        self._branch_steps = threading.Semaphore(0)
        self._changed = threading.Condition()
        self._last_allowed: int | None = None  # number of the last step that may run; None: all may

    def execute(self, plan: StepPlan) -> torch.Tensor:
        with self._changed:
            self.plans.append(plan)
            number = len(self.plans)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._last_allowed is None or number <= self._last_allowed)
        if len(plan.slices) > 1:
            self._branch_steps.release()
        return self.worker.execute(plan)

    @property
    def num_own_steps(self) -> int:
        """Steps that were not of branches."""
        return sum(len(plan.slices) == 1 for plan in self.plans)

    async def grown(self, num_steps: int) -> None:
        """Returns once that many more steps of branches have begun; a call made now is admitted after the last."""
        for _ in range(num_steps):
            if not await asyncio.to_thread(self._branch_steps.acquire, True, _PATIENCE_S):
                raise TimeoutError("the branches did not grow")

    def forget(self) -> None:
        """Forgets the steps of branches so far, none of which may be still to come."""
        while self._branch_steps.acquire(blocking=False):
            pass

    def allow(self, num_steps: int) -> None:
        """Lets that many more steps run; the one after them is held."""
        with self._changed:
            self._last_allowed = len(self.plans) + num_steps
            self._changed.notify_all()

    async def held(self) -> None:
        """Returns once a step is held."""
        await asyncio.to_thread(self._wait_until_held)

    def let_go(self) -> None:
        """Lets all steps run."""
        with self._changed:
            self._last_allowed = None
            self._changed.notify_all()

    def _wait_until_held(self) -> None:
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._last_allowed is not None and len(self.plans) > self._last_allowed, _PATIENCE_S
            ):
                raise TimeoutError("no step was held")
