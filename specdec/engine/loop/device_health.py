"""Decide after failed steps whether the device can still run steps.

An accelerator that met an illegal address, or fell off its bus, fails every later step, and its process should be
restarted. But a single request can also crash its own step, and memory can be short for a moment. A probe therefore
decides: a step of the same shape with tokens of no session. The shape matters, because a single token may take another
path through the libraries.

`steps` ends the failed step's calls, and calls this on the device thread.
"""

from __future__ import annotations

import logging

import torch

from specdec.contract.errors import Internal
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice, StepPlan, Worker, WorkerLost
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.sessions.block_manager import BlockManager

#: Number of failed steps, without a successful one as large between them, after which the device is probed. An error
#: that the accelerator's driver reports causes a probe at once.
MOST_FAILURES = 3

_log = logging.getLogger(__name__)


class DeviceLost(Internal):
    """The device has failed permanently."""


class DeviceHealth:
    """The record of one worker's steps. Device thread only."""

    def __init__(self, worker: Worker, blocks: BlockManager) -> None:
        self._worker = worker
        self._blocks = blocks
        self._num_failed = 0
        self._failed_tokens = 0
        """Number of tokens of the last failed step."""

    def note_step(self, num_tokens: int) -> None:
        """Note a successful step of `num_tokens` tokens."""
        if num_tokens >= self._failed_tokens:
            self._num_failed = 0

    def note_failure(self, error: Exception, plan: StepPlan | None) -> None:
        """Note a failed step, after its sessions' blocks were freed.

        Args:
            error: the error that the step raised.
            plan: its plan; None if it failed before planning.

        Raises:
            DeviceLost: a probe of the same shape fails too, or the worker is lost.
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
            raise DeviceLost(
                f"the device failed permanently: a step failed, and so did a probe of its shape: {failure}"
            )
        _log.warning("device probe succeeded after a failed step; continuing to serve")
        self._num_failed = 0

    def _check(self, plan: StepPlan | None) -> Exception | None:
        """Run a probe in blocks of its own; return its error, or None if it succeeds or proves nothing."""
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
