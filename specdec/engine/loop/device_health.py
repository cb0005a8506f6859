"""Whether a device that failed a step can run steps at all.

An accelerator that met an illegal address, or fell off its bus, fails every step from then on, and a process that can
answer nothing is better restarted. One request may bring down its own step as well, and memory may be short for a
moment: so a failure alone says little, and what decides is a step of one token that belongs to nobody.

Not here: what becomes of the failed step's calls. Called by `steps`, on the device thread.
"""

from __future__ import annotations

import logging

import torch

from specdec.engine.base import SequenceSlice, StepPlan, Worker, WorkerLost
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.sessions.block_manager import BlockManager
from specdec.errors import Internal

#: So many failed steps in a row make the device suspect; an error that the accelerator's driver names, at once.
MOST_FAILURES_IN_A_ROW = 3

_log = logging.getLogger(__name__)


class DeviceLost(Internal):
    """The device has failed for good."""


class DeviceHealth:
    """The record of one worker's steps. Device thread only."""

    def __init__(self, worker: Worker, blocks: BlockManager) -> None:
        self._worker = worker
        self._blocks = blocks
        self._num_failed = 0

    def note_step(self) -> None:
        """A step went well."""
        self._num_failed = 0

    def note_failure(self, error: Exception) -> None:
        """A step failed; its sessions' blocks have been freed.

        Raises:
            DeviceLost: and another one, of a single token, fails too; or the worker is lost.
        """
        if isinstance(error, WorkerLost):
            raise DeviceLost(error.message) from error
        if _is_out_of_memory(error):
            return
        self._num_failed += 1
        if self._num_failed < MOST_FAILURES_IN_A_ROW and not _is_of_accelerator(error):
            return
        failure = self._check()
        if failure is not None:
            raise DeviceLost(f"the device failed for good, after a step a check of one token as well: {failure}")
        _log.warning("a check of one token went well: the device serves on")
        self._num_failed = 0

    def _check(self) -> Exception | None:
        """Runs one token in a block of its own; None where that goes well, or says nothing of the device."""
        table: list[int] = []
        if not self._blocks.grow(table, 1):
            return None
        try:
            StepLogits.read(self._worker.execute(StepPlan((SequenceSlice((0,), 0, tuple(table), 1),))))
        except Exception as error:
            return None if _is_out_of_memory(error) else error
        finally:
            self._blocks.free(table)
        return None


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error)
    )


def _is_of_accelerator(error: Exception) -> bool:
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and str(error).startswith("CUDA error")
    )
