"""Whether a device that failed a step can run steps at all.

An accelerator that met an illegal address, or fell off its bus, fails every step from then on, and a process that can
answer nothing is better restarted. One request may bring down its own step as well, and memory may be short for a
moment: so a failure alone says little, and what decides is another step of that shape with tokens that belong to
nobody. Of that shape, for a single token may take another way through the libraries than what fails.

Not here: what becomes of the failed step's calls. Called by `steps`, on the device thread.
"""

from __future__ import annotations

import logging

import torch

from specdec.engine.base import SequenceSlice, StepPlan, Worker, WorkerLost
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.sessions.block_manager import BlockManager
from specdec.errors import Internal
from specdec.types import BLOCK_TOKENS

#: So many failed steps make the device suspect, where none as large goes well between them; an error that the
#: accelerator's driver names, at once.
MOST_FAILURES = 3

_log = logging.getLogger(__name__)


class DeviceLost(Internal):
    """The device has failed for good."""


class DeviceHealth:
    """The record of one worker's steps. Device thread only."""

    def __init__(self, worker: Worker, blocks: BlockManager) -> None:
        self._worker = worker
        self._blocks = blocks
        self._num_failed = 0
        self._failed_tokens = 0
        """Of the last of them."""

    def note_step(self, num_tokens: int) -> None:
        """A step of so many tokens went well."""
        if num_tokens >= self._failed_tokens:
            self._num_failed = 0

    def note_failure(self, error: Exception, plan: StepPlan | None) -> None:
        """A step failed; its sessions' blocks have been freed.

        Args:
            error: that it raised.
            plan: what it ran; None where it failed before that was known.

        Raises:
            DeviceLost: and another one like it, of nobody's tokens, fails too; or the worker is lost.
        """
        if isinstance(error, WorkerLost):
            raise DeviceLost(error.message) from error
        if _is_out_of_memory(error):
            return
        self._num_failed += 1
        self._failed_tokens = 1 if plan is None else sum(len(part.token_ids) for part in plan.slices)
        if self._num_failed < MOST_FAILURES and not _is_of_accelerator(error):
            return
        failure = self._check(plan)
        if failure is not None:
            raise DeviceLost(f"the device failed for good, after a step a check of nobody's tokens as well: {failure}")
        _log.warning("a check of nobody's tokens went well: the device serves on")
        self._num_failed = 0

    def _check(self, plan: StepPlan | None) -> Exception | None:
        """Runs tokens in blocks of their own; None where that goes well, or says nothing of the device."""
        lengths = [1] if plan is None else [min(len(part.token_ids), BLOCK_TOKENS) for part in plan.slices]
        lengths = lengths[: self._blocks.num_available]
        table: list[int] = []
        if not lengths or not self._blocks.grow(table, len(lengths) * BLOCK_TOKENS):
            return None
        slices = (
            SequenceSlice((0,) * length, 0, (block,), 1) for length, block in zip(lengths, table, strict=True)
        )  # fmt: skip
        try:
            StepLogits.read(self._worker.execute(StepPlan(tuple(slices))))
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
        isinstance(error, RuntimeError) and str(error).startswith(("CUDA error", "Triton Error [CUDA]"))
    )
